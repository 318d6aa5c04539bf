"""Steps in flight: planned steps whose results are not back, and what depends on one of them that fails."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from pagoda.base.clock import Clock
from pagoda.core.kv import KVCacheManager
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput


class StepsInFlight:
    """Planned steps whose results are not back.

    outputs: of those steps, oldest first; they complete in this order.
    last_prompt_step_s: duration of the last completed step that computed prompt tokens.
    """

    def __init__(self) -> None:
        self.outputs: deque[SchedulerOutput] = deque()
        self._prompt_steps: dict[int, float] = {}  # step -> when it was planned
        self.last_prompt_step_s = 0.0

    def start_over(self) -> None:
        """Forget how long steps took. None may be in flight."""
        self.last_prompt_step_s = 0.0

    def opened(self, output: SchedulerOutput, prompts_planned_at_s: float | None) -> None:
        """Record a planned step. prompts_planned_at_s: when it was planned, if it computes prompt tokens."""
        self.outputs.append(output)
        if prompts_planned_at_s is not None:
            self._prompt_steps[output.step] = prompts_planned_at_s

    def completed(self, output: SchedulerOutput, result: ModelRunnerOutput, clock: Clock) -> None:
        """Record that the oldest step's result is back."""
        self._check_is_next(output, result)
        self.outputs.popleft()
        planned_at_s = self._prompt_steps.pop(output.step, None)
        if planned_at_s is not None:
            self.last_prompt_step_s = result.duration_s or clock.now() - planned_at_s

    def _check_is_next(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Raise ValueError, with nothing changed, unless `output` is the oldest step in flight, and `result` its."""
        if result.step != output.step:
            raise ValueError(f"the result of step {result.step} was given for step {output.step}")
        if self.outputs and self.outputs[0].step == output.step:
            return
        if any(one.step == output.step for one in self.outputs):
            raise ValueError(
                f"step {output.step} was planned after step {self.outputs[0].step}, whose result is not back: "
                "give results in the order of planning"
            )
        raise ValueError(f"step {output.step} is not in flight: each step's result is given once, to its scheduler")

    def last_step_with(self, row: int) -> int:
        """Return the last step in flight that names the row, or 0."""
        for output in reversed(self.outputs):
            is_new = any(init.row == row for init in output.admitted)  # it may share blocks that this step fills
            if is_new or (output.rows == row).any() or (output.sample_rows == row).any():
                return output.step
        return 0

    def num_drafts(self) -> dict[int, int]:
        """Return the drafts in flight by row."""
        drafts: dict[int, int] = {}
        for output in self.outputs:
            for row, tokens in output.drafts.items():
                drafts[row] = drafts.get(row, 0) + len(tokens)
        return drafts


# What a failed step spoils. Later steps may have been planned on top of it: its rows continue, new rows have found its
# blocks in the prefix cache, sequences have forked from its rows. Steps complete in order, so none of their results has
# been used yet.


def find_spoiled(
    failed: Collection[int],
    readers: Mapping[int, set[int]],
    output: SchedulerOutput,
    later: Iterable[SchedulerOutput],
    kv: KVCacheManager,
) -> tuple[set[int], set[int]]:
    """Return the rows and the blocks with KV that depends on what the `failed` rows of a step should have computed.

    readers: by step, rows whose chunks cannot be right for another reason (they read an encoder output of this step).
    output: the failed step.   later: the steps planned after it, oldest first; none of them is complete.
    Rows that their sequences have left are among them: such a row is not given out again while a step names it.
    """
    steps = [output, *later]
    rows, blocks = set(failed), set[int]()
    for number, step in enumerate(steps):
        after = steps[number + 1 :]
        if number:
            blocks -= _fresh_blocks(step, kv)
            blocks.update(target for source, target in step.copies.tolist() if source in blocks)
            rows -= {init.row for init in step.admitted} | {fork.dst for fork in step.forks}
        ends = step.start + step.num_new
        placed = zip(step.rows.tolist(), step.start.tolist(), ends.tolist(), strict=True)
        written = {row: (start, end) for row, start, end in placed}
        rows |= readers.get(step.step, set())
        for row in rows & written.keys():
            blocks |= _written_blocks(row, *written[row], after, kv)
        for init in step.admitted:  # in the order of admission: one may have found blocks of those before it
            tables = [(init.block_ids[group.index], group.block_size) for group in kv.tables.growing]
            found = {block for table, size in tables for block in table[: init.num_computed // size].tolist()}
            if init.row not in rows and not blocks.isdisjoint(found):
                rows.add(init.row)
                if init.row in written:
                    blocks |= _written_blocks(init.row, *written[init.row], after, kv)
        rows.update(fork.dst for fork in step.forks if fork.src in rows)
    return rows, blocks - {0}


def _fresh_blocks(step: SchedulerOutput, kv: KVCacheManager) -> set[int]:
    """Return the blocks that rows get in this step, to be written from then on."""
    fresh = {*step.block_delta.block_ids.tolist(), *step.swap_in[:, 1].tolist()}
    for init in step.admitted:
        for group in kv.tables.growing:
            fresh.update(init.block_ids[group.index][init.num_computed // group.block_size :].tolist())
    return fresh


def _written_blocks(row: int, start: int, end: int, after: list[SchedulerOutput], kv: KVCacheManager) -> set[int]:
    """Return the blocks to which a step wrote the row's positions `start` .. `end` - 1."""
    blocks = kv.tables.blocks_between(row, start, end)
    for step in reversed(after):  # it had other blocks before it copied them
        delta = step.block_delta
        mine = set(delta.block_ids[delta.rows == row].tolist())
        blocks.update(source for source, target in step.copies.tolist() if target in blocks and target in mine)
    return blocks
