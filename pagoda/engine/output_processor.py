"""OutputProcessor: columns of tokens from the engine core become RequestOutputs with text."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pagoda.base.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagoda.core.request import Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs, Finish, LogprobColumns
from pagoda.engine.detokenizer import Detokenizer
from pagoda.engine.stop_strings import StopStrings
from pagoda.engine.tokenizer import Tokenizer

logger = logging.getLogger("pagoda")

_POSITIONS_AT_ONCE = 64


class OutputKind(Enum):
    CUMULATIVE = "cumulative"  # everything so far, after every step
    DELTA = "delta"  # what is new, after every step
    FINAL_ONLY = "final_only"  # everything, once


@dataclass(slots=True)
class ProcessedOutputs:
    """What one step gave its readers.

    stopped: (request id, branch) that ended by a stop string: the engine core has to end it too.
    failed: ids of requests whose output could not be read, and which ended with an error: likewise.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    stopped: list[tuple[str, int]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class OutputProcessor:
    """Follows every live request of one client. Not for use by two threads at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._by_handle: dict[int, _LiveRequest] = {}
        self._by_id: dict[str, _LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def open(self, request: Request, kind: OutputKind, prompt: str | None = None) -> None:
        """Begin to follow a request; its id and handle must not be live."""
        assert request.request_id not in self._by_id
        assert request.handle not in self._by_handle
        live = _LiveRequest(request, kind, prompt, self._tokenizer)
        self._by_handle[request.handle] = self._by_id[request.request_id] = live

    def process(self, outputs: EngineCoreOutputs, now_s: float) -> ProcessedOutputs:
        """Take what a step gave. Tokens of requests and branches that have ended meanwhile are ignored."""
        done = ProcessedOutputs()
        touched: dict[int, _LiveRequest] = {}
        ends = {(finish.handle, finish.sequence): finish for finish in outputs.finishes}
        for handle, num_cached in outputs.num_cached_tokens.items():
            if (live := self._by_handle.get(handle)) is not None:
                live.first_scheduled(num_cached, outputs.queue_s.get(handle))
        for _ in self.read_prompt_logprobs(outputs):
            pass
        token_ids = outputs.token_ids.tolist()
        at = 0
        for handle, index, count in zip(
            outputs.handles.tolist(), outputs.sequences.tolist(), outputs.counts.tolist(), strict=True
        ):
            new, first, at = token_ids[at : at + count], at, at + count
            live = self._by_handle.get(handle)
            if live is None or (branch := live.branches[index]).is_done:
                continue
            touched[handle] = live
            try:
                if branch.append(new, ends.get((handle, index)), outputs.logprobs, first):
                    done.stopped.append((live.request.request_id, index))
            except Exception as error:  # concerns this request only
                logger.exception("the output of request %s could not be read", live.request.request_id)
                live.fail(f"the output could not be read: {type(error).__name__}: {error}")
                done.failed.append(live.request.request_id)
        for finish in outputs.finishes:
            live = self._by_handle.get(finish.handle)
            if live is not None:
                live.metrics.num_preemptions = finish.num_preemptions
            if live is not None and not live.branches[finish.sequence].is_done:
                touched[finish.handle] = live
                live.end_branch(finish)
        for live in touched.values():
            self._emit(live, now_s, done.outputs)
        return done

    def read_prompt_logprobs(self, outputs: EngineCoreOutputs) -> Iterator[None]:
        """Take the log-probabilities of prompts, a few positions per step of the iterator.

        For callers with other work to do in between: thousands of positions take longer than others may wait. They then
        give `process` the outputs without them.
        """
        for handle, columns in outputs.prompt_logprobs.items():
            for at in range(0, len(columns.ranks), _POSITIONS_AT_ONCE):
                live = self._by_handle.get(handle)
                if live is not None:
                    part = slice(at, at + _POSITIONS_AT_ONCE)
                    live.add_prompt_logprobs(
                        LogprobColumns(columns.token_ids[part], columns.logprobs[part], columns.ranks[part])
                    )
                yield

    def abort(self, request_ids: Iterable[str], now_s: float) -> list[RequestOutput]:
        """End these as aborted; their last outputs. Ids that are not live are ignored."""
        outputs: list[RequestOutput] = []
        for request_id in request_ids:
            live = self._by_id.get(request_id)
            if live is not None:
                live.end_all(RequestStatus.FINISHED_ABORTED)
                self._emit(live, now_s, outputs)
        return outputs

    def fail(self, request_id: str, message: str, now_s: float) -> list[RequestOutput]:
        """End a request with an error; its last output, or nothing if it is not live."""
        outputs: list[RequestOutput] = []
        live = self._by_id.get(request_id)
        if live is not None:
            live.error = message
            live.end_all(RequestStatus.FINISHED_ERROR)
            self._emit(live, now_s, outputs)
        return outputs

    def close(self, request_id: str) -> None:
        """Forget a request without a last output."""
        live = self._by_id.pop(request_id, None)
        if live is not None:
            del self._by_handle[live.request.handle]

    @property
    def live_ids(self) -> list[str]:
        return list(self._by_id)

    def _emit(self, live: "_LiveRequest", now_s: float, into: list[RequestOutput]) -> None:
        if live.metrics.first_token_time is None and any(branch.token_ids for branch in live.branches):
            live.metrics.first_token_time = now_s
        finished = all(branch.is_done for branch in live.branches)
        if finished:
            live.metrics.finished_time = now_s
            self.close(live.request.request_id)
        if finished or live.kind is not OutputKind.FINAL_ONLY:
            into.append(live.output(finished))


class _LiveRequest:
    """One request: its branches and what is told once."""

    def __init__(self, request: Request, kind: OutputKind, prompt: str | None, tokenizer: Tokenizer) -> None:
        self.request = request
        self.kind = kind
        self.prompt = prompt
        self.prompt_token_ids: list[int] = request.prompt_token_ids.tolist()
        stop = request.sampling.stop if request.sampling is not None else ()
        stops = StopStrings(stop) if stop else None
        self.branches = [_Branch(request, index, kind, tokenizer, stops) for index in range(request.num_seqs)]
        self.metrics = RequestMetrics(arrival_time=request.arrival_time_s)
        self.num_cached_tokens: int | None = None
        self.error: str | None = None
        self._tokenizer = tokenizer
        asked = request.sampling.prompt_logprobs if request.sampling is not None else None
        self._num_prompt_logprobs = asked
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if asked is not None else None

    def add_prompt_logprobs(self, columns: LogprobColumns) -> None:
        """Rows of further prompt positions; they come in order, chunk by chunk."""
        rows, asked = self._prompt_logprobs, self._num_prompt_logprobs
        if rows is None or asked is None:
            return
        wanted = len(self.prompt_token_ids) - len(rows)
        for row in range(min(len(columns.ranks), wanted)):
            rows.append(logprob_entry(columns, row, asked, self._tokenizer))

    def first_scheduled(self, num_cached_tokens: int, queue_s: float | None) -> None:
        """Told once; a request replayed into another engine keeps what the first said."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_cached_tokens
            if queue_s is not None:
                self.metrics.first_scheduled_time = self.metrics.arrival_time + queue_s

    def end_branch(self, finish: Finish) -> None:
        """An end that came without tokens, or with an error."""
        if finish.message is not None:
            self.error = finish.message
        self.branches[finish.sequence].end(finish.status)

    def fail(self, message: str) -> None:
        """End with an error where the text itself may be what fails."""
        self.error = message
        for branch in self.branches:
            if not branch.is_done:
                branch.finish_reason = RequestStatus.FINISHED_ERROR.finish_reason

    def end_all(self, status: RequestStatus) -> None:
        for branch in self.branches:
            if not branch.is_done:
                branch.end(status)

    def output(self, finished: bool) -> RequestOutput:
        """What is to be told now. A delta names only branches that have news, and each end once."""
        if self.kind is OutputKind.DELTA:
            parts = [part for branch in self.branches if (part := branch.delta()) is not None]
        else:
            parts = [branch.whole() for branch in self.branches]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=parts,
            finished=finished,
            prompt_logprobs=self._prompt_logprobs,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
        )


