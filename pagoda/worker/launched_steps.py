"""LaunchedSteps: launched steps, in order, until their results are on the host and in the table."""

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from pagoda.base.errors import PagodaError, WorkerDied
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.worker.devices.device import Device, HostCopy
from pagoda.worker.grammar_rows import GrammarMasks
from pagoda.worker.sampler import Drawn, Sampled, prompt_logprob_columns
from pagoda.worker.speculation.speculator import NEVER_DRAFTS, Speculator
from pagoda.worker.staging import LastTokens, StepInputs
from pagoda.worker.table_mirror import TableMirror

logger = logging.getLogger("pagoda")

_NO_TOKENS = np.empty((0, 1), np.int32)
_NO_COUNTS = np.empty(0, np.int32)
_NOT_FINITE = "the model's logits are not finite"


class StepParts:
    """Seconds by part of a step, summed over steps. Reading the clock takes about 0.05 us, so it is always on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.num_steps = 0
        self._at_s = 0.0

    def begin(self) -> None:
        """Start timing a step."""
        self.num_steps += 1
        self._at_s = time.perf_counter()

    def resume(self) -> None:
        """Leave out the time since the last call."""
        self._at_s = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last call to `part`."""
        now_s = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now_s - self._at_s
        self._at_s = now_s

    def clear(self) -> None:
        self.seconds.clear()
        self.num_steps = 0


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step whose computations are submitted. Steps are collected in the order of their launches, on that thread.

    copy: of `drawn`, then of the tensors of `prompt_logprobs`, three for each piece.   inputs: None for an empty step.
    owners: of the rows of its draws, see LaunchedSteps; None if the device does not keep its tokens.
    drawn: None if nothing is sampled.   prompt_logprobs: (row, number of pieces).
    pooled, failed: row -> vector, message.   collect: set the results of all steps up to this one.
    checksum: see ModelRunnerOutput.
    """

    output: SchedulerOutput
    copy: HostCopy
    collect: Callable[["LaunchedStep"], None]
    begin_s: float
    swap_s: float
    inputs: StepInputs | None = None
    owners: np.ndarray | None = None
    drawn: Drawn | None = None
    masks: "Future[GrammarMasks] | None" = None
    prompt_logprobs: Sequence[tuple[int, int]] = ()
    pooled: dict[int, np.ndarray] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    checksum: int = 0
    outcome: ModelRunnerOutput | Exception | None = None

    def is_done(self) -> bool:
        """Return whether `result` would return at once."""
        return self.outcome is not None or self.copy.is_done()

    def wait(self) -> None:
        """Return when the device has computed the step. Any thread may wait."""
        self.copy.wait()

    def result(self) -> ModelRunnerOutput:
        """Return the step's results, waiting for them if necessary. Raises what went wrong on the device."""
        if self.outcome is None:
            self.collect(self)
        assert self.outcome is not None
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class LaunchedSteps:
    """Waits for the results of steps, writes their tokens to the table, and asks for the next step's drafts.

    last_tokens: of all rows, for steps that are launched before the host knows them.   times: of the parts of steps.
    """

    def __init__(self, table: TableMirror, speculator: Speculator | None, device: Device) -> None:
        max_rows = len(table.num_tokens)
        self.last_tokens = LastTokens(max_rows, device.device)
        self.times = StepParts()
        self._table = table
        self._speculator = speculator
        self._device = device
        self._launched: deque[LaunchedStep] = deque()
        # How many sequences a row has had: a late token is only written to the sequence it was sampled for.
        self._owners = np.zeros(max_rows, np.int64)
        self._end_s = 0.0  # when the last step was collected

    def __bool__(self) -> bool:
        """Return whether there are steps whose results are not collected."""
        return bool(self._launched)

    def apply(self, output: SchedulerOutput) -> None:
        """Forget the last tokens of rows that end, begin, or continue as others."""
        ended = [*output.released.tolist(), *output.beams.rows.tolist()]
        begun = [*(init.row for init in output.admitted), *(fork.dst for fork in output.forks)]
        for row in (*ended, *begun):
            self._owners[row] += 1
            self.last_tokens.positions[row] = -1

    def keep_tokens(self, inputs: StepInputs, drawn: Drawn) -> np.ndarray:
        """Keep a step's tokens on the device for the next one; return LaunchedStep.owners."""
        rows = inputs.draw_rows
        self.last_tokens.keep(rows, inputs.draw_positions, inputs.draw_index, drawn.tokens)
        return self._owners[rows]

    def add(self, step: LaunchedStep) -> None:
        """Add a step that was submitted to the device."""
        self._launched.append(step)

    def collect_done(self) -> None:
        """Collect the steps whose results are there."""
        while self._launched and self._launched[0].is_done():
            self.collect(self._launched[0])

    def collect_all(self) -> None:
        """Collect all steps, waiting for them."""
        if self._launched:
            self.collect(self._launched[-1])

    def collect(self, last: LaunchedStep) -> None:
        """Collect the results of all steps up to `last`, in order."""
        step = None
        while step is not last:
            step = self._launched.popleft()
            try:
                step.outcome = self._results_of(step)
            except Exception as error:  # raised when this step's results are read
                step.outcome = cause_of(error, self._device)

    def _results_of(self, step: LaunchedStep) -> ModelRunnerOutput:
        """Wait for a step's results and write its tokens to the table."""
        arrays = step.copy.wait()
        self.times.resume()
        output, inputs, failed = step.output, step.inputs, step.failed
        sampled, num_sampled, logprobs = _NO_TOKENS, _NO_COUNTS, None
        refused: frozenset[int] = frozenset()
        masks = step.masks.result() if step.masks is not None else None
        if step.drawn is not None:
            assert inputs is not None
            num_arrays = len(step.drawn.tensors)
            drawn, arrays = step.drawn.on_host(arrays[:num_arrays]), arrays[num_arrays:]
            without_token, refused = _failed_draws(inputs, drawn, masks, self._table)
            failed = without_token | failed
            accepted = _accepted_draws(inputs, drawn, output)
            self._record_tokens(inputs, step.owners, drawn, accepted)
            sampled, num_sampled = _tokens_by_sample(inputs.num_draws, drawn.tokens, accepted)
            logprobs = drawn.logprobs
            if logprobs is not None and not accepted.all():
                logprobs = logprobs[accepted]
        self.times.lap("results")
        drafts: dict[int, np.ndarray] = {}
        no_drafts_until = NEVER_DRAFTS
        if self._speculator is not None and not output.is_empty:
            drafts = self._speculator.finish_step(output, self._table, num_sampled, failed)
            no_drafts_until = self._speculator.no_drafts_until
            self.times.lap("drafting")
        now_s = time.perf_counter()
        duration_s = now_s - max(step.begin_s, self._end_s)
        self._end_s = now_s
        return ModelRunnerOutput(
            step=output.step,
            sampled=sampled,
            num_sampled=num_sampled,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprob_columns(step.prompt_logprobs, arrays),
            pooled=step.pooled,
            failed=failed,
            refused=refused,
            duration_s=duration_s,
            swap_s=step.swap_s,
            drafts=drafts,
            no_drafts_until=no_drafts_until if not output.is_empty else 0,
            checksum=step.checksum,
        )

    def _record_tokens(
        self, inputs: StepInputs, owners: np.ndarray | None, drawn: Sampled, accepted: np.ndarray
    ) -> None:
        """Write a step's tokens to the rows that still belong to the sequences they were sampled for."""
        rows, positions = inputs.draw_rows, inputs.draw_positions
        if owners is not None:
            is_same = self._owners[rows] == owners
            known = rows[is_same & (self.last_tokens.positions[rows] == positions)]
            self.last_tokens.positions[known] = -1
            accepted = accepted & is_same
        self._table.record_tokens(rows[accepted], positions[accepted], drawn.tokens[accepted])


