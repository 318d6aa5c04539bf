"""What happens to a victim: recompute or swap. One small class a mode, and the costs that `cost` decides by."""

from typing import Protocol

from pagoda.base.config import PreemptionMode
from pagoda.core.request_table import LiveRequest


class CostModel:
    """What a computed token and a copied block cost, measured from the steps that ran (exponential averages).

    prefill_s_per_token: seconds.   copy_s_per_block: seconds, one direction. Zero until measured.
    """

    _NEW_SHARE = 0.2
    _MIN_PREFILL_TOKENS = 16  # smaller steps measure latency, not prefill speed

    def __init__(self) -> None:
        self.prefill_s_per_token = 0.0
        self.copy_s_per_block = 0.0

    def observe(self, num_tokens: int, num_rows: int, duration_s: float, num_copied_blocks: int, copy_s: float) -> None:
        """One step that is home. duration_s includes copy_s."""
        if num_copied_blocks and copy_s > 0:
            self.copy_s_per_block = self._mix(self.copy_s_per_block, copy_s / num_copied_blocks)
        num_prefilled = num_tokens - num_rows
        if num_prefilled >= self._MIN_PREFILL_TOKENS and duration_s > copy_s:
            self.prefill_s_per_token = self._mix(self.prefill_s_per_token, (duration_s - copy_s) / num_tokens)

    def _mix(self, old: float, new: float) -> float:
        return new if old == 0 else (1 - self._NEW_SHARE) * old + self._NEW_SHARE * new

    def swap_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether copying `num_blocks` out and in beats computing `num_tokens` again. Unmeasured copies are tried."""
        return 2 * num_blocks * self.copy_s_per_block < num_tokens * self.prefill_s_per_token


class PreemptionRule(Protocol):
    def prefers_swap(self, live: LiveRequest, num_tokens: int, num_blocks: int) -> bool:
        """Whether `live`, with `num_tokens` computed in `num_blocks` blocks, shall be swapped if the host has room."""
        ...


class AlwaysRecompute:
    def prefers_swap(self, live: LiveRequest, num_tokens: int, num_blocks: int) -> bool:
        return False


class AlwaysSwap:
    def prefers_swap(self, live: LiveRequest, num_tokens: int, num_blocks: int) -> bool:
        return True


class SwapBranches:
    """Swap while more than one branch is unfinished: recomputing branches would compute each of them."""

    def prefers_swap(self, live: LiveRequest, num_tokens: int, num_blocks: int) -> bool:
        return len(live.unfinished) > 1


class CheaperOfBoth:
    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def prefers_swap(self, live: LiveRequest, num_tokens: int, num_blocks: int) -> bool:
        return self._costs.swap_is_cheaper(num_tokens, num_blocks)


def make_preemption_rule(mode: PreemptionMode, costs: CostModel) -> PreemptionRule:
    rules: dict[PreemptionMode, PreemptionRule] = {
        PreemptionMode.AUTO: SwapBranches(),
        PreemptionMode.RECOMPUTE: AlwaysRecompute(),
        PreemptionMode.SWAP: AlwaysSwap(),
        PreemptionMode.COST: CheaperOfBoth(costs),
    }
    return rules[mode]
