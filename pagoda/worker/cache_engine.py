"""CacheEngine: the KV tensors of the device and host pools, and the transfer of blocks between them."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagoda.base.errors import ConfigError
from pagoda.core.kv import KVGroupKind, KVGroupSpec, KVShape
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.kernels.batch import KVLayer
from pagoda.kernels.kv_cache.device_blocks import DeviceBlocks
from pagoda.worker.devices import Device
from pagoda.worker.memory import KVSlot, kv_slots, state_size


class CacheEngine:
    """Owns the pools. The scheduler decides what each block contains.

    layers: the KVLayer of each layer with a KV cache. The i-th layers of all groups share the i-th slot (see
        KVGroupSpec), so with several groups some of these share memory.
    swap_s: seconds that the host spent on the swaps of the last step.
    """

    def __init__(
        self,
        groups: tuple[KVGroupSpec, ...],
        block_size: int,
        num_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: Device,
        make_blocks: Callable[[Sequence[torch.Tensor]], DeviceBlocks] = DeviceBlocks,
    ) -> None:
        """num_blocks: usable blocks, in addition to the null block 0.   dtype: 8 bits add scales.

        make_blocks: see CacheOps.
        """
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.swap_s = 0.0
        slots = kv_slots(groups)
        planes = [_new_planes(slot, num_blocks + 1, block_size, dtype, device) for slot in slots]
        self._blocks = make_blocks([plane for of_slot in planes for plane in of_slot])
        self._host: HostBlocks | None = None
        if num_host_blocks > 0 and slots:
            # Host block ids start at 1, like the device's, so the host pool also has a block 0.
            self._host = HostBlocks(self._blocks, num_host_blocks + 1, device)
        layers: dict[int, KVLayer] = {}
        for group in groups:
            for number, layer in enumerate(group.layers):
                turn, slot = divmod(number, len(slots))
                if group.kind is KVGroupKind.STATE:
                    layers[layer] = planes[slot].state(group.shape, turn * state_size(group))
                else:
                    layers[layer] = planes[slot].seen_as(group.shape, block_size)
        if sorted(layers) != list(range(len(layers))):
            raise ConfigError(f"KV groups must name every layer once, got layers {sorted(layers)}")
        self.layers = [layers[layer] for layer in sorted(layers)]

    def apply(self, output: SchedulerOutput) -> None:
        """Run the step's swaps out, then swaps in, then block copies; set `swap_s`.

        On a GPU blocks move next to the computations: what is submitted to it afterwards waits for the blocks that come
        in, not for those that go out.
        """
        self.swap_s = 0.0
        if len(output.swap_out) or len(output.swap_in):
            begin_s = time.perf_counter()
            self.swap_out(output.swap_out)
            self.swap_in(output.swap_in)
            self.swap_s = time.perf_counter() - begin_s
        self.copy(output.copies)

    def swap_out(self, pairs: np.ndarray) -> None:
        """Copy device blocks pairs[:, 0] to host blocks pairs[:, 1]; int32 [k, 2]."""
        if self._host is not None and len(pairs):
            self._host.store(self._blocks.read(pairs[:, 0]), pairs[:, 1])

    def swap_in(self, pairs: np.ndarray) -> None:
        """Copy host blocks pairs[:, 0] to device blocks pairs[:, 1]; int32 [k, 2]."""
        if self._host is not None and len(pairs):
            self._blocks.write(pairs[:, 1], self._host.load(pairs[:, 0]))

    def copy(self, pairs: np.ndarray) -> None:
        """Copy device blocks pairs[:, 0] to device blocks pairs[:, 1]; read all sources before writing any target."""
        if len(pairs):
            self._blocks.copy(pairs)


@dataclass(frozen=True, slots=True, eq=False)
class _Planes:
    """The tensors of one slot, [num_blocks, elements per block]; scales only for a cache of 8 bits."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (plane for plane in (self.k, self.v, self.k_scale, self.v_scale) if plane is not None and plane.numel())

    def seen_as(self, shape: KVShape, block_size: int) -> KVLayer:
        """Return a view of the beginning of each block as a KVLayer of this shape."""
        heads = shape.num_heads
        return KVLayer(
            _begin(self.k, (heads, block_size, shape.key_dim)),
            _begin(self.v, (heads, block_size, shape.value_dim)),
            None if self.k_scale is None else _begin(self.k_scale, (heads, block_size)),
            None if self.v_scale is None else _begin(self.v_scale, (heads, block_size)),
        )

    def state(self, shape: KVShape, first: int) -> KVLayer:
        """Return a view of the state in each block that begins at element `first`."""
        size = shape.num_heads * shape.key_dim
        k = self.k[:, first : first + size].unflatten(1, (shape.num_heads, 1, shape.key_dim))
        return KVLayer(k, k[..., :0])


def _begin(plane: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return plane[:, : math.prod(shape)].unflatten(1, shape)


def _new_planes(slot: KVSlot, num_blocks: int, block_size: int, dtype: torch.dtype, device: Device) -> _Planes:
    def plane(elements: int, of: torch.dtype = dtype) -> torch.Tensor:
        # Zeros, not garbage, because a kernel may multiply slots past a row's end by 0, and 0 times NaN is NaN.
        return device.zeros((num_blocks, elements), of)

    k = plane(slot.keys_per_block(block_size))
    v = plane(slot.values * block_size) if slot.values else k[:, :0]  # a slot of states alone
    if dtype.itemsize > 1:
        return _Planes(k, v, None, None)
    return _Planes(k, v, *(plane(slot.scales * block_size, torch.float32) for _ in range(2)))


class HostBlocks:
    """Blocks of a device that are kept in host memory."""

    def __init__(self, blocks: DeviceBlocks, num_blocks: int, device: Device) -> None:
        memory = device.new_host_memory(num_blocks * blocks.words * blocks.word.itemsize)
        self._memory = memory.view(blocks.word).view(num_blocks, blocks.words)
        self._device = device

    def store(self, blocks: torch.Tensor, ids: np.ndarray) -> None:
        """Begin to keep blocks [k, words] as `ids` (int32 [k])."""
        self._device.store(blocks, self._rows(ids))

    def load(self, ids: np.ndarray) -> torch.Tensor:
        """Return blocks `ids` on the device: [k, words]."""
        return self._device.load(self._rows(ids))

    def _rows(self, ids: np.ndarray) -> list[torch.Tensor]:
        """Return the memory of blocks `ids`, in pieces of consecutive ids."""
        begins = np.concatenate([[0], np.flatnonzero(np.diff(ids) != 1) + 1, [len(ids)]])
        first, count = ids[begins[:-1]].tolist(), np.diff(begins).tolist()
        return [self._memory[start : start + num] for start, num in zip(first, count, strict=True)]
