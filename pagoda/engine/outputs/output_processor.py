"""OutputProcessor: turn the engine core's token columns into RequestOutputs with text."""

import codecs
import logging
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagoda.base.abbreviate import shown_id
from pagoda.base.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagoda.base.outputs import RequestOutputKind as OutputKind
from pagoda.core.events import (
    Admitted,
    ClientEvent,
    DraftsVerified,
    Ended,
    Held,
    Preempted,
    Queued,
    RequestEvent,
    Routed,
)
from pagoda.core.request import Reason, Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs, LogprobColumns
from pagoda.engine.outputs.detokenizer import Detokenizer, StopStrings
from pagoda.engine.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger("pagoda")

PROMPT_LOGPROBS = "the log-probabilities of the prompt"
_utf8 = codecs.getincrementaldecoder("utf-8")
_CLOSED = (b"", 0)  # its state between characters
ADMISSION = "admission and tokenizing"
SEEN = "the engine to see it"
_POSITIONS_AT_ONCE = 64
"""About 1 ms of work with 20 entries each."""


@dataclass(slots=True)
class ProcessedOutputs:
    """The result of processing one step.

    stopped: (handle, sequence) pairs that a stop string ended; the engine core must finish them too.
    failed: handles of requests whose output could not be processed; the engine core must abort them too.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    stopped: list[tuple[int, int]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)


class OutputProcessor:
    """The output state of every unfinished request of one client. Not thread-safe.

    is_lazy: leave converting the log-probabilities of prompts to the reader of the outputs (see `open`).
    """

    def __init__(self, tokenizer: Tokenizer, is_lazy: bool = False) -> None:
        self._tokenizer = tokenizer
        self._is_lazy = is_lazy
        self._by_handle: dict[int, _OpenRequest] = {}
        self._by_id: dict[str, _OpenRequest] = {}
        self._schedulers: defaultdict[int, _SchedulerTime] = defaultdict(_SchedulerTime)  # by replica; 0: of one engine
        # Prompts of one request have the same stop strings, and so have most requests of one program.
        self._stops: weakref.WeakValueDictionary[tuple[str, ...], StopStrings] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def handles_of(self, request_ids: Iterable[str]) -> list[int]:
        """Return the handles of requests; ignore unknown ids."""
        return [self._by_id[request_id].request.handle for request_id in request_ids if request_id in self._by_id]

    def last_events(self) -> Iterator[tuple[int, str, Queued | Held | Admitted | Preempted | None]]:
        """Iterate over unfinished requests: the handle, the id, and the last event that says if it waits."""
        for handle, state in self._by_handle.items():
            yield handle, state.request.request_id, state.last

    def open(
        self, request: Request, kind: OutputKind, prompt: str | None = None, sent_s: float | None = None
    ) -> "PromptLogprobs | None":
        """Add a request; its id and handle must not be in use.

        sent_s: when it is sent to an engine that sees it between two steps.
        Return the log-probabilities of its prompt, if it asked for them. If this processor is lazy, their reader
        calls `convert_some` until none is left, before it uses an output.
        """
        assert request.request_id not in self._by_id
        assert request.handle not in self._by_handle
        state = _OpenRequest(request, kind, prompt, self._tokenizer, self._stops_of(request))
        state.run_on(self._schedulers[0])
        if sent_s is not None:
            state.end_admission(sent_s)
        self._by_handle[request.handle] = self._by_id[request.request_id] = state
        return state.prompt_logprobs

    def _stops_of(self, request: Request) -> StopStrings | None:
        stop = request.sampling.stop if request.sampling is not None else ()
        stops = self._stops.get(stop)
        if stops is None and stop:
            stops = self._stops[stop] = StopStrings(stop)
        return stops

    def process(self, outputs: EngineCoreOutputs, now_s: float) -> ProcessedOutputs:
        """Process one step's outputs. Ignore tokens of requests and sequences that have finished meanwhile."""
        done = ProcessedOutputs()
        self._note_time(outputs)
        touched: dict[int, _OpenRequest] = {}
        ends = {(end.handle, end.sequence): end for end in outputs.ends}
        for event in outputs.events:
            self._note(event)
        for handle, columns in outputs.prompt_logprobs.items():
            state = self._by_handle.get(handle)
            if state is None or state.prompt_logprobs is None:
                continue
            try:
                state.prompt_logprobs.add(columns)
                while not self._is_lazy and state.prompt_logprobs.convert_some():
                    pass
            except Exception as error:  # concerns this request only
                state.fail(PROMPT_LOGPROBS, error)
                touched[handle] = state
                done.failed.append(handle)
        for handle, vector in outputs.pooled.items():
            if (state := self._by_handle.get(handle)) is not None:
                state.pooled = vector  # its request ends in the same step
        token_ids = outputs.token_ids.tolist()
        at = 0
        for handle, index, count in zip(
            outputs.handles.tolist(), outputs.sequences.tolist(), outputs.counts.tolist(), strict=True
        ):
            new, first, at = token_ids[at : at + count], at, at + count
            state = self._by_handle.get(handle)
            if state is None or not state.request.wants_output or (sequence := state.sequences[index]).is_done:
                continue
            touched[handle] = state
            try:
                if sequence.append(new, ends.get((handle, index)), outputs.logprobs, first):
                    done.stopped.append((handle, index))
            except Exception as error:  # concerns this request only
                state.fail("the output", error)
                done.failed.append(handle)
        for end in ends.values():
            state = self._by_handle.get(end.handle)
            if state is not None and not state.sequences[end.sequence].is_done:
                touched[end.handle] = state
                state.end_sequence(end)
        for state in touched.values():
            self._emit(state, now_s, done.outputs)
        return done

    def _note_time(self, outputs: EngineCoreOutputs) -> None:
        if outputs.scheduler_s:  # all is of requests of one engine
            events = (event.handle for event in outputs.events if isinstance(event, RequestEvent))
            states = map(self._by_handle.get, (*outputs.handles.tolist(), *events))
            if (state := next(filter(None, states), None)) is not None:
                state.scheduler.note(outputs.scheduler_s)

    def _note(self, event: ClientEvent) -> None:
        """Add an event to the metrics of its request."""
        match event:
            case Queued() | Held() | Admitted() | Preempted():
                if (state := self._by_handle.get(event.handle)) is not None:
                    state.note(event)
            case Routed():
                if (state := self._by_handle.get(event.handle)) is not None:
                    state.run_on(self._schedulers[event.replica])
            case DraftsVerified(handles=handles, num_drafted=drafted, num_accepted=accepted):
                for handle, num_drafted, num_accepted in zip(handles, drafted, accepted, strict=True):
                    if (state := self._by_handle.get(handle)) is not None:
                        state.metrics.num_draft_tokens += num_drafted
                        state.metrics.num_accepted_tokens += num_accepted
            case _:
                pass

    def abort(self, request_ids: Iterable[str], now_s: float) -> list[RequestOutput]:
        """Finish requests as aborted and return their last outputs. Ignore unknown ids."""
        outputs: list[RequestOutput] = []
        for request_id in request_ids:
            state = self._by_id.get(request_id)
            if state is not None:
                state.end_all(RequestStatus.FINISHED_ABORTED)
                self._emit(state, now_s, outputs)
        return outputs

    def close(self, request_id: str) -> None:
        """Remove a request without a last output."""
        state = self._by_id.pop(request_id, None)
        if state is not None:
            del self._by_handle[state.request.handle]

    @property
    def live_ids(self) -> list[str]:
        return list(self._by_id)

    def _emit(self, state: "_OpenRequest", now_s: float, into: list[RequestOutput]) -> None:
        if state.metrics.first_token_time is None and any(sequence.token_ids for sequence in state.sequences):
            state.metrics.first_token_time = now_s
        if state.metrics.first_token_time is not None:
            state.metrics.last_token_time = now_s
        state.metrics.scheduler_time = state.scheduler_s
        finished = all(sequence.is_done for sequence in state.sequences)
        if finished:
            state.metrics.finished_time = now_s
            self.close(state.request.request_id)
        if finished or state.kind is not OutputKind.FINAL_ONLY:
            into.append(state.output(finished))


