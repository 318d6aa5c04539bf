"""EngineCore: the loop around scheduler and executor, advanced by `step`."""

import logging
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from pagoda.base.abbreviate import shown_id
from pagoda.base.clock import Clock
from pagoda.base.errors import InvariantBroken, PagodaError, RequestError, WorkerDied
from pagoda.core.decision_log import DecisionLog
from pagoda.core.events import Fold
from pagoda.core.request import LoraRef, Request, RequestKey, RequestStatus
from pagoda.core.scheduler_interface import SchedulerInterface
from pagoda.core.scheduler_output import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from pagoda.core.stats import SchedulerStats
from pagoda.core.view import SchedulerView
from pagoda.engine.executor import Executor
from pagoda.engine.flight_recorder import FlightRecorder
from pagoda.engine.preparations import ExecutorPreparations
from pagoda.engine.step_strip import StepStrip
from pagoda.engine.wire import EngineSizes
from pagoda.models.base import Encoder, check_media
from pagoda.worker.calls import StepProfile

logger = logging.getLogger("pagoda")

_PREPARATION_WAIT_S = 0.005  # so that messages are still read while grammars compile


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    output: SchedulerOutput
    future: "Future[ModelRunnerOutput]"


class EngineTier(Protocol):
    """What the loop asks of a tier that the scheduler has."""

    def wait(self, timeout_s: float) -> None:
        """Return when blocks have been loaded, at once if none are being loaded, or after `timeout_s`."""
        ...

    def close(self) -> None:
        """Write what still waits, as far as that goes in a short time, and let go of the pool. Idempotent."""
        ...


