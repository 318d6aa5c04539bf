"""EngineCore: the loop around scheduler and executor. `step` is the only place where time passes."""

import dataclasses
import logging
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from pagoda.base.clock import Clock
from pagoda.base.errors import InvariantBroken, PagodaError, RequestError, WorkerDied
from pagoda.core.decision_log import DecisionLog
from pagoda.core.executor import Executor
from pagoda.core.request import Request, RequestStatus
from pagoda.core.scheduler import Scheduler, SchedulerStats
from pagoda.core.scheduler_output import AdmitKind, EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from pagoda.engine.wire import EngineFacts

logger = logging.getLogger("pagoda")


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    output: SchedulerOutput
    future: "Future[ModelRunnerOutput]"


class EngineCore:
    """Takes requests and gives tokens. Not thread-safe: one loop calls it, other threads reach it through that loop.

    facts: what clients may want to know of the engine.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        facts: EngineFacts,
        vocab_size: int,
        pipeline_depth: int = 1,
    ) -> None:
        """pipeline_depth: steps that may be submitted before the first of them is home.

        The executor must have been started.
        """
        self.facts = facts
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._vocab_size = vocab_size
        self._depth = pipeline_depth
        self._in_flight: deque[_InFlight] = deque()
        self._mistrusted_to = 0  # steps up to this one were planned when an earlier one had failed unseen

    def now(self) -> float:
        """Seconds on the engine's clock: what Request.arrival_time_s is counted on."""
        return self._clock.now()

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestError for token ids the model does not have, and for a duplicate id.

        A request that fails to enter leaves nothing behind.
        """
        check_token_ids(request, self._vocab_size)
        try:
            self._scheduler.add_request(request)
        except PagodaError:  # raised by checks, before anything has changed
            raise
        except Exception as error:
            self._remove_half_added(request, error)
            raise

    def _remove_half_added(self, request: Request, cause: Exception) -> None:
        try:
            self._scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ERROR)
        except Exception as error:
            reason = f"request {request.request_id} failed to enter ({cause!r}) and cannot be removed ({error!r})"
            raise InvariantBroken(reason) from cause

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests wherever they stand; they yield nothing more. Unknown ids are ignored."""
        self._scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)

    def finish_branch(
        self, request_id: str, branch: int, status: RequestStatus = RequestStatus.FINISHED_STOPPED
    ) -> None:
        """End one branch from outside (a stop string was found in its text); its siblings go on."""
        self._scheduler.finish_sequence(request_id, branch, status)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do. Steps in flight of requests that have ended are still to be collected."""
        return self._scheduler.has_unfinished_requests() or bool(self._in_flight)

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Plan and submit one step, and collect the oldest when enough are in flight or nothing new could be planned.

        Returns what each client gets to hear, by client index; empty while steps are only being started.
        A step that fails ends the requests that were in it with ERROR. Raises WorkerDied when the executor is gone:
        the caller still has every request and what it has emitted so far, and can replay it elsewhere.
        """
        in_flight = self._in_flight
        if len(in_flight) < self._depth and (self._scheduler.has_unfinished_requests() or not in_flight):
            output = self._scheduler.schedule()
            if not output.is_empty or _has_events(output):
                in_flight.append(_InFlight(output, self._executor.submit(output)))
            elif not in_flight:
                return self._scheduler.update_from_output(output, None)
            if not output.is_empty and len(in_flight) < self._depth:
                return {}
        step = in_flight.popleft()
        return self._scheduler.update_from_output(step.output, self._result_of(step))

    def _result_of(self, step: _InFlight) -> ModelRunnerOutput:
        try:
            result = step.future.result()
        except (WorkerDied, InvariantBroken):
            raise
        except Exception as error:  # the step's requests end, the engine goes on
            logger.exception("step %d failed; its %d rows end with an error", step.output.step, len(step.output.rows))
            self._mistrusted_to = max((later.output.step for later in self._in_flight), default=0)
            return _failed_result(step.output, f"the step failed: {type(error).__name__}: {error}")
        if step.output.step <= self._mistrusted_to:
            return _without_shared_prefixes(step.output, result)
        return result

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget all cached prefixes. False, and nothing changed, while blocks are in use and must not be preempted."""
        return self._scheduler.reset_prefix_cache(preempt_running)

    def make_stats(self) -> SchedulerStats:
        """The scheduler's gauges and totals (see Scheduler.make_stats)."""
        return self._scheduler.make_stats()

    @property
    def explain(self) -> DecisionLog:
        """Why the last steps were planned as they were; empty unless `decision_log_steps` asked for it."""
        return self._scheduler.explain

    def shutdown(self) -> None:
        """End the executor; steps in flight are given up. Idempotent."""
        self._in_flight.clear()
        self._executor.shutdown()


def check_token_ids(request: Request, vocab_size: int) -> None:
    """Raises RequestError for a token id outside of 0 .. vocab_size - 1, before it can reach a kernel."""
    prompt = request.prompt_token_ids
    if not len(prompt):
        raise RequestError("the prompt is empty: at least one token is needed", "prompt")
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        bad = prompt[(prompt < 0) | (prompt >= vocab_size)][0]
        raise RequestError(f"prompt token id {bad} is outside of the vocabulary (0 .. {vocab_size - 1})", "prompt")
    params = request.sampling
    if params is None:
        return
    named = {
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": tuple(token for token, _ in params.logit_bias),
        "bad_words_token_ids": tuple(token for word in params.bad_words_token_ids for token in word),
    }
    for name, ids in named.items():
        if ids and not 0 <= (worst := min(ids) if min(ids) < 0 else max(ids)) < vocab_size:
            raise RequestError(f"{name}: id {worst} is outside of the vocabulary (0 .. {vocab_size - 1})", name)


def _has_events(output: SchedulerOutput) -> bool:
    """Whether a worker must see this output although it computes nothing."""
    return bool(
        output.released.size
        or output.admitted
        or output.forks
        or len(output.swap_out)
        or len(output.swap_in)
        or len(output.copies)
        or output.block_delta.rows.size
        or output.encoder_freed
        or output.finished_ids
    )


def _without_shared_prefixes(output: SchedulerOutput, result: ModelRunnerOutput) -> ModelRunnerOutput:
    """The result of a step planned before an earlier one was known to have failed.

    Rows admitted in it on a cached prefix may have read blocks that the failed step should have filled: they fail too.
    """
    message = "a step before this one failed, and had computed part of the prompt's prefix"
    prefixed = [init for init in output.admitted if init.num_computed and init.kind is not AdmitKind.SWAPPED_IN]
    doubtful = {init.row: message for init in prefixed}
    return dataclasses.replace(result, failed={**doubtful, **result.failed}) if doubtful else result


def _failed_result(output: SchedulerOutput, message: str) -> ModelRunnerOutput:
    """The result of a step none of whose rows may go on."""
    num_samples = len(output.sample_rows)
    return ModelRunnerOutput(
        output.step,
        sampled=np.full((num_samples, 1), -1, np.int32),
        num_sampled=np.zeros(num_samples, np.int32),
        failed=dict.fromkeys(output.rows.tolist(), message),
    )