@dataclass(slots=True)
class _SchedulerTime:
    """What an engine's scheduler has taken, as far as this client has seen.   last_s: that the engine has told."""

    total_s: float = 0.0
    last_s: float | None = None

    def note(self, told_s: float) -> None:
        """told_s: since the engine process began, which may be another one than before."""
        if self.last_s is not None:
            self.total_s += told_s - (self.last_s if told_s >= self.last_s else 0.0)
        self.last_s = told_s


class _OpenRequest:
    """One request: its sequences, and what they share."""

    def __init__(
        self, request: Request, kind: OutputKind, prompt: str | None, tokenizer: Tokenizer, stops: StopStrings | None
    ) -> None:
        self.request = request
        self.kind = kind
        self.prompt = prompt
        self.prompt_token_ids: list[int] = request.prompt_token_ids.tolist()
        is_final_only = kind is OutputKind.FINAL_ONLY
        self.sequences = [
            OutputSequence(request, index, is_final_only, tokenizer, stops) for index in range(request.num_seqs)
        ]
        self.metrics = RequestMetrics(arrival_time=request.arrival_time_s)
        self.scheduler, self._scheduler_began_s = _SchedulerTime(), 0.0
        self._waits_for, self._waits_since_s = ADMISSION, request.arrival_time_s
        self._preempted_s: float | None = None  # since when it waits to run again
        self.last: Queued | Held | Admitted | Preempted | None = None
        self.num_cached_tokens: int | None = None
        self.error: str | None = None
        self._cut_short: str | None = None  # why a sequence ended before its time
        self.pooled: np.ndarray | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        params = request.sampling
        if params is not None and params.prompt_logprobs is not None:
            shown_with = tokenizer if params.detokenize else None
            self.prompt_logprobs = PromptLogprobs(self.prompt_token_ids, params.prompt_logprobs, shown_with)

    def run_on(self, scheduler: _SchedulerTime) -> None:
        """From now on, it is a request of this scheduler's engine."""
        self._scheduler_began_s = scheduler.total_s - self.scheduler_s
        self.scheduler = scheduler

    @property
    def scheduler_s(self) -> float:
        """Seconds that schedulers took while this was a request of their engines."""
        return self.scheduler.total_s - self._scheduler_began_s

    def note(self, event: Queued | Held | Admitted | Preempted) -> None:
        """Record what the request waited for, and when it ran. What was before its first step is not changed later."""
        self.last = event
        metrics, is_new = self.metrics, self.metrics.first_scheduled_time is None
        if is_new:
            self._end_wait(event.time_s)
        match event:
            case Queued():
                self._waits_for = Reason.TURN.value
            case Held():
                self._waits_for = event.reason.value
            case Admitted() if is_new:
                self.num_cached_tokens = event.num_cached or 0
                metrics.first_scheduled_time = event.time_s
            case Admitted():
                if self._preempted_s is not None:
                    metrics.preempted_time += event.time_s - self._preempted_s
                    self._preempted_s = None
            case Preempted():
                metrics.num_preemptions += 1
                metrics.num_lost_tokens += event.lost_tokens
                self._preempted_s = event.time_s

    def end_admission(self, now_s: float) -> None:
        self._end_wait(now_s)
        self._waits_for = SEEN

    def _end_wait(self, now_s: float) -> None:
        reasons = self.metrics.queue_reasons
        reasons[self._waits_for] = reasons.get(self._waits_for, 0.0) + now_s - self._waits_since_s
        self._waits_since_s = now_s

    def end_sequence(self, end: Ended) -> None:
        """Finish a sequence without new tokens, or with an error."""
        if end.message is not None and end.status is RequestStatus.FINISHED_LENGTH_CAPPED:
            self._cut_short = end.message
            logger.warning("request %s: output %d ends early: %s", shown_id(end.request_id), end.sequence, end.message)
        elif end.message is not None:
            self.error = end.message
        self.sequences[end.sequence].end(end.status)

    def fail(self, what: str, error: Exception) -> None:
        """Finish with an error without touching the text, which may be what failed.   what: could not be processed."""
        logger.error("%s of request %s could not be processed", what, shown_id(self.request.request_id), exc_info=error)
        self.error = f"{what} could not be processed: {type(error).__name__}: {error}"
        for sequence in self.sequences:
            if not sequence.is_done:
                sequence.finish_reason = RequestStatus.FINISHED_ERROR.finish_reason

    def end_all(self, status: RequestStatus) -> None:
        for sequence in self.sequences:
            if not sequence.is_done:
                sequence.end(status)

    def output(self, finished: bool) -> RequestOutput:
        """Return the output to emit now. A delta has only sequences with something new, and each finish once."""
        if finished and self.error is None and not any(sequence.token_ids for sequence in self.sequences):
            self.error = self._cut_short  # it has no text that could be its output
        if self.kind is OutputKind.DELTA:
            parts = [part for sequence in self.sequences if (part := sequence.delta()) is not None]
        else:
            parts = [sequence.whole() for sequence in self.sequences]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=parts,
            finished=finished,
            prompt_logprobs=self.prompt_logprobs.rows if self.prompt_logprobs is not None else None,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
            pooled=self.pooled,
        )