class _Branch:
    """One output sequence: all its tokens, their text as far as it is wanted now, its end."""

    def __init__(
        self, request: Request, index: int, kind: OutputKind, tokenizer: Tokenizer, stops: StopStrings | None
    ) -> None:
        """stops: shared by all branches of the request; None if it has no stop strings."""
        params = request.sampling
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._num_logprobs = params.logprobs if params is not None else None
        self._include_stop = params is not None and params.include_stop_str_in_output
        self._logprobs: list[dict[int, Logprob]] | None = [] if self._num_logprobs is not None else None
        self._cumulative = 0.0
        wants_text = params is not None and params.detokenize
        self._detokenizer = Detokenizer(tokenizer, params, stops) if wants_text and params is not None else None
        # Nobody looks before the end, and no stop string needs the text: one pass over all tokens then is cheapest.
        self._late = kind is OutputKind.FINAL_ONLY and params is not None and not params.stop
        self._told_tokens = 0
        self._told_end = False

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def append(self, new: list[int], end: Finish | None, logprobs: LogprobColumns | None, first_row: int) -> bool:
        """Take tokens and, with them, the end if it came. True when a stop string was completed by one of them."""
        ended_by_token = end is not None and end.status is RequestStatus.FINISHED_STOPPED
        kept, stopped_by = len(new), None
        if self._detokenizer is not None and not self._late:
            unseen = 1 if ended_by_token and not self._include_stop else 0
            kept = self._detokenizer.append(new[: len(new) - unseen]) + unseen
            stopped_by = self._detokenizer.stopped_by
            if stopped_by is not None:
                kept -= unseen
        self.token_ids += new[:kept]
        if self._logprobs is not None and self._num_logprobs is not None and logprobs is not None:
            for row in range(first_row, first_row + kept):
                self._logprobs.append(logprob_entry(logprobs, row, self._num_logprobs, self._tokenizer))
                self._cumulative += float(logprobs.logprobs[row, 0])
        if stopped_by is not None:
            self.finish_reason, self.stop_reason = "stop", stopped_by
            return end is None
        if end is not None:
            if self._late and self._detokenizer is not None:
                unseen = 1 if ended_by_token and not self._include_stop else 0
                self._detokenizer.append(self.token_ids[: len(self.token_ids) - unseen])
            self._finish_text()
            self.finish_reason, self.stop_reason = end.status.finish_reason, end.stop_reason
        return False

    def end(self, status: RequestStatus) -> None:
        """An end without tokens."""
        if self._late and self._detokenizer is not None:
            self._detokenizer.append(self.token_ids)
        self._finish_text()
        self.finish_reason = status.finish_reason

    def _finish_text(self) -> None:
        if self._detokenizer is not None:
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
        """What was not told yet; None when that is nothing. Tokens may be told before their text is certain."""
        text = self._detokenizer.take() if self._detokenizer is not None else ""
        tokens = self.token_ids[self._told_tokens :]
        if not text and not tokens and (self._told_end or not self.is_done):
            return None
        logprobs = self._logprobs
        if logprobs is not None:
            self._logprobs = []  # what was read is not kept: it takes far more memory than the tokens
        self._told_tokens = len(self.token_ids)
        self._told_end = self.is_done
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=tokens,
            cumulative_logprob=self._cumulative if logprobs is not None else None,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


def logprob_entry(columns: LogprobColumns, row: int, num_top: int, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """One position's candidates by token id: the chosen one first, then the `num_top` likeliest."""
    ids: Sequence[int] = columns.token_ids[row, : num_top + 1].tolist()
    values: Sequence[float] = columns.logprobs[row, : num_top + 1].tolist()
    entry = {ids[0]: Logprob(values[0], int(columns.ranks[row]), _shown(tokenizer, ids[0]))}
    for rank, (token_id, value) in enumerate(zip(ids[1:], values[1:], strict=True), start=1):
        entry.setdefault(token_id, Logprob(value, rank, _shown(tokenizer, token_id)))
    return entry


def _shown(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")
