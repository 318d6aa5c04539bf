"""How many KV blocks things need. Pure arithmetic: start-up, admission and `pagoda plan` ask the same functions."""

from dataclasses import dataclass, field

import numpy as np

from pagoda.core.kv_specs import KVGroupKind, KVGroupSpec
from pagoda.core.scheduler_options import SchedulerOptions


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV group, with what follows from the pool's settings.

    max_held: the most blocks that a row holds in this group (those before a sliding window are freed); 0: no limit.
    grows: whether its table grows with the sequence (all groups except cross attention).
    """

    index: int
    spec: KVGroupSpec
    block_size: int
    max_held: int = 0
    grows: bool = field(init=False)
    is_window: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grows", self.spec.kind is not KVGroupKind.CROSS)
        object.__setattr__(self, "is_window", self.spec.kind is KVGroupKind.WINDOW)

    @property
    def num_hit_blocks(self) -> int:
        """Window: how many consecutive cached blocks a prefix hit needs before its end."""
        return blocks_for(self.spec.window - 1, self.block_size)

    def num_passed_blocks(self, num_computed: int) -> int:
        """Leading blocks that no later token attends to, once `num_computed` tokens are computed."""
        if not self.is_window:
            return 0
        return max(0, num_computed - self.spec.window + 1) // self.block_size

    def num_required(self, num_tokens: int, capped: bool) -> int:
        """Table entries for `num_tokens` tokens; `capped`: at most what the row ever holds at once."""
        required = blocks_for(num_tokens, self.block_size)
        return min(required, self.max_held) if capped and self.max_held else required

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
        # Tokens that can be planned before an earlier step is complete: a window row holds their blocks as well.
        in_flight = scheduler.max_num_batched_tokens * max(scheduler.pipeline_depth, 1)
        groups: list[KVGroup] = []
        for index, spec in enumerate(specs):
            max_held = 0
            if spec.kind is KVGroupKind.WINDOW:
                # One more, since the window need not start at a block's first slot.
                max_held = blocks_for(min(spec.window - 1 + in_flight, max_model_len), block_size) + 1
            groups.append(KVGroup(index, spec, block_size, max_held))
        return cls(tuple(groups), block_size, max_model_len, scheduler.num_lookahead_slots)

    def slots_up_to(self, end: int) -> int:
        """Positions that need a slot when a row computes up to `end`: the lookahead included, within the model."""
        return min(end + self.num_lookahead_slots, self.max_model_len)

    def blocks_for_request(self, num_tokens: int, encoder_len: int = 0) -> int:
        """Most blocks that one sequence holds at once while it grows to `num_tokens` tokens, all groups together.

        A pool with fewer can never serve it. encoder_len: encoder tokens of an encoder-decoder request.
        """
        slots = self.slots_up_to(num_tokens)
        return sum(
            group.num_required(slots, capped=True) if group.grows else blocks_for(encoder_len, self.block_size)
            for group in self.groups
        )

    def blocks_for_siblings(self, lengths: list[int], num_prompt_tokens: int) -> int:
        """Blocks of sequences of `lengths` tokens that share the full prompt blocks of a sibling."""
        shared = num_prompt_tokens // self.block_size
        num_growing = sum(group.grows for group in self.groups)
        return sum((blocks_for(length, self.block_size) - shared) * num_growing for length in lengths)


def longest_request(
    specs: tuple[KVGroupSpec, ...], block_size: int, num_blocks: int, scheduler: SchedulerOptions
) -> int:
    """The largest max_model_len (a multiple of block_size) of which one sequence fits `num_blocks` blocks."""
    low, high = 0, num_blocks  # in blocks of one group
    while low < high:
        middle = (low + high + 1) // 2
        length = middle * block_size
        sizing = KVSizing.of(specs, block_size, length, scheduler)
        if sizing.blocks_for_request(length, scheduler.max_encoder_len) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low * block_size
