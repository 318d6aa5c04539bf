"""CacheEngine: the KV tensors of the device and the host pool, and the moving of whole blocks between them."""

import mmap
import time

import numpy as np
import torch

from pagoda.base.errors import ConfigError
from pagoda.core.kv_specs import KVGroupSpec, layers_per_block
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.kernels.batch import KVLayer


class CacheEngine:
    """Owns the pools. Which block holds what is the scheduler's business.

    layers: KVLayer of each of the model's layers. The i-th layer of every group shares the i-th tensor (see
    KVGroupSpec), so
        the list names some tensors more than once when the model has several groups.
    """

    def __init__(
        self,
        groups: tuple[KVGroupSpec, ...],
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """num_blocks: usable blocks; the null block 0 is added to them. dtype int8 adds scales."""
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        shape = (num_kv_heads, block_size, head_dim)
        num_slots = layers_per_block(groups)
        self._device = [_new_layer((num_blocks + 1, *shape), dtype, device) for _ in range(num_slots)]
        self._host: list[KVLayer] = []
        if num_host_blocks > 0:
            # Block ids of the host pool count like the device's, so it has a block 0 too.
            host_shape = (num_host_blocks + 1, *shape)
            self._host = [_new_layer(host_shape, dtype, torch.device("cpu")) for _ in range(num_slots)]
        slot_of_layer = {layer: slot for group in groups for slot, layer in enumerate(group.layers)}
        if sorted(slot_of_layer) != list(range(len(slot_of_layer))):
            raise ConfigError(f"KV groups must name every layer once, got layers {sorted(slot_of_layer)}")
        self.layers = [self._device[slot_of_layer[layer]] for layer in sorted(slot_of_layer)]

    def apply(self, output: SchedulerOutput) -> float:
        """Do the step's block moves: all swaps out, then all swaps in, then all copies. Returns the seconds swaps took.

        Whatever is run on the device afterwards comes after them.
        """
        swap_s = 0.0
        if len(output.swap_out) or len(output.swap_in):
            begin_s = time.perf_counter()
            self.swap_out(output.swap_out)
            self.swap_in(output.swap_in)
            swap_s = time.perf_counter() - begin_s
        self.copy(output.copies)
        return swap_s

    def swap_out(self, pairs: np.ndarray) -> None:
        """Device blocks pairs[:, 0] to host blocks pairs[:, 1]; int32 [k, 2]."""
        _move(pairs, self._device, self._host)

    def swap_in(self, pairs: np.ndarray) -> None:
        """Host blocks pairs[:, 0] to device blocks pairs[:, 1]; int32 [k, 2]."""
        _move(pairs, self._host, self._device)

    def copy(self, pairs: np.ndarray) -> None:
        """Device blocks pairs[:, 0] to device blocks pairs[:, 1]; all sources are read before a target is written."""
        _move(pairs, self._device, self._device)


def _planes(layer: KVLayer) -> list[torch.Tensor]:
    return [plane for plane in (layer.k, layer.v, layer.k_scale, layer.v_scale) if plane is not None]


def _move(pairs: np.ndarray, sources: list[KVLayer], targets: list[KVLayer]) -> None:
    if not len(pairs):
        return
    index = torch.from_numpy(pairs.astype(np.int64))
    for source, target in zip(sources, targets, strict=True):
        for from_plane, to_plane in zip(_planes(source), _planes(target), strict=True):
            blocks = from_plane.index_select(0, index[:, 0].to(from_plane.device))
            to_plane.index_copy_(0, index[:, 1].to(to_plane.device), blocks.to(to_plane.device))


def _new_layer(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> KVLayer:
    if dtype != torch.int8:
        return KVLayer(_zeros(shape, dtype, device), _zeros(shape, dtype, device))
    scales = shape[:3]
    return KVLayer(
        _zeros(shape, dtype, device),
        _zeros(shape, dtype, device),
        _zeros(scales, torch.float32, device),
        _zeros(scales, torch.float32, device),
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose pages come when they are first written.

    Zeros and not garbage: a kernel may multiply slots past a row's end by 0, and 0 times NaN is NaN.
    Not asked to lie on huge pages, as weights are: attention asks for its pages early, so that they gain 2 % of a step,
    while two of them for each layer, zeroed when a new block crosses into them, hold a step up by 0.1 s in a virtual
    machine.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    mapping = mmap.mmap(-1, int(np.prod(shape)) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)  # keeps the mapping alive
