"""OutputSequence: one output sequence of a request: its tokens, its text and its finish reason."""

from pagoda.base.outputs import CompletionOutput, Logprob
from pagoda.core.request import Request, RequestStatus
from pagoda.core.scheduler_output import Finish, LogprobColumns
from pagoda.engine.outputs.detokenizer import Detokenizer
from pagoda.engine.outputs.logprob_entries import logprob_entry
from pagoda.engine.outputs.stop_strings import StopStrings
from pagoda.engine.tokenizers.tokenizer import Tokenizer


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
        self._tokenizer = tokenizer
        self._num_logprobs = params.logprobs if params is not None else None
        self._include_stop = params is not None and params.include_stop_str_in_output
        self._logprobs: list[dict[int, Logprob]] | None = [] if self._num_logprobs is not None else None
        self._cumulative = 0.0
        wants_text = params is not None and params.detokenize
        self._detokenizer = Detokenizer(tokenizer, params, stops) if wants_text and params is not None else None
        # If only the final text is needed, and not for stop strings, one pass over all tokens at the end is cheapest.
        self._late = is_final_only and params is not None and not params.stop
        self._num_emitted = 0
        self._end_emitted = False

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def append(self, new: list[int], end: Finish | None, logprobs: LogprobColumns | None, first_row: int) -> bool:
        """Add tokens, and finish if `end` is given. Return True if a stop string ended the sequence before the core."""
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
        """Finish without new tokens."""
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
