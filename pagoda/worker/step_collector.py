"""StepCollector: launched steps, in order, until their results are on the host and committed."""

import time
from collections import deque

import numpy as np

from pagoda.core.scheduler_output import ModelRunnerOutput
from pagoda.worker.device_failure import cause_of
from pagoda.worker.devices import Device
from pagoda.worker.drafting import Drafting
from pagoda.worker.grammar_rows import GrammarMasks
from pagoda.worker.inputs import StepInputs
from pagoda.worker.launched_step import LaunchedStep, Submitted, accepted_draws, tokens_by_sample
from pagoda.worker.sampler import Sampled, prompt_logprob_columns
from pagoda.worker.step_times import StepTimes
from pagoda.worker.table_mirror import TableMirror
from pagoda.worker.tokens_in_flight import TokensInFlight

_NO_TOKENS = np.empty((0, 1), np.int32)
_NO_COUNTS = np.empty(0, np.int32)
_NOT_FINITE = "the model's logits are not finite, or all tokens are forbidden"


class StepCollector:
    """Waits for the results of steps, commits their tokens to the table, and asks for the next step's drafts."""

    def __init__(
        self, table: TableMirror, tokens: TokensInFlight, drafting: Drafting, times: StepTimes, device: Device
    ) -> None:
        self._table = table
        self._tokens = tokens
        self._drafting = drafting
        self._times = times
        self._device = device
        self._launched: deque[LaunchedStep] = deque()  # and not collected
        self._end_s = 0.0  # when the last step was collected

    def __bool__(self) -> bool:
        """Return whether there are steps whose results are not collected."""
        return bool(self._launched)

    def add(self, submitted: Submitted) -> LaunchedStep:
        """Return the handle of a step that the device was given."""
        step = LaunchedStep(submitted, self._collect)
        self._launched.append(step)
        return step

    def collect_done(self) -> None:
        """Collect the steps whose results are there."""
        while self._launched and self._launched[0].is_done():
            self._collect(self._launched[0])

    def collect_all(self) -> None:
        """Collect all steps, waiting for them."""
        if self._launched:
            self._collect(self._launched[-1])

    def _collect(self, last: LaunchedStep) -> None:
        """Collect the results of all steps up to `last`, in order."""
        step = None
        while step is not last:
            step = self._launched.popleft()
            try:
                step.set_result(self._results_of(step.submitted))
            except Exception as error:  # raised to whom asks for this step's results
                step.set_result(cause_of(error, self._device))

    def _results_of(self, step: Submitted) -> ModelRunnerOutput:
        """Wait for a step's results and commit its tokens to the table."""
        arrays = step.copy.wait()
        self._times.resume()
        output, inputs, failed = step.output, step.inputs, step.failed
        sampled, num_sampled, logprobs = _NO_TOKENS, _NO_COUNTS, None
        masks = step.masks.result() if step.masks is not None else None
        if step.drawn is not None:
            assert inputs is not None
            num_arrays = len(step.drawn.tensors)
            drawn, arrays = step.drawn.on_host(arrays[:num_arrays]), arrays[num_arrays:]
            failed = _failed_draws(inputs, drawn, masks) | failed
            accepted = accepted_draws(inputs, drawn, output)
            self._commit(step, drawn, accepted)
            sampled, num_sampled = tokens_by_sample(inputs.num_draws, drawn.tokens, accepted)
            logprobs = drawn.logprobs
            if logprobs is not None and not accepted.all():
                logprobs = logprobs[accepted]
        self._times.lap("results")
        drafts: dict[int, np.ndarray] = {}
        if self._drafting.is_on and not output.is_empty:
            drafts = self._drafting.finish_step(output, self._table, num_sampled, failed)
            self._times.lap("drafting")
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
            refused=masks.refused if masks is not None else frozenset(),
            duration_s=duration_s,
            swap_s=step.swap_s,
            drafts=drafts,
            no_drafts_until=self._drafting.no_drafts_until if not output.is_empty else 0,
        )

    def _commit(self, step: Submitted, drawn: Sampled, accepted: np.ndarray) -> None:
        """Write a step's tokens to the rows that still belong to the sequences they were sampled for."""
        assert step.inputs is not None
        rows, positions = step.inputs.draw_rows, step.inputs.draw_positions
        if step.users is not None:
            accepted = accepted & self._tokens.arrived(rows, positions, step.users)
        self._table.record_tokens(rows[accepted], positions[accepted], drawn.tokens[accepted])


def _failed_draws(inputs: StepInputs, drawn: Sampled, masks: GrammarMasks | None) -> dict[int, str]:
    """Return the rows that get no token, with the reason; mark the draws of rows whose grammar has failed."""
    if masks is not None and masks.failed:
        drawn.finite[np.isin(inputs.draw_rows, list(masks.failed))] = False
    if drawn.finite.all():
        return {}
    first = np.cumsum(inputs.num_draws) - inputs.num_draws
    failed = dict.fromkeys(inputs.draw_rows[first[~drawn.finite[first]]].tolist(), _NOT_FINITE)
    return failed | (masks.failed if masks is not None else {})
