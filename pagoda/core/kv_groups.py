"""KV groups: how many blocks a table of each kind needs, and which it may give back. Pure arithmetic."""

from dataclasses import dataclass

import numpy as np

from pagoda.core.kv_specs import KVGroupKind, KVGroupSpec


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One group with what follows from the pool's settings.

    hold_cap: most blocks a row of this group holds at once (windows give back what is behind them), 0 for no cap.
    """

    index: int
    spec: KVGroupSpec
    block_size: int
    hold_cap: int = 0

    @property
    def grows(self) -> bool:
        """Whether its table grows with the sequence (all but cross attention)."""
        return self.spec.kind is not KVGroupKind.CROSS

    @property
    def is_window(self) -> bool:
        return self.spec.kind is KVGroupKind.WINDOW

    @property
    def num_hit_blocks(self) -> int:
        """Window: how many cached blocks in a row a prefix hit needs before its end."""
        return blocks_for(self.spec.window - 1, self.block_size)

    def num_passed_blocks(self, num_computed: int) -> int:
        """Leading blocks that no later token attends to, once `num_computed` tokens are computed."""
        if not self.is_window:
            return 0
        return max(0, num_computed - self.spec.window + 1) // self.block_size

    def num_required(self, num_tokens: int, capped: bool) -> int:
        """Table entries for `num_tokens` tokens; `capped`: no more than the row would ever hold at once."""
        required = blocks_for(num_tokens, self.block_size)
        return min(required, self.hold_cap) if capped and self.hold_cap else required

    def passes_next_at(self, num_released: np.ndarray) -> np.ndarray:
        """Computed tokens at which the block after `num_released` leading ones falls behind the window."""
        return (num_released + 1) * self.block_size + self.spec.window - 1


def make_groups(
    specs: tuple[KVGroupSpec, ...], block_size: int, max_in_flight_tokens: int, max_model_len: int
) -> tuple[KVGroup, ...]:
    """max_in_flight_tokens: tokens that can be planned and not home; a window row holds their blocks too."""
    groups = []
    for index, spec in enumerate(specs):
        cap = 0
        if spec.kind is KVGroupKind.WINDOW:
            # One more, since the window need not start at a block's first slot.
            cap = blocks_for(min(spec.window - 1 + max_in_flight_tokens, max_model_len), block_size) + 1
        groups.append(KVGroup(index, spec, block_size, cap))
    return tuple(groups)
