"""CacheEngine: the KV tensors of the device and host pools, and the transfer of blocks between them."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagoda.base.errors import ConfigError
from pagoda.core.kv import KVGroupSpec, KVShape, by_pool
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.kernels.batch import KVLayer
from pagoda.kernels.kv_cache.device_blocks import DeviceBlocks
from pagoda.worker.devices import Device
from pagoda.worker.memory import KVSlot, kv_slots


class CacheEngine:
    """Owns the pools. The scheduler decides what each block contains.

    layers: the KVLayer of each layer with a KV cache. The i-th layers of all groups with attention share the i-th slot
        (see KVGroupSpec), so with several groups some of these share memory. States have tensors of their own.
    num_blocks: of attention, or of states if the model has no other KV.
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
        num_states: int = 0,
        num_host_states: int = 0,
    ) -> None:
        """num_blocks: usable blocks, in addition to the null block 0.   dtype: 8 bits add scales.

        make_blocks: see CacheOps.   num_states, num_host_states: blocks of a second pool, of states.
        """
        self.num_blocks = num_blocks
        self.swap_s = 0.0
        layers: dict[int, KVLayer] = {}
        self._pools: list[_Pool] = []
        self._planes: list[torch.Tensor] = []  # of the first pool
        counts = (num_blocks, num_host_blocks), (num_states, num_host_states)
        after = after_host = 0
        for of_pool, (count, host_count) in zip(by_pool(groups), counts, strict=False):
            if of_pool and of_pool[0].has_states:
                planes = _add_states(layers, of_pool, count + 1, dtype, device)
            else:
                planes = _add_pages(layers, of_pool, count + 1, block_size, dtype, device)
            self._planes = self._planes or planes
            blocks, host = make_blocks(planes), None
            if host_count > 0 and planes:
                # Host block ids start at 1, like the device's, so the host pool also has a block 0.
                host = HostBlocks(blocks, host_count + 1, device)
            self._pools.append(_Pool(blocks, host, after, after_host))
            after, after_host = after + count, after_host + host_count
        if sorted(layers) != list(range(len(layers))):
            raise ConfigError(f"KV groups must name every layer once, got layers {sorted(layers)}")
        self.layers = [layers[layer] for layer in sorted(layers)]

    def host_memory(self) -> list[np.ndarray]:
        """Return the memory of the first pool, of a device that is the host: uint8 [num_blocks + 1, bytes per block].

        One array for each of its planes, in the same order for the same layers and shapes.
        """
        return [plane.view(torch.uint8).numpy() for plane in self._planes]

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
        for pool, own in self._divide(pairs, True, False):
            if pool.host is not None:
                pool.host.store(pool.blocks.read(own[:, 0]), own[:, 1])

    def swap_in(self, pairs: np.ndarray) -> None:
        """Copy host blocks pairs[:, 0] to device blocks pairs[:, 1]; int32 [k, 2]."""
        for pool, own in self._divide(pairs, False, True):
            if pool.host is not None:
                pool.blocks.write(own[:, 1], pool.host.load(own[:, 0]))

    def copy(self, pairs: np.ndarray) -> None:
        """Copy device blocks pairs[:, 0] to device blocks pairs[:, 1]; read all sources before writing any target."""
        for pool, own in self._divide(pairs, True, True):
            pool.blocks.copy(own)

    def _divide(self, pairs: np.ndarray, *on_device: bool) -> "Iterator[tuple[_Pool, np.ndarray]]":
        """Yield the pairs of each pool that has some, with the numbers its blocks have in the pool.

        on_device: whether the first of a pair is a block of the device, and whether the second is.
        """
        if len(self._pools) == 1:
            if len(pairs):
                yield self._pools[0], pairs
            return
        column = 0 if on_device[0] else 1
        is_state = pairs[:, column] > self._pools[1].after
        for number, pool in enumerate(self._pools):
            if (is_state == bool(number)).any():
                shift = [pool.after if of_device else pool.after_host for of_device in on_device]
                yield pool, pairs[is_state == bool(number)] - np.array(shift, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    """Blocks that can take the place of each other.   after, after_host: the last ids of the pools before it."""

    blocks: DeviceBlocks
    host: "HostBlocks | None"
    after: int
    after_host: int


def _add_pages(
    layers: dict[int, KVLayer],
    groups: tuple[KVGroupSpec, ...],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: Device,
) -> list[torch.Tensor]:
    """Add the layers of `groups`, which have attention. Return the tensors with their blocks."""
    planes = [_new_planes(slot, num_blocks, block_size, dtype, device) for slot in kv_slots(groups)]
    for group in groups:
        for number, layer in enumerate(group.layers):
            layers[layer] = planes[number].seen_as(group.shape, block_size)
    return [plane for of_slot in planes for plane in of_slot]


def _add_states(
    layers: dict[int, KVLayer], groups: tuple[KVGroupSpec, ...], num_blocks: int, dtype: torch.dtype, device: Device
) -> list[torch.Tensor]:
    """Add the layers of `groups`, which are recurrent. Return the tensors with their states."""
    planes: list[torch.Tensor] = []
    for group in groups:
        shape = group.shape
        for layer in group.layers:
            k = device.zeros((num_blocks, shape.num_heads * shape.key_dim), dtype)
            v = device.zeros((num_blocks, shape.state_size), torch.float32) if shape.state else None
            window = k.unflatten(1, (shape.num_heads, 1, shape.key_dim))
            layers[layer] = KVLayer(window, window[..., :0] if v is None else v.unflatten(1, shape.state))
            planes += [k] if v is None else [k, v]
    return planes


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


def _begin(plane: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return plane[:, : math.prod(shape)].unflatten(1, shape)


def _new_planes(slot: KVSlot, num_blocks: int, block_size: int, dtype: torch.dtype, device: Device) -> _Planes:
    def plane(elements: int, of: torch.dtype = dtype) -> torch.Tensor:
        # Zeros, not garbage, because a kernel may multiply slots past a row's end by 0, and 0 times NaN is NaN.
        return device.zeros((num_blocks, elements), of)

    k, v = plane(slot.keys * block_size), plane(slot.values * block_size)
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