def _failed_draws(
    inputs: StepInputs, drawn: Sampled, masks: GrammarMasks | None, table: TableMirror
) -> tuple[dict[int, str], frozenset[int]]:
    """Return the rows that get no token, with the reason, and those of them whose request is at fault.

    Marks the draws of rows whose grammar has failed.
    """
    if masks is not None and masks.failed:
        drawn.finite[np.isin(inputs.draw_rows, list(masks.failed))] = False
    if drawn.finite.all():
        return {}, frozenset()
    first = np.cumsum(inputs.num_draws) - inputs.num_draws
    failed: dict[int, str] = {}
    refused: set[int] = set()
    for draw in first[~drawn.finite[first]].tolist():
        row = int(inputs.draw_rows[draw])
        num_output = int(inputs.draw_positions[draw] - table.num_prompt[row])
        causes = _what_forbids(draw, row, num_output, masks, table) if drawn.forbidden[draw] else []
        failed[row] = _NOT_FINITE
        if causes:
            refused.add(row)
            together = " and ".join(causes)
            failed[row] = (
                f"no token may follow {num_output} tokens of output: {together} forbid all; change one of them"
            )
    if masks is not None:
        failed |= masks.failed
        refused = (refused - masks.failed.keys()) | masks.refused
    return failed, frozenset(refused)