class OutputSequence:
    """One output sequence: its tokens, its text and its finish reason."""

    def __init__(
        self, request: Request, index: int, is_final_only: bool, tokenizer: Tokenizer, stops: StopStrings | None
    ) -> None:
        """is_final_only: only the finished output is read.

        stops: shared by all sequences of the request; None if it has no stop strings.
        """
        params = request.sampling
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        wants_text = params is not None and params.detokenize
        self._logprob_texts = LogprobTexts(tokenizer if wants_text else None)
        self._logprob_texts.has_ranks = params is None or params.logprob_token_ids is None
        self._num_logprobs = params.logprobs if params is not None else None
        self._include_stop = params is not None and params.include_stop_str_in_output
        self._logprobs: list[dict[int, Logprob]] | None = [] if self._num_logprobs is not None else None
        self._cumulative = 0.0
        self._detokenizer = Detokenizer(tokenizer, params, stops) if wants_text and params is not None else None
        # If only the final text is needed, and not for stop strings, one pass over all tokens at the end is cheapest.
        self._late = is_final_only and params is not None and not params.stop
        self._num_emitted = 0
        self._end_emitted = False

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def append(self, new: list[int], end: Ended | None, logprobs: LogprobColumns | None, first_row: int) -> bool:
        """Add tokens, and finish if `end` is given. Return True if a stop string ended the sequence before the core."""
        ended_by_token = end is not None and end.status is RequestStatus.FINISHED_STOPPED
        unseen = 1 if ended_by_token and not self._include_stop else 0
        kept, stopped_by = len(new), None
        if self._detokenizer is not None and not self._late:
            kept = self._detokenizer.append(new[: len(new) - unseen]) + unseen
            stopped_by = self._detokenizer.stopped_by
            if stopped_by is not None:
                kept -= unseen
        self.token_ids += new[:kept]
        if self._logprobs is not None and self._num_logprobs is not None and logprobs is not None:
            for row in range(first_row, first_row + kept):
                self._logprobs.append(self._logprob_texts.entry(logprobs, row, self._num_logprobs))
                self._cumulative += float(logprobs.logprobs[row, 0])
        if stopped_by is not None:
            self.finish_reason, self.stop_reason = "stop", stopped_by
            return end is None
        if end is not None:
            self._finish_text(unseen)
            self.finish_reason, self.stop_reason = end.status.finish_reason, end.stop_reason
        return False

    def end(self, status: RequestStatus) -> None:
        """Finish without new tokens."""
        self._finish_text()
        self.finish_reason = status.finish_reason

    def _finish_text(self, num_unseen: int = 0) -> None:
        """num_unseen: tokens at the end that are not part of the text."""
        if self._detokenizer is not None:
            if self._late:
                self._detokenizer.append(self.token_ids[: len(self.token_ids) - num_unseen])
            self._detokenizer.finish()

    def whole(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self._detokenizer.text if self._detokenizer is not None else "",
            token_ids=list(self.token_ids),
            cumulative_logprob=self._cumulative if self._logprobs is not None else None,
            logprobs=list(self._logprobs) if self._logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def delta(self) -> CompletionOutput | None:
        """Return what was not emitted yet, or None. Tokens may be emitted before their text is complete."""
        text = self._detokenizer.take() if self._detokenizer is not None else ""
        tokens = self.token_ids[self._num_emitted :]
        if not text and not tokens and (self._end_emitted or not self.is_done):
            return None
        logprobs = self._logprobs
        if logprobs is not None:
            self._logprobs = []  # emitted log-probabilities are dropped: they take far more memory than tokens
        self._num_emitted = len(self.token_ids)
        self._end_emitted = self.is_done
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=tokens,
            cumulative_logprob=self._cumulative if logprobs is not None else None,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class PromptLogprobs:
    """rows: one entry per prompt position that has been converted; the first is None, as it has no prefix.

    Storing columns costs nothing; converting thousands of positions takes long, so an event loop converts them in
    pieces, and only when the request's own reader needs them.
    """

    def __init__(self, prompt_token_ids: Sequence[int], num_top: int, tokenizer: Tokenizer | None) -> None:
        self.rows: list[dict[int, Logprob] | None] = [None]
        self._num_missing = len(prompt_token_ids) - 1
        self._num_top = num_top
        self._texts = LogprobTexts(tokenizer, prompt_token_ids[:1])
        self._columns: deque[LogprobColumns] = deque()

    def add(self, columns: LogprobColumns) -> None:
        """Add the columns of the next positions, which arrive in order. Ignores more than the prompt has."""
        size = len(columns.ranks)
        for at in range(0, min(size, self._num_missing), _POSITIONS_AT_ONCE):
            part = slice(at, min(at + _POSITIONS_AT_ONCE, self._num_missing))
            self._columns.append(LogprobColumns(columns.token_ids[part], columns.logprobs[part], columns.ranks[part]))
        self._num_missing -= min(size, self._num_missing)

    @property
    def has_more(self) -> bool:
        """Whether positions have arrived that are not converted."""
        return bool(self._columns)

    def convert_some(self) -> bool:
        """Convert a few positions. Return whether more are left."""
        if self._columns:
            columns = self._columns.popleft()
            self.rows += [self._texts.entry(columns, row, self._num_top) for row in range(len(columns.ranks))]
        return bool(self._columns)


class LogprobTexts:
    """Says what each token adds to the text before it: "" in the middle of a character, which its last token adds.

    has_ranks: False for candidates in any order.
    tokenizer: None leaves out the texts.   before: the tokens in front of the first entry, if there are any.
    """

    def __init__(self, tokenizer: Tokenizer | None, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._open: tuple[bytes, int] = _CLOSED
        self.has_ranks = True
        for token_id in before:
            self._open = self._read(token_id)[1]

    def entry(self, columns: LogprobColumns, row: int, num_top: int) -> dict[int, Logprob]:
        """Return the next position's candidates by token id: its own token, then the `num_top` most likely."""
        ids: Sequence[int] = columns.token_ids[row, : num_top + 1].tolist()
        values: Sequence[float] = columns.logprobs[row, : num_top + 1].tolist()
        own, after = self._read(ids[0])
        entry = {ids[0]: Logprob(values[0], int(columns.ranks[row]), own)}
        for rank, (token_id, value) in enumerate(zip(ids[1:], values[1:], strict=True), start=1):
            if token_id != ids[0]:
                entry[token_id] = Logprob(value, rank if self.has_ranks else None, self._read(token_id)[0])
        self._open = after
        return entry

    def _read(self, token_id: int) -> tuple[str | None, tuple[bytes, int]]:
        if self._tokenizer is None:
            return None, self._open
        data = self._tokenizer.token_bytes(token_id)
        if self._open == _CLOSED and data.isascii():
            return data.decode(), _CLOSED
        decoder = _utf8("replace")
        decoder.setstate(self._open)
        return decoder.decode(data), decoder.getstate()
