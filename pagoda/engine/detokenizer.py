"""Detokenizer: one output's text as its tokens arrive. Whole characters only; stop strings are cut exactly."""

import codecs
from collections.abc import Sequence

from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.stop_strings import StopSearch, StopStrings
from pagoda.engine.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one growing output.

    Each token is turned into bytes once and never looked at again; the bytes of a character that is not complete wait
    for the rest of it. Text that may be the beginning of a stop string waits too, and no other text does.

    The output ends at the first character with which any stop string is complete, wherever tokens begin and end; of
    several that end there, the longest counts. One that is complete before token min_tokens + 1 is plain text.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stops: StopStrings | None = None) -> None:
        """stops: of `params.stop`, where several outputs share it; made here when not given."""
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.facts.special_token_ids if params.skip_special_tokens else frozenset[int]()
        self._utf8 = _Utf8(errors="replace")
        if stops is None and params.stop:
            stops = StopStrings(params.stop)
        self._stop = StopSearch(stops) if stops is not None else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """All that may be shown so far and was not taken."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def take(self) -> str:
        """The text that became certain since the last call."""
        text, self._pieces = "".join(self._pieces), []
        return text

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the output."""
        return self._stop.found if self._stop is not None else None

    def append(self, token_ids: Sequence[int]) -> int:
        """Take the next tokens. Returns how many belong to the output: those behind a complete stop string do not."""
        stop = self._stop
        if stop is None:
            skipped, token_bytes = self._skipped, self._token_bytes
            data = b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in skipped])
            self._show(self._utf8.decode(data))
            self._num_tokens += len(token_ids)
            return len(token_ids)
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if token_id in self._skipped:
                continue
            text = self._utf8.decode(self._token_bytes(token_id))
            if text and self._append_text(stop, text):
                return index + 1
        return len(token_ids)

    def _append_text(self, stop: StopSearch, text: str) -> bool:
        """Take more text; True when a stop string is complete."""
        may_stop = self._num_tokens > self._min_tokens
        cut = stop.feed(text, may_stop)
        self._held += text
        if cut is not None:
            surplus = cut if self._include_stop else cut + len(stop.found or "")
            self._show(self._held[: len(self._held) - surplus])
            self._held = ""
            return True
        keep = 0 if self._include_stop else stop.num_held
        at = len(self._held) - keep
        self._show(self._held[:at])
        self._held = self._held[at:]
        return False

    def finish(self) -> None:
        """The output ended by other means: what was held back is text. Half a character at the very end is dropped."""
        self._show(self._held)
        self._held = ""

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(text)
