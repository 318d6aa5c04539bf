"""Available memory, what KV blocks and prompt embeddings take of it, and how many blocks fit.

Does not import torch, for `pagoda plan`.
"""

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagoda.base.abbreviate import human_bytes
from pagoda.base.config import CacheConfig, DebugConfig
from pagoda.base.dtypes import DTYPE_BYTES, WITH_SCALES
from pagoda.base.errors import CapacityError, ConfigError
from pagoda.base.server_config import MAX_HELD_BODY_BYTES, MAX_HELD_MEDIA_BYTES, ServerLimits
from pagoda.core.kv import BlockCounts, KVGroupSpec, KVSizing, by_pool, exceeds, layers_per_block
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.layers.module import parameters
from pagoda.layers.parameter import Matrix, Vector
from pagoda.models.base import ENCODER_PIECE_TOKENS, Encoder
from pagoda.process.cgroups import cgroup_folders

_MAX_BLOCKS = 2**31 - 2  # block ids are int32
_GIB = 1024**3
_FILE_PAGES = ("inactive_file", "active_file", "file_mapped", "shmem")
_FILE_PAGES_V1 = ("total_inactive_file", "total_active_file", "total_mapped_file", "total_shmem")


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """The sizes of the KV pools.

    num_blocks, num_host_blocks: usable blocks.   block_bytes: bytes per block, all layers included.
    max_tokens: longest single sequence that fits in the pool.
    num_states, num_host_states, state_bytes: the same of blocks of states, where they have pools of their own; else 0.
    """

    num_blocks: int
    num_host_blocks: int
    block_size: int
    block_bytes: int
    max_tokens: int
    num_states: int = 0
    num_host_states: int = 0
    state_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.num_states * self.state_bytes

    @property
    def device_bytes(self) -> int:
        """Of the pools with their null blocks."""
        return self.pool_bytes + self.block_bytes + self.state_bytes

    @property
    def host_bytes(self) -> int:
        return self.num_host_blocks * self.block_bytes + self.num_host_states * self.state_bytes


