"""StepsInFlight: planned steps whose results are not back, the rows they pin, and sequences that left those rows."""

from collections import deque

from pagoda.base.clock import Clock
from pagoda.core.request import RequestState, Sequence
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput


class StepsInFlight:
    """Steps complete in the order of planning.

    outputs: of those steps, oldest first.
    last_prompt_step_s: duration of the last completed step that computed prompt tokens.
    """

    def __init__(self) -> None:
        self.outputs: deque[SchedulerOutput] = deque()
        self._prompt_steps: dict[int, float] = {}  # step -> when it was planned
        self._late_until: dict[Sequence, int] = {}  # sequences that left a row -> last step in flight that names it
        self.last_prompt_step_s = 0.0

    def opened(self, output: SchedulerOutput, prompts_planned_at_s: float | None) -> None:
        """Record a submitted step. prompts_planned_at_s: when it was planned, if it computes prompt tokens."""
        self.outputs.append(output)
        if prompts_planned_at_s is not None:
            self._prompt_steps[output.step] = prompts_planned_at_s

    def completed(self, output: SchedulerOutput, result: ModelRunnerOutput, clock: Clock) -> None:
        """Record that the oldest step's result is back."""
        oldest = self.outputs.popleft()
        assert oldest.step == output.step == result.step, "results must come in the order of planning"
        planned_at_s = self._prompt_steps.pop(output.step, None)
        if planned_at_s is not None:
            self.last_prompt_step_s = result.duration_s or clock.now() - planned_at_s

    def note_left_row(self, sequence: Sequence) -> int:
        """Record that the sequence leaves its row. Return the last step in flight that names the row, or 0."""
        row = sequence.row
        for output in reversed(self.outputs):
            is_new = any(init.row == row for init in output.admitted)  # it may share blocks that this step fills
            if is_new or (output.rows == row).any() or (output.sample_rows == row).any():
                self._late_until[sequence] = output.step
                return output.step
        return 0

    def stop_waiting_for(self, step: int) -> None:
        """Stop waiting for `step`, whose results are committed, for the sequences that left its rows."""
        self._late_until = {one: last_step for one, last_step in self._late_until.items() if last_step > step}

    def drop_late_tokens(self, request: RequestState) -> None:
        """Forget the request's sequences: their tokens in flight will be dropped."""
        for sequence in request.sequences:
            self._late_until.pop(sequence, None)

    def has_late_tokens(self, request: RequestState) -> bool:
        """Return whether a sequence left its row while a step that names the row is still in flight."""
        return bool(self._late_until) and any(sequence in self._late_until for sequence in request.sequences)

    def num_drafts(self) -> dict[int, int]:
        """Return the drafts in flight by row."""
        drafts: dict[int, int] = {}
        for output in self.outputs:
            for row, tokens in output.drafts.items():
                drafts[row] = drafts.get(row, 0) + len(tokens)
        return drafts
