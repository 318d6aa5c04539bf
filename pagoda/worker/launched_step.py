"""LaunchedStep: a step that the device was given, until its results are collected."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.worker.devices.device import HostCopy
from pagoda.worker.grammar_rows import GrammarMasks
from pagoda.worker.inputs import StepInputs
from pagoda.worker.sampler import Drawn, Sampled


@dataclass(frozen=True, slots=True, eq=False)
class Submitted:
    """What is known of a step once its computations are submitted.

    copy: of `drawn`, then of the tensors of `prompt_logprobs`, three for each piece.   inputs: None for an empty step.
    users: see TokensInFlight.sampled; None if its tokens are not kept there.   drawn: None if nothing is sampled.
    prompt_logprobs: (row, number of pieces).   pooled, failed: row -> vector, message.
    """

    output: SchedulerOutput
    copy: HostCopy
    begin_s: float
    swap_s: float
    inputs: StepInputs | None = None
    users: np.ndarray | None = None
    drawn: Drawn | None = None
    masks: "Future[GrammarMasks] | None" = None
    prompt_logprobs: list[tuple[int, int]] = field(default_factory=list)
    pooled: dict[int, np.ndarray] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class LaunchedStep:
    """The handle of a step. Steps are collected in the order they were launched, on the thread that launches them."""

    def __init__(self, submitted: Submitted, collect: Callable[["LaunchedStep"], None]) -> None:
        """collect: sets the results of all steps up to this one."""
        self.submitted = submitted
        self._collect = collect
        self._result: ModelRunnerOutput | Exception | None = None

    def is_done(self) -> bool:
        """Return whether `result` would return at once."""
        return self._result is not None or self.submitted.copy.is_done()

    def wait(self) -> None:
        """Return when the device has computed the step. Any thread may wait."""
        self.submitted.copy.wait()

    def set_result(self, result: ModelRunnerOutput | Exception) -> None:
        self._result = result

    def result(self) -> ModelRunnerOutput:
        """Return the step's results, waiting for them if necessary. Raises what went wrong on the device."""
        if self._result is None:
            self._collect(self)
        assert self._result is not None
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def accepted_draws(inputs: StepInputs, drawn: Sampled, output: SchedulerOutput) -> np.ndarray:
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


def tokens_by_sample(num_draws: np.ndarray, tokens: np.ndarray, accepted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the accepted tokens (int32 [num_samples, most draws], padded with -1) and their counts (int32)."""
    if num_draws.max() == 1:
        return np.where(accepted, tokens, -1).astype(np.int32)[:, None], accepted.astype(np.int32)
    sampled = np.full((len(num_draws), int(num_draws.max())), -1, np.int32)
    sample = np.repeat(np.arange(len(num_draws)), num_draws)
    column = np.arange(len(tokens)) - np.repeat(np.cumsum(num_draws) - num_draws, num_draws)
    sampled[sample[accepted], column[accepted]] = tokens[accepted]
    return sampled, np.bincount(sample[accepted], minlength=len(num_draws)).astype(np.int32)