def smallest(capacities: Sequence[KVCapacity]) -> KVCapacity:
    """Return what fits on every rank: the fewest blocks of each pool, in bytes of the rank whose blocks are largest."""
    return KVCapacity(
        min(one.num_blocks for one in capacities),
        min(one.num_host_blocks for one in capacities),
        capacities[0].block_size,
        max(one.block_bytes for one in capacities),
        min(one.max_tokens for one in capacities),
        min(one.num_states for one in capacities),
        min(one.num_host_states for one in capacities),
        max(one.state_bytes for one in capacities),
    )


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate: the minimum over the machine's available memory, the
    limits of its cgroups (v1 or v2) and its address space limit (ulimit -v).

    root: where /proc and /sys are (for tests). Reclaimable page cache counts as available, but for the files that are
    mapped: engines read their weights from such.
    """
    available, mapped, shared = (_meminfo(root, field) for field in ("MemAvailable", "Mapped", "Shmem"))
    if available is not None:
        available -= max(0, (mapped or 0) - (shared or 0))  # shared memory was not available anyway
    found = [available, _address_space_left(root), *(left for _, left in _cgroup_limits(root))]
    known = [value for value in found if value is not None]
    if not known:
        raise ConfigError("cannot read how much memory the machine has; set kv_cache_memory in bytes")
    return max(0, min(known))


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the most bytes that this process could ever allocate, whatever else runs; None if that is not known.

    The minimum over the machine's memory, the limits of its cgroups and what its address space limit leaves.
    """
    found = [_meminfo(root, "MemTotal"), _address_space_left(root), *(one for one, _ in _cgroup_limits(root))]
    return min((value for value in found if value is not None), default=None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    """Return the number in a file; None if there is no file or no limit ("max")."""
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _meminfo(root: Path, field: str) -> int | None:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def _address_space_left(root: Path) -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = (_read(root / "proc/self/statm") or "").split()
    if limit == resource.RLIM_INFINITY or not pages:
        return None
    return limit - int(pages[0]) * resource.getpagesize()


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """Return each memory limit that applies to this process, and the bytes left under it."""
    found: list[tuple[int, int]] = []
    for directory, is_v2 in cgroup_folders("memory", root):
        limit = _read_int(directory / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        used = _read_int(directory / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
        if limit is None or used is None or limit >= 2**60:  # v1 writes a huge number for "none"
            continue
        stat = dict(line.split() for line in (_read(directory / "memory.stat") or "").splitlines())
        names = _FILE_PAGES if is_v2 else _FILE_PAGES_V1
        inactive, active, mapped, shared = (int(stat.get(name, 0)) for name in names)
        unmapped = inactive + active - max(0, mapped - shared)  # pages read through a mapping are inactive at first
        found.append((limit, limit - used + max(0, min(inactive, unmapped))))
    return found


def plan_capacity(
    groups: tuple[KVGroupSpec, ...],
    cache: CacheConfig,
    kv_dtype: str,
    max_model_len: int,
    free_bytes: int,
    scheduler: SchedulerOptions,
    debug: DebugConfig | None = None,
    block_bytes: BlockCounts | None = None,
) -> KVCapacity:
    """Size the pools of a rank by `kv_cache_memory` bytes, else `gpu_memory_utilization` of free_bytes.

    free_bytes: free device memory after loading the weights.   scheduler: its chunk sizes determine how many blocks a
    sliding window needs.   debug: its `num_blocks` and `num_host_blocks`, where given, are taken as they are.
    block_bytes: of a block of each pool on this rank; None: `groups` are all that it computes.
    Raises CapacityError if one sequence of max_model_len does not fit; an explicit num_blocks is not checked.
    """
    debug = debug or DebugConfig()
    if not groups:  # one block, which nothing needs and which takes no memory
        return KVCapacity(1, 0, cache.block_size, 0, max_model_len)
    sizing = KVSizing.of(groups, cache.block_size, max_model_len, scheduler)
    of_blocks = block_bytes or bytes_of_blocks(groups, kv_dtype, cache.block_size)
    budget = cache.kv_cache_memory
    if budget is None:
        budget = int(free_bytes * cache.gpu_memory_utilization)
    num_blocks = debug.num_blocks
    if num_blocks is None:
        num_blocks = _most_blocks(sizing, budget, of_blocks)
        needed = sizing.blocks_for_request(max_model_len, scheduler.max_encoder_len)
        if exceeds(needed, sizing.pool_sizes(num_blocks)):
            fits = _longest_request(groups, cache.block_size, max_model_len, num_blocks, scheduler)
            at_least = pool_bytes_of(sizing, needed[0], of_blocks)
            raise CapacityError(_too_little(cache, max_model_len, budget, at_least, fits))
    host_blocks = debug.num_host_blocks
    if host_blocks is None:
        host_blocks = _most_blocks(sizing, int(cache.swap_space * _GIB) + sum(of_blocks), of_blocks)
    for count, what in ((num_blocks, "kv_cache_memory"), (host_blocks, "swap_space")):
        if count > _MAX_BLOCKS:
            raise CapacityError(f"{what} would make {count} blocks; at most {_MAX_BLOCKS} are possible: set it lower")
    fits = _longest_request(groups, cache.block_size, max_model_len, num_blocks, scheduler)
    num_states, num_host_states = (sum(sizing.pool_sizes(count)[1:]) for count in (num_blocks, host_blocks))
    counts = num_blocks, host_blocks, cache.block_size, of_blocks[0], fits
    return KVCapacity(*counts, num_states, num_host_states, sum(of_blocks[1:]))


def pool_bytes_of(sizing: KVSizing, num_blocks: int, block_bytes: BlockCounts) -> int:
    """Return the bytes of all pools, with their null blocks, if the first has `num_blocks`.

    block_bytes: of a block of each pool.
    """
    return sum((count + 1) * size for count, size in zip(sizing.pool_sizes(num_blocks), block_bytes, strict=True))


def _most_blocks(sizing: KVSizing, budget: int, block_bytes: BlockCounts) -> int:
    """Return the most blocks of the first pool with which all take no more than `budget` bytes."""
    low, high = 0, max(0, min(budget // max(block_bytes[0], 1), _MAX_BLOCKS + 2) - 1)  # a stage may have none of it
    while low < high:
        middle = (low + high + 1) // 2
        if pool_bytes_of(sizing, middle, block_bytes) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _longest_request(
    specs: tuple[KVGroupSpec, ...], block_size: int, max_model_len: int, num_blocks: int, scheduler: SchedulerOptions
) -> int:
    """The largest max_model_len (a multiple of block_size) of which one sequence fits `num_blocks` blocks.

    Of states alone, which any length has as many of: the model's.
    """
    low, high = 0, num_blocks  # in blocks of one group
    if all(spec.has_states for spec in specs):
        high = max_model_len // block_size
    while low < high:
        middle = (low + high + 1) // 2
        length = middle * block_size
        sizing = KVSizing.of(specs, block_size, length, scheduler)
        if not exceeds(sizing.blocks_for_request(length, scheduler.max_encoder_len), sizing.pool_sizes(num_blocks)):
            low = middle
        else:
            high = middle - 1
    return low * block_size


def require_host_memory(
    capacity: KVCapacity, cache: CacheConfig, limit_bytes: int | None, reserved_bytes: int, is_on_host: bool
) -> None:
    """Raise CapacityError if the pools are larger than the host's memory; the message says what fits.

    The pages of a pool are taken when they are first written, so otherwise a pool that is too large would start.
    limit_bytes: see `memory_limit`.   reserved_bytes: of the weights in host memory, and what else is planned there; if
    that alone is too large, this is no place to say so.   is_on_host: whether the KV cache is in host memory, too.
    """
    if limit_bytes is None or (left := limit_bytes - reserved_bytes) <= 0:
        return
    if is_on_host:
        pool = capacity.device_bytes
        if pool > left:
            given = cache.kv_cache_memory
            size = f"kv_cache_memory={given}" if given is not None else f"a KV cache of {capacity.num_blocks} blocks"
            raise CapacityError(
                f"{size} ({human_bytes(pool)}) does not fit in memory, of which the weights and what else is planned "
                f"leave {human_bytes(left)}; set kv_cache_memory={left} or less"
            )
        left -= pool
    swap = capacity.host_bytes
    if swap > left:
        raise CapacityError(
            f"swap_space={cache.swap_space} GiB does not fit in memory, of which the weights and the KV cache leave "
            f"{human_bytes(left)}; set swap_space={int(left / _GIB * 100) / 100} or less"
        )


def require_device_memory(capacity: KVCapacity, cache: CacheConfig, left_bytes: int, taken_by: str) -> None:
    """Raise CapacityError if a KV cache of the size that was given is larger than what a GPU has left.

    taken_by: what takes the rest of its memory.
    """
    pool = capacity.device_bytes
    if cache.kv_cache_memory is not None and pool > left_bytes:
        raise CapacityError(
            f"kv_cache_memory={cache.kv_cache_memory} does not fit in the GPU's memory, of which {taken_by} leave "
            f"{human_bytes(left_bytes)}; set kv_cache_memory={left_bytes} or less, or leave it out"
        )


def _too_little(cache: CacheConfig, max_model_len: int, budget: int, needed: int, fits: int) -> str:
    """Return the error message.   budget, needed: bytes.   fits: the longest max_model_len that fits, in tokens."""
    source = (
        f"kv_cache_memory={cache.kv_cache_memory}"
        if cache.kv_cache_memory is not None
        else f"gpu_memory_utilization={cache.gpu_memory_utilization} of the free memory"
    )
    remedy = f"set max_model_len={fits} or less, or " if fits > 0 else ""
    return (
        f"the KV cache gets {human_bytes(budget)} ({source}), but one sequence of max_model_len={max_model_len} "
        f"tokens needs {human_bytes(needed)}; {remedy}give the cache kv_cache_memory={needed} or more"
    )


_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVSlot:
    """One K and one V tensor, shared by the i-th layers of all groups and as large as the largest of them needs.

    keys, values: elements per token.   scales: per token and tensor, in a cache of 8 bits.
    """

    keys: int
    values: int
    scales: int


def kv_slots(groups: tuple[KVGroupSpec, ...]) -> tuple[KVSlot, ...]:
    """Return the slots of a block of `groups`, which have attention: as many as the largest group has layers."""
    slots: list[KVSlot] = []
    for slot in range(layers_per_block(groups)):
        shapes = [group.shape for group in groups if len(group.layers) > slot]
        slots.append(
            KVSlot(
                keys=max(shape.num_heads * shape.key_dim for shape in shapes),
                values=max(shape.num_heads * shape.value_dim for shape in shapes),
                scales=max(shape.num_heads for shape in shapes),
            )
        )
    return tuple(slots)


def kv_bytes_per_token(groups: tuple[KVGroupSpec, ...], kv_dtype: str) -> int:
    """Return the bytes of a token's K and V in all layers, without padding between unequal groups, and without states,
    of which a sequence has as many as blocks.
    """
    return sum(kv_block_bytes((group,), kv_dtype, 1) for group in groups if not group.has_states)


def bytes_of_blocks(groups: tuple[KVGroupSpec, ...], kv_dtype: str, block_size: int) -> BlockCounts:
    """Return the bytes of a block of each pool."""
    return tuple(
        state_bytes(pool, kv_dtype) if pool and pool[0].has_states else kv_block_bytes(pool, kv_dtype, block_size)
        for pool in by_pool(groups)
    )


def kv_block_bytes(groups: tuple[KVGroupSpec, ...], kv_dtype: str, block_size: int) -> int:
    """Return the bytes per block of `groups` with attention, in all slots: K and V, and the scales of 8 bits."""
    slots, scale_bytes = kv_slots(groups), _SCALE_BYTES if kv_dtype in WITH_SCALES else 0
    return sum(
        (slot.keys + slot.values) * block_size * DTYPE_BYTES[kv_dtype] + 2 * slot.scales * block_size * scale_bytes
        for slot in slots
    )


def state_bytes(groups: tuple[KVGroupSpec, ...], kv_dtype: str) -> int:
    """Return the bytes of the states of one sequence, in all recurrent layers; 0 without any."""
    return sum(
        len(group.layers) * (shape.num_heads * shape.key_dim * DTYPE_BYTES[kv_dtype] + 4 * shape.state_size)
        for group in groups
        if group.has_states
        for shape in (group.shape,)
    )


_HOST_BYTES = 2 * DTYPE_BYTES["float32"]
"""Per element: the API process and the engine process both keep it until its request ends."""


@dataclass(frozen=True, slots=True)
class EmbedsMemory:
    """The most bytes that the embeddings of all admitted requests take.

    host: of the processes that hold the requests.   device: of the worker, in the compute type.
    """

    host: int = 0
    device: int = 0

    @property
    def total(self) -> int:
        return self.host + self.device


def embeds_memory(size: int, dtype: str, limits: ServerLimits) -> EmbedsMemory:
    """Return what the limits on request bodies and on tokens admit.

    size: elements of an embedding.   dtype: the compute type.
    """
    # The smallest element in a body has two bytes, and base64 makes four characters of three bytes.
    elements = max(MAX_HELD_BODY_BYTES, limits.max_body_bytes) * 3 // 8
    if limits.max_queued_tokens:
        elements = min(elements, limits.max_queued_tokens * size)
    return EmbedsMemory(elements * _HOST_BYTES, elements * DTYPE_BYTES[dtype])


@dataclass(frozen=True, slots=True)
class EncoderMemory:
    """The most bytes that images, audio, or the texts of an encoder take.

    outputs: of the encoder, as many as are kept.   scratch: what its largest run takes besides.
    features: that requests hold, in the processes that hold requests, as far as a server admits them.
    """

    outputs: int = 0
    scratch: int = 0
    features: int = 0

    @property
    def total(self) -> int:
        return self.outputs + self.scratch + self.features


def encoder_memory(encoder: Encoder, dtype: str, largest_item: int, options: SchedulerOptions) -> EncoderMemory:
    """Return what a rank's encoder takes, from its shapes.

    dtype: the compute type.   largest_item: outputs of the longest item there can be.
    """
    num_bytes, per_output, longest = DTYPE_BYTES[dtype], encoder.tokens_per_output, encoder.largest_item()
    num_tokens = max(largest_item * per_output, min(ENCODER_PIECE_TOKENS, options.encoder_budget * per_output))
    assert longest.features is not None, "it has zeros"
    num_values = longest.features.size / (longest.length * per_output)
    declared = [parameter for _, parameter in parameters(encoder)]
    hidden = max(of.declared.size for of in declared if isinstance(of.declared, Vector))
    widest = max(of.shard.shape[0] for of in declared if isinstance(of.declared, Matrix))
    # x and the residual stream; what a layer's widest matrix gives, and what is made of that. The features are put in
    # order, joined with those of other items, and rounded.
    per_token = 2 * (hidden + widest) * num_bytes + num_values * (8 + num_bytes)
    return EncoderMemory(
        options.encoder_cache_tokens * encoder.output_size * num_bytes,
        int(num_tokens * per_token),
        0 if encoder.reads_text else _HELD_TWICE * MAX_HELD_MEDIA_BYTES,
    )


_HELD_TWICE = 2
"""By the API process, for a restart, and by the engine process."""
