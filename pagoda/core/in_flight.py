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
        self._departed: dict[int, list[Sequence]] = {}  # step -> sequences that left a row it names
        self._steps_of: dict[Sequence, set[int]] = {}  # the same, by sequence
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

    def departed(self, sequence: Sequence) -> int:
        """Record that the sequence leaves its row. Return the last step in flight that names the row, or 0."""
        row, last_step = sequence.row, 0
        for output in self.outputs:
            if (output.rows == row).any() or (output.sample_rows == row).any():
                self._steps_of.setdefault(sequence, set()).add(output.step)
                self._departed.setdefault(output.step, []).append(sequence)
                last_step = output.step
        return last_step

    def unpin(self, step: int) -> None:
        """Stop waiting for `step`, whose results are committed, for the sequences that left its rows."""
        for sequence in self._departed.pop(step, ()):
            self._forget(sequence, step)

    def _forget(self, sequence: Sequence, step: int) -> None:
        steps = self._steps_of.get(sequence, set())
        steps.discard(step)
        if not steps:
            self._steps_of.pop(sequence, None)

    def disown(self, sequence: Sequence) -> None:
        """Forget the sequence: its tokens in flight will be dropped."""
        self._steps_of.pop(sequence, None)

    def has_late_tokens(self, request: RequestState) -> bool:
        """Return whether a sequence left its row while a step that names the row is still in flight."""
        return bool(self._steps_of) and any(sequence in self._steps_of for sequence in request.sequences)

    def num_drafts(self) -> dict[int, int]:
        """Return the drafts in flight by row."""
        drafts: dict[int, int] = {}
        for output in self.outputs:
            for row, tokens in output.drafts.items():
                drafts[row] = drafts.get(row, 0) + len(tokens)
        return drafts
