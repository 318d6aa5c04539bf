"""What a model's layers ask of the KV cache, and how many blocks that is. Pure arithmetic: start-up, admission and
`pagoda plan` ask the same functions.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from pagoda.core.kv.block_pool import BlockCounts
from pagoda.core.scheduler_options import SchedulerOptions


class KVGroupKind(Enum):
    FULL = "full"  # attends to every earlier token
    WINDOW = "window"  # attends to the last `window` tokens, itself included
    CROSS = "cross"  # attends to the encoder's output; filled once, never grows
    STATE = "state"  # recurrent: reads the state that the token before left


STATE_WINDOW = 2
"""Window of STATE: a token reads what the one before it left. A full block is a snapshot, from which hits resume."""


_TOKENS_PER_SNAPSHOT = 512
"""Most tokens between two snapshots of a state that every text leaves."""

_ELEMENTS_PER_TOKEN = 256
"""A smaller state is kept more often: as long as that takes no more than so many elements per token and layer."""

_STATES_PER_SEQUENCE = 3
"""States that a sequence holds while it decodes: the last full block, the one that it writes, and the next one, which
is that of its drafts, or in which it goes on while the step that fills the second is in flight.

Where right drafts that are computed again end in the next block, those after them need a fourth for a step; without
room for it, that step has no drafts.
"""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token keeps in one layer: K [num_heads, key_dim] and V [num_heads, value_dim].

    Of a recurrent layer: what a block holds once: K, in the dtype of the cache, and `state`, in float32.
    """

    num_heads: int = 1
    key_dim: int = 1
    value_dim: int = 1
    state: tuple[int, ...] = ()

    @property
    def state_size(self) -> int:
        """Elements of `state`; 0 without one."""
        return math.prod(self.state) if self.state else 0

    @property
    def num_elements(self) -> int:
        """Elements of two bytes that a token keeps, or that a state has."""
        return self.num_heads * (self.key_dim + self.value_dim) + 2 * self.state_size


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers that share one block table.

    Groups with attention draw block ids from one pool. A block of any of them holds `block_size` tokens of as many
    layers as the largest has (`layers_per_block`), so blocks are interchangeable: the i-th layer of each group lives in
    the i-th KV tensor, at the block ids of its own group's table. A tensor has room for the largest shape.

    Groups of kind STATE have a pool of their own. Such a block holds the state after the last computed token among its
    own. The row overwrites it until the block is full; then the row goes on in the next block, and frees this one when
    that is full, too. Few of them stay findable (`KVGroup.keeps`), and of a chunk only those and the last one exist.

    kind: what the layers attend to.   window: tokens, for WINDOW and STATE (STATE_WINDOW); 0 otherwise.
    layers: indices of the layers that keep KV, ascending; a model's layer may have several attentions.
    shape: of their K and V.
    """

    kind: KVGroupKind = KVGroupKind.FULL
    window: int = 0
    layers: tuple[int, ...] = (0,)
    shape: KVShape = KVShape()

    @property
    def has_states(self) -> bool:
        return self.kind is KVGroupKind.STATE


def layers_per_block(groups: Iterable[KVGroupSpec]) -> int:
    """How many layers' KV one block carries: the size of the largest of these groups, which share a pool."""
    return max((len(group.layers) for group in groups), default=0)


def by_pool(groups: tuple[KVGroupSpec, ...]) -> tuple[tuple[KVGroupSpec, ...], ...]:
    """Return the groups of each pool: those with attention, then those with states."""
    pools = (tuple(group for group in groups if group.has_states is has_states) for has_states in (False, True))
    return tuple(pool for pool in pools if pool) or ((),)


