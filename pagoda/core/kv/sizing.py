"""What a model's layers ask of the KV cache, and how many blocks that is. Pure arithmetic: start-up, admission and
`pagoda plan` ask the same functions.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from pagoda.core.scheduler_options import SchedulerOptions


class KVGroupKind(Enum):
    FULL = "full"  # attends to every earlier token
    WINDOW = "window"  # attends to the last `window` tokens, itself included
    CROSS = "cross"  # attends to the encoder's output; filled once, never grows
    STATE = "state"  # recurrent: reads the state that the token before left


STATE_WINDOW = 2
"""Window of STATE: a token reads what the one before it left. A full block is a snapshot, from which hits resume."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token keeps in one layer: K [num_heads, key_dim] and V [num_heads, value_dim].

    Of a recurrent layer: its state, K alone, which a block holds once.
    """

    num_heads: int = 1
    key_dim: int = 1
    value_dim: int = 1


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers that share one block table.

    All groups draw block ids from one pool. A block of any group holds `block_size` tokens of as many layers as the
    largest group has (`layers_per_block`), so blocks are interchangeable: the i-th layer of each group lives in
    the i-th KV tensor, at the block ids of its own group's table. A tensor has room for the largest shape. The states
    of a STATE group are dealt out to the tensors in turn, one after the other in each.

    A block of a STATE group holds the state after the last computed token among its own. The row overwrites it until
    the block is full; then the row goes on in the next block, and frees this one as a window of two tokens would.

    kind: what the layers attend to.   window: tokens, for WINDOW and STATE (STATE_WINDOW); 0 otherwise.
    layers: indices of the layers that keep KV, ascending; a model's layer may have several attentions.
    shape: of their K and V.
    """

    kind: KVGroupKind = KVGroupKind.FULL
    window: int = 0
    layers: tuple[int, ...] = (0,)
    shape: KVShape = KVShape()


def layers_per_block(groups: tuple[KVGroupSpec, ...]) -> int:
    """How many layers' KV one pool block carries: the size of the largest group; 0 without groups.

    States do not count where others keep KV: several of them share a tensor.
    """
    num_states = max((len(group.layers) for group in groups if group.kind is KVGroupKind.STATE), default=0)
    return max((len(group.layers) for group in groups if group.kind is not KVGroupKind.STATE), default=0) or num_states


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV group, with what follows from the pool's settings.

    max_held: the most blocks that a row holds in this group (those before a sliding window are freed); 0: no limit.
    grows: whether its table grows with the sequence (all groups except cross attention).
    is_window: whether it frees blocks that no later token reads (sliding windows and states).
    """

    index: int
    spec: KVGroupSpec
    block_size: int
    max_held: int = 0
    grows: bool = field(init=False)
    is_window: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grows", self.spec.kind is not KVGroupKind.CROSS)
        object.__setattr__(self, "is_window", self.spec.window > 0)

    @property
    def num_hit_blocks(self) -> int:
        """Window: how many consecutive cached blocks a prefix hit needs before its end."""
        return blocks_for(self.spec.window - 1, self.block_size)

    def num_passed_blocks(self, num_computed: int) -> int:
        """Leading blocks that no later token attends to, once `num_computed` tokens are computed."""
        if not self.is_window:
            return 0
        return max(0, num_computed - self.spec.window + 1) // self.block_size

    def most_held(self, num_tokens: int) -> int:
        """Return the most blocks that a row holds at once while it grows to `num_tokens` tokens."""
        required = blocks_for(num_tokens, self.block_size)
        return min(required, self.max_held) if self.max_held else required

    def next_passed_at(self, num_released: np.ndarray) -> np.ndarray:
        """Computed tokens at which the block after the first `num_released` leaves the window."""
        return (num_released + 1) * self.block_size + self.spec.window - 1


@dataclass(frozen=True, slots=True)
class KVSizing:
    """What the settings imply for the number of blocks that requests need."""

    groups: tuple[KVGroup, ...]
    block_size: int
    max_model_len: int
    num_lookahead_slots: int

    @classmethod
    def of(
        cls, specs: tuple[KVGroupSpec, ...], block_size: int, max_model_len: int, scheduler: SchedulerOptions
    ) -> "KVSizing":
        # Slots that can be planned before an earlier step is complete: a window row holds their blocks as well.
        in_flight = scheduler.max_num_batched_tokens * max(scheduler.pipeline_depth, 1) + scheduler.num_lookahead_slots
        groups: list[KVGroup] = []
        for index, spec in enumerate(specs):
            max_held = 0
            if spec.window:
                # One more, since the window need not start at a block's first slot.
                max_held = blocks_for(min(spec.window - 1 + in_flight, max_model_len), block_size) + 1
            groups.append(KVGroup(index, spec, block_size, max_held))
        return cls(tuple(groups), block_size, max_model_len, scheduler.num_lookahead_slots)

    @property
    def has_states(self) -> bool:
        return any(group.spec.kind is KVGroupKind.STATE for group in self.groups)

    def slots_up_to(self, end: int) -> int:
        """Positions that need a slot when a row computes up to `end`: the lookahead included, within the model."""
        return min(end + self.num_lookahead_slots, self.max_model_len)

    def blocks_for_request(self, num_tokens: int, encoder_len: int = 0) -> int:
        """Most blocks that one sequence holds at once while it grows to `num_tokens` tokens, all groups together.

        A pool with fewer can never serve it. encoder_len: encoder tokens of an encoder-decoder request.
        """
        slots = self.slots_up_to(num_tokens)
        return sum(
            group.most_held(slots) if group.grows else blocks_for(encoder_len, self.block_size) for group in self.groups
        )

    def blocks_for_siblings(self, lengths: list[int], num_prompt_tokens: int) -> int:
        """Most blocks of their own that sequences of `lengths` tokens hold, which share full prompt blocks."""
        shared = num_prompt_tokens // self.block_size * self.block_size
        growing = [group for group in self.groups if group.grows]
        return sum(group.most_held(length - shared) for group in growing for length in lengths)