class EngineCore:
    """Runs requests and returns their tokens. Not thread-safe: only one thread may call it.

    sizes: for its clients, known once the model is loaded.
    """

    def __init__(
        self,
        scheduler: SchedulerInterface,
        executor: Executor,
        clock: Clock,
        sizes: EngineSizes,
        vocab_size: int,
        pipeline_depth: int = 1,
        preparations: ExecutorPreparations | None = None,
        *,
        waits_for_drafts: bool = False,
        embeds_size: int = 0,
        encoder: Encoder | None = None,
        crosses: bool = False,
        recorder: FlightRecorder | None = None,
        tier: "EngineTier | None" = None,
    ) -> None:
        """pipeline_depth: most steps in flight at once.   executor: already started.

        waits_for_drafts: schedule no step while one is in flight whose result may propose drafts (see
        ModelRunnerOutput.no_drafts_until): drafts for rows that are scheduled already are of no use.
        preparations: of grammars and adapters, those of the scheduler; None if requests can have neither.
        embeds_size: elements of a prompt embedding; 0 if prompts cannot be given as embeddings.
        encoder: of the model, which knows the media items that it reads; None if it reads none.
        crosses: it is of an encoder-decoder model.
        recorder: what records which requests are in a step, None without one.   tier: that of the scheduler.
        """
        self.sizes = sizes
        self.strip = StepStrip(executor, recorder)
        self._scheduler = scheduler
        self._executor = executor
        self.scheduler_s = 0.0
        """Seconds that planning and committing steps have taken."""
        self.idle_s = 0.0
        """Seconds that `step` waited because all requests did, for a grammar, an adapter or blocks of a tier."""
        self._clock = clock
        self._vocab_size = vocab_size
        self._depth = pipeline_depth
        self._preparations = preparations
        self._tier = tier
        self._embeds_size = embeds_size
        self._encoder, self._crosses = encoder, crosses
        self._waits_for_drafts = waits_for_drafts
        self._no_drafts_until = 0  # the last step that is certain to propose none
        self._in_flight: deque[_InFlight] = deque()
        self._closes: list[Callable[[], object]] = []

    def now(self) -> float:
        """Return the engine's clock in seconds; Request.arrival_time_s uses the same clock."""
        return self._clock.now()

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestError for token ids outside of the vocabulary.

        Its id is a label: several clients may use the same, or one client again.
        If it fails, the engine's state is unchanged.
        """
        check_token_ids(request, self._vocab_size)
        check_embeds(request, self._embeds_size)
        check_media(request, self._encoder, self._crosses)
        if request.lora is not None:
            self._require_adapters()
        structure = request.sampling.structured_outputs if request.sampling is not None else None
        if structure is not None or (request.grammar is not None and self._preparations is None):
            raise RequestError("structured output is not available on this engine", "structured_outputs")
        if self._preparations is not None:
            self._preparations.begin(request)
        try:
            self._scheduler.add_request(request)
        except PagodaError:  # raised by checks, before anything has changed
            raise
        except Exception as error:
            self._remove_half_added(request, error)
            raise

    def _remove_half_added(self, request: Request, cause: Exception) -> None:
        try:
            self._scheduler.finish_requests([request.key], RequestStatus.FINISHED_ERROR)
        except Exception as error:
            reason = (
                f"request {shown_id(request.request_id)} could not be queued ({cause!r}) nor removed again ({error!r})"
            )
            raise InvariantBroken(reason) from cause

    def abort(self, keys: Collection[RequestKey]) -> None:
        """Abort requests in any state; they produce no further output. Ignore unknown ones."""
        self._scheduler.finish_requests(keys, RequestStatus.FINISHED_ABORTED)

    def finish_sequence(
        self, key: RequestKey, sequence: int, status: RequestStatus = RequestStatus.FINISHED_STOPPED
    ) -> None:
        """Finish one sequence from outside (a stop string was found); the request's other sequences continue."""
        self._scheduler.finish_sequence(key, sequence, status)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has work. Steps in flight count, even if all their requests have finished."""
        return self._scheduler.has_unfinished_requests() or bool(self._in_flight)

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Schedule and submit one step; collect the oldest if the pipeline is full or nothing could be scheduled.

        Return the outputs by client index; empty while the pipeline fills. If a step fails, its requests finish with
        ERROR. Raises WorkerDied if the executor has died: the caller still has all requests and their emitted tokens,
        and can replay them on another engine.
        """
        in_flight = self._in_flight
        if self._may_schedule() and (self._scheduler.has_unfinished_requests() or not in_flight):
            began_s = self._clock.now()
            output = self._scheduler.schedule()
            planned_s = self._clock.now()
            self.scheduler_s += planned_s - began_s
            if not output.is_empty or output.has_events:
                in_flight.append(_InFlight(output, self.strip.submit(output)))
            elif not in_flight:
                outputs = self._scheduler.update_from_output(output, None)
                if not outputs and self._preparations is not None:
                    self._preparations.wait(_PREPARATION_WAIT_S)
                if not outputs and self._tier is not None:
                    self._tier.wait(_PREPARATION_WAIT_S)
                self.idle_s += self._clock.now() - planned_s
                return self._with_time(outputs)
            if not output.is_empty and self._may_schedule():
                return {}
        return self._collect(in_flight.popleft())

    def _collect(self, step: _InFlight) -> dict[int, EngineCoreOutputs]:
        try:
            result = step.future.result()
        except (WorkerDied, InvariantBroken):
            raise
        except Exception as error:  # only the step's requests fail
            logger.exception("step %d failed; its %d rows end with an error", step.output.step, len(step.output.rows))
            began_s = self._clock.now()
            outputs = self._scheduler.fail_step(step.output, f"the step failed: {type(error).__name__}: {error}")
        else:
            self._no_drafts_until = max(self._no_drafts_until, result.no_drafts_until)
            began_s = self._clock.now()
            outputs = self._scheduler.update_from_output(step.output, result)
        self.scheduler_s += self._clock.now() - began_s
        return self._with_time(outputs)

    def _with_time(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        return {client: replace(one, scheduler_s=self.scheduler_s) for client, one in outputs.items()}

    def _may_schedule(self) -> bool:
        """Return whether another step may be scheduled before the oldest result is collected."""
        in_flight = self._in_flight
        if not in_flight or not self._waits_for_drafts:
            return len(in_flight) < self._depth
        return len(in_flight) < self._depth and in_flight[-1].output.step <= self._no_drafts_until

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Empty the prefix cache. Return False, changing nothing, if blocks are in use and preempt_running is False."""
        return self._scheduler.reset_prefix_cache(preempt_running)

    def begin_load_adapter(self, lora: LoraRef) -> "Future[Any]":
        """Begin to read a LoRA adapter, so that the first request that uses it need not wait; steps go on meanwhile.

        When the future is done, call `end_load_adapter`.
        """
        preparations = self._require_adapters()
        self._release_rows()
        return preparations.begin_load(lora)

    def end_load_adapter(self, lora: LoraRef, loaded: "Future[Any]") -> None:
        """Wait for what `begin_load_adapter` returned. Raises RequestError if the adapter cannot be used."""
        self._require_adapters().end_load(lora, loaded)

    def adapter_counts(self) -> tuple[int, int]:
        """Return how many LoRA adapters were read from disk, and how many were dropped for others."""
        known = self._preparations
        return (known.num_adapters_read, known.num_adapters_dropped) if known is not None else (0, 0)

    def unload_adapter(self, lora: LoraRef) -> None:
        """Free an adapter's memory once no running request uses it. Ignore one that is not loaded."""
        if self._preparations is not None:
            self._release_rows()
            self._preparations.unload_adapter(lora)

    def _release_rows(self) -> None:
        """Let the worker forget the rows of ended requests, if there is no next step that will tell it to."""
        if not self.has_unfinished_requests():
            output = self._scheduler.schedule()
            if output.has_events:  # `step` collects it, with the events of requests that were aborted
                self._in_flight.append(_InFlight(output, self.strip.submit(output)))

    def _require_adapters(self) -> ExecutorPreparations:
        if self._preparations is None or not self._preparations.takes_adapters:
            raise RequestError("LoRA adapters are off on this engine: set enable_lora", "lora_request")
        return self._preparations

    def begin_profile(self) -> None:
        """Measure the steps from now on, until `profile`."""
        self._executor.call("begin_profile").result()

    def profile(self) -> StepProfile:
        """Return where the time of the steps since `begin_profile` went."""
        return self._executor.call("profile").result()

    def make_stats(self) -> SchedulerStats:
        """Return the scheduler's gauges and counters (see Scheduler.make_stats)."""
        return self._scheduler.make_stats()

    def view(self) -> SchedulerView:
        """Return what runs now and who has which blocks."""
        return self._scheduler.view()

    def subscribe(
        self, fold: Fold, *, cache: bool = False, close: Callable[[], object] | None = None
    ) -> Callable[[], None]:
        """Give `fold` every event from now on (see Scheduler.subscribe).   close: called at shutdown."""
        if close is not None:
            self._closes.append(close)
        return self._scheduler.subscribe(fold, cache=cache)

    @property
    def explain(self) -> DecisionLog:
        """The decisions of the last `decision_log_steps` steps; empty if that is 0."""
        return self._scheduler.explain

    def flush(self) -> None:
        """Let the tier write what it still has to, as far as that goes in a short time. From any thread. Idempotent."""
        if self._tier is not None:
            self._tier.close()

    def shutdown(self) -> None:
        """Shut down the executor; drop steps in flight. Idempotent."""
        self._in_flight.clear()
        self.flush()
        self._executor.shutdown()
        while self._closes:
            self._closes.pop()()


def why_refused(request_id: str, error: BaseException) -> tuple[str, RequestStatus]:
    """Return how a request ends that `EngineCore.add_request` raised an error for; log it if that is a bug."""
    if isinstance(error, PagodaError):
        return str(error), RequestStatus.FINISHED_IGNORED
    logger.error("request %s could not be queued", shown_id(request_id), exc_info=error)
    reason = f"the engine could not queue this request: {type(error).__name__}: {error}"
    return reason, RequestStatus.FINISHED_ERROR


def check_token_ids(request: Request, vocab_size: int) -> None:
    """Raise RequestError for a token id outside of 0 .. vocab_size - 1, before it can reach a kernel."""
    prompt = request.prompt_token_ids
    if not len(prompt):
        raise RequestError("the prompt is empty: at least one token is needed", "prompt")
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        bad = prompt[(prompt < 0) | (prompt >= vocab_size)][0]
        raise RequestError(f"prompt token id {bad} is out of vocabulary (0 .. {vocab_size - 1})", "prompt")
    for name, ids in request.sampling.named_token_ids.items() if request.sampling is not None else ():
        if ids and not 0 <= (worst := min(ids) if min(ids) < 0 else max(ids)) < vocab_size:
            raise RequestError(f"{name}: id {worst} is out of vocabulary (0 .. {vocab_size - 1})", name)


def check_embeds(request: Request, size: int) -> None:
    """Raise RequestError unless the prompt's embeddings are float32 [n, size], finite, and at n of its positions.

    size: 0 if prompts cannot be given as embeddings.
    """
    embeds = request.prompt_embeds
    if embeds is None:
        return
    if not size:
        raise RequestError("prompt embeddings are off on this engine: set enable_prompt_embeds", "prompt_embeds")
    values, positions = embeds.values, embeds.positions
    if not len(positions) or values.dtype != np.float32 or values.shape != (len(positions), size):
        raise RequestError(f"prompt_embeds: {values.dtype} {values.shape} does not fit the model", "prompt_embeds")
    if positions[0] < 0 or (np.diff(positions) <= 0).any() or embeds.end > request.num_prompt_tokens:
        raise RequestError("prompt_embeds: the positions are not ascending ones of the prompt", "prompt_embeds")
    if not np.isfinite(values).all():
        raise RequestError("prompt_embeds: has values that are not finite", "prompt_embeds")
    if request.sampling is not None and request.sampling.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs: embeddings have no tokens that could be probable", "prompt_logprobs")