def blocks_per_snapshot(groups: tuple[KVGroupSpec, ...], block_size: int) -> int:
    """Return how many blocks of every text leave one snapshot of its state: the larger states are, the more."""
    elements = max((group.shape.num_elements for group in groups if group.has_states), default=1)
    least, count = min(elements // _ELEMENTS_PER_TOKEN, _TOKENS_PER_SNAPSHOT), 1
    while count * block_size < least:
        count *= 2
    return count


def prefix_group(groups: tuple[KVGroupSpec, ...]) -> int:
    """Return the index of the group whose blocks tell best how much of a prompt is cached.

    The first that keeps all blocks of a sequence, from the first one on; without one, the first that grows.
    """
    growing = [index for index, group in enumerate(groups) if group.kind is not KVGroupKind.CROSS]
    return next((index for index in growing if not groups[index].window), growing[0] if growing else 0)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV group, with what follows from the settings.

    pool: index of the pool of its blocks.   block_size: tokens of a block.
    num_in_flight: the most tokens that are planned and not complete, of as many as `num_chunks` steps.
    stride: of states, blocks of every text that leave one snapshot; 1: every block is kept, as in attention.
    window: tokens; 0: none. A state's block is freed when the next one is full, so that a sequence leaves the last.
    grows: whether its table grows with the sequence (all groups except cross attention).
    is_window: whether it frees blocks that no later token reads (sliding windows and states).
    """

    index: int
    spec: KVGroupSpec
    pool: int
    block_size: int
    num_in_flight: int = 0
    num_chunks: int = 1
    stride: int = 1
    window: int = field(init=False)
    grows: bool = field(init=False)
    is_window: bool = field(init=False)

    def __post_init__(self) -> None:
        window = self.block_size + 1 if self.spec.has_states else self.spec.window
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "grows", self.spec.kind is not KVGroupKind.CROSS)
        object.__setattr__(self, "is_window", window > 0)

    @property
    def num_hit_blocks(self) -> int:
        """Window: how many consecutive cached blocks a prefix hit needs before its end."""
        return blocks_for(self.window - 1, self.block_size)

    def num_passed_blocks(self, num_computed: int) -> int:
        """Leading blocks that no later token attends to, once `num_computed` tokens are computed."""
        if not self.is_window:
            return 0
        return max(0, num_computed - self.window + 1) // self.block_size

    def most_held(self, num_tokens: int) -> int:
        """Return the most blocks that a row holds at once while it grows to `num_tokens` tokens."""
        required = blocks_for(num_tokens, self.block_size)
        if not self.is_window:
            return required
        # One more, since the window need not start at a block's first slot.
        required = min(required, blocks_for(self.window - 1 + self.num_in_flight, self.block_size) + 1)
        if self.stride == 1:
            return required
        # Snapshots of a text, two of its prompt, the last two blocks, and the last one of each chunk in flight.
        num_new = min(num_tokens, self.num_in_flight)
        return min(required, blocks_for(num_new, self.stride * self.block_size) + 4 + self.num_chunks)

    def held_decoding(self, num_tokens: int) -> int:
        """Return the most blocks that a row of `num_tokens` tokens holds while each step computes one of them."""
        most = self.most_held(num_tokens)
        if self.spec.has_states:
            return min(most, _STATES_PER_SEQUENCE)
        # One more, as in `most_held`.
        return min(most, blocks_for(self.window - 1 + self.num_chunks, self.block_size) + 1) if self.is_window else most

    def keeps(self, index: np.ndarray, snapshots: np.ndarray) -> np.ndarray:
        """Return which blocks stay findable when the row goes on, bool [n].

        index: int [n], in the tables.   snapshots: int [2] or [n, 2], see `snapshots_of`.
        """
        return ((index + 1) % self.stride == 0) | (snapshots == index[:, None] + 1).any(axis=1)

    def num_new_blocks(self, have: int, end: int, snapshots: np.ndarray) -> int:
        """Return how many blocks hold the tokens up to `end` after the first `have` blocks."""
        want = blocks_for(end, self.block_size)
        if self.stride == 1:
            return max(want - have, 0)
        index = np.arange(have, want)
        return int(np.count_nonzero(self.keeps(index, snapshots) | (index == want - 1)))

    def next_passed_at(self, num_released: np.ndarray) -> np.ndarray:
        """Computed tokens at which the block after the first `num_released` leaves the window."""
        return (num_released + 1) * self.block_size + self.window - 1


@dataclass(frozen=True, slots=True)
class KVSizing:
    """What the settings imply for the number of blocks that requests need.

    block_size: tokens of a block.   num_pools: of blocks: of attention, of states, or one of each.
    """

    groups: tuple[KVGroup, ...]
    block_size: int
    num_pools: int
    max_model_len: int
    max_num_seqs: int

    @classmethod
    def of(
        cls, specs: tuple[KVGroupSpec, ...], block_size: int, max_model_len: int, scheduler: SchedulerOptions
    ) -> "KVSizing":
        # Slots that can be planned before an earlier step is complete: a window row holds their blocks as well.
        num_chunks = max(scheduler.pipeline_depth, 1)
        in_flight = scheduler.max_num_batched_tokens * num_chunks
        pools, of_states = by_pool(specs), blocks_per_snapshot(specs, block_size)
        groups: list[KVGroup] = []
        for index, spec in enumerate(specs):
            pool = next(number for number, of_pool in enumerate(pools) if spec in of_pool)
            stride = of_states if spec.has_states else 1
            groups.append(KVGroup(index, spec, pool, block_size, in_flight, num_chunks, stride))
        return cls(tuple(groups), block_size, len(pools), max_model_len, scheduler.max_num_seqs)

    @property
    def has_states(self) -> bool:
        return any(group.spec.has_states for group in self.groups)

    @property
    def snapshot_tokens(self) -> int:
        """Tokens of every text that leave one snapshot of its state; 0 without states."""
        return max((group.stride * self.block_size for group in self.groups if group.spec.has_states), default=0)

    def snapshots_of(self, num_prompt_tokens: int, parts_at: int = 0) -> np.ndarray:
        """Return after how many blocks a row leaves snapshots because of its prompt, int32 [2]; 0: nowhere.

        That is before its last token, where the same or a longer prompt goes on, and where it parts from others.
        """
        return np.array([num_prompt_tokens - 1, parts_at], np.int32) // self.block_size

    def pool_sizes(self, num_blocks: int) -> BlockCounts:
        """Return the blocks of each pool, if the first has `num_blocks`.

        Of states, all sequences that decode find theirs, those with drafts too, and the attention's blocks find a
        snapshot for every `snapshot_tokens`; but they take no more memory than those blocks, unless a single sequence
        needs it.
        """
        if self.num_pools == 1 or not num_blocks:
            return (num_blocks,) * self.num_pools
        states = [group for group in self.groups if group.pool == 1]
        held = sum(group.most_held(self.max_model_len) for group in states)
        num_snapshots = num_blocks // states[0].stride
        wanted = (_STATES_PER_SEQUENCE * self.max_num_seqs + num_snapshots) * len(states) + held
        affordable = num_blocks * self._elements(0) // self._elements(1)
        return num_blocks, min(wanted, max(affordable, held))

    def _elements(self, pool: int) -> int:
        """Elements of two bytes that a block of the pool has."""
        groups = [group for group in self.groups if group.pool == pool]
        num_layers = layers_per_block(group.spec for group in groups)
        per_token = max(group.spec.shape.num_elements for group in groups) * num_layers
        return per_token * (1 if groups[0].spec.has_states else self.block_size)

    def total(self, needed: Iterable[tuple[KVGroup, int]]) -> BlockCounts:
        """Return how many blocks of each pool these are, given for groups."""
        counts = [0] * self.num_pools
        for group, count in needed:
            counts[group.pool] += count
        return tuple(counts)

    def blocks_for_request(self, num_tokens: int, encoder_len: int = 0) -> BlockCounts:
        """Most blocks of each pool that one sequence holds at once while it grows to `num_tokens` tokens.

        Pools with fewer can never serve it. encoder_len: encoder tokens of an encoder-decoder request.
        """
        return self.total(
            (group, group.most_held(num_tokens) if group.grows else blocks_for(encoder_len, group.block_size))
            for group in self.groups
        )

    def num_requests(self, num_blocks: int, num_tokens: int, encoder_len: int = 0) -> int:
        """Return how many requests of `num_tokens` tokens the pools hold at once, if the first has `num_blocks`.

        The tokens in flight, of which windows and states need more blocks, are one request's: all share them.
        """
        first = self.blocks_for_request(num_tokens, encoder_len)
        each = self.total(
            (group, group.held_decoding(num_tokens) if group.grows else blocks_for(encoder_len, group.block_size))
            for group in self.groups
        )
        pools = zip(self.pool_sizes(num_blocks), first, each, strict=True)
        return min(1 + (there - of_first) // of_each if there >= of_first else 0 for there, of_first, of_each in pools)

    def blocks_for_siblings(self, lengths: list[int], num_prompt_tokens: int) -> BlockCounts:
        """Most blocks of their own that sequences of `lengths` tokens hold, which share full prompt blocks."""
        shared = num_prompt_tokens // self.block_size * self.block_size
        growing = [group for group in self.groups if group.grows]
        return self.total((group, group.most_held(length - shared)) for group in growing for length in lengths)


def exceeds(needed: BlockCounts, there: BlockCounts) -> bool:
    """Return whether more blocks of a pool are needed than there are."""
    return needed[0] > there[0] or (len(needed) > 1 and needed[1] > there[1])
