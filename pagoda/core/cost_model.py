"""CostModel: what a computed token and a copied block cost, for the preemption rule."""

from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput


class CostModel:
    """What a computed token and a copied block cost, measured in completed steps (exponential averages).

    prefill_s_per_token: seconds.   copy_s_per_block: seconds, one direction. Zero until measured.
    """

    _NEW_SHARE = 0.2
    _MIN_PREFILL_TOKENS = 16  # smaller steps measure latency, not prefill speed

    def __init__(self) -> None:
        self.prefill_s_per_token = 0.0
        self.copy_s_per_block = 0.0

    def observe(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Take the measurements of a completed step. Its duration_s includes swap_s."""
        num_copied = len(output.swap_in) + len(output.swap_out)
        if num_copied and result.swap_s > 0:
            self.copy_s_per_block = self._mix(self.copy_s_per_block, result.swap_s / num_copied)
        num_tokens, compute_s = output.total_num_scheduled_tokens, result.duration_s - result.swap_s
        if num_tokens - len(output.rows) >= self._MIN_PREFILL_TOKENS and compute_s > 0:
            self.prefill_s_per_token = self._mix(self.prefill_s_per_token, compute_s / num_tokens)

    def _mix(self, old: float, new: float) -> float:
        return new if old == 0 else (1 - self._NEW_SHARE) * old + self._NEW_SHARE * new

    def swap_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether copying `num_blocks` out and in beats computing `num_tokens` again. Unmeasured copies are tried."""
        return 2 * num_blocks * self.copy_s_per_block < num_tokens * self.prefill_s_per_token