def _what_forbids(draw: int, row: int, num_output: int, masks: GrammarMasks | None, table: TableMirror) -> list[str]:
    """Return what in the row's request may forbid the token of a draw."""
    constraints = table.constraints[row]
    causes = [] if constraints is None else constraints.names(num_output)
    return ["the structured output", *causes] if masks is not None and draw in masks.draws else causes


def _accepted_draws(inputs: StepInputs, drawn: Sampled, output: SchedulerOutput) -> np.ndarray:
    """Return which draws are accepted: bool [num_draws].

    In a row with drafts: the draws up to and including the first that differs from the draft at its position. A draw's
    random number depends on its position only, so these are the tokens that single steps would have sampled. A draw
    that is not finite ends them: its row only fails if it gets there without drafts, in a later step.
    """
    is_accepted = drawn.finite.copy()
    if not output.drafts:
        return is_accepted
    begins = np.cumsum(inputs.num_draws) - inputs.num_draws
    for j in np.flatnonzero(inputs.num_draws > 1).tolist():
        begin, count = int(begins[j]), int(inputs.num_draws[j])
        drafts = output.drafts[int(output.rows[output.sample_index[j]])]
        agree = drawn.tokens[begin : begin + count - 1] == drafts
        is_accepted[begin + 1 : begin + count] &= np.cumprod(agree).astype(bool)
        is_accepted[begin : begin + count] = np.cumprod(is_accepted[begin : begin + count]).astype(bool)
    return is_accepted


def _tokens_by_sample(num_draws: np.ndarray, tokens: np.ndarray, accepted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the accepted tokens (int32 [num_samples, most draws], padded with -1) and their counts (int32)."""
    if num_draws.max() == 1:
        return np.where(accepted, tokens, -1).astype(np.int32)[:, None], accepted.astype(np.int32)
    sampled = np.full((len(num_draws), int(num_draws.max())), -1, np.int32)
    sample = np.repeat(np.arange(len(num_draws)), num_draws)
    column = np.arange(len(tokens)) - np.repeat(np.cumsum(num_draws) - num_draws, num_draws)
    sampled[sample[accepted], column[accepted]] = tokens[accepted]
    return sampled, np.bincount(sample[accepted], minlength=len(num_draws)).astype(np.int32)


def cause_of(error: Exception, device: Device) -> Exception:
    """Return WorkerDied if the device has failed, whatever `error` of the worker showed it first; otherwise `error`.

    A GPU reports its failure with whichever call comes next, often of a later step, and each library in its own words,
    while "out of memory" only concerns one step. So the device is asked. The error's traceback loses its variables:
    they would keep the memory of a step that needed too much.
    """
    shown: BaseException | None = error
    while shown is not None:
        traceback.clear_frames(shown.__traceback__)
        shown = shown.__cause__ or shown.__context__
    if isinstance(error, PagodaError):
        return error
    try:
        device.check()
    except WorkerDied as died:
        died.__cause__ = error
        return died
    return error
