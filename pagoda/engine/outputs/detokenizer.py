"""Detokenizer: decode one output's tokens as they arrive, in whole characters, and cut it at stop strings."""

import codecs
from collections.abc import Sequence

from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.outputs.stop_strings import StopSearch, StopStrings
from pagoda.engine.tokenizers.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one growing output.

    Each token is converted to bytes once. The bytes of an incomplete character are held back until it is complete, and
    so is text that may be the beginning of a stop string; all other text is available at once.

    The output ends at the first character that completes any stop string, regardless of token boundaries; if several
    end there, the longest counts. A stop string completed before token min_tokens + 1 is ordinary text.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stops: StopStrings | None = None) -> None:
        """stops: the automaton of `params.stop`, if several outputs share it; built here if None."""
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
        """The text available so far that `take` has not returned."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def take(self) -> str:
        """Return the text that became available since the last call."""
        text, self._pieces = "".join(self._pieces), []
        return text

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the output, or None."""
        return self._stop.found if self._stop is not None else None

    def append(self, token_ids: Sequence[int]) -> int:
        """Add tokens; return how many of them belong to the output (tokens after a stop string do not)."""
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
        """Add text; return True if a stop string is complete."""
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
        """Release the held-back text: the output has ended without a stop string. Drop an incomplete character."""
        self._show(self._held)
        self._held = ""

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(text)
