"""TextEncoder: the encoding half of a tokenizer, from text to token ids, on the calling thread."""

import functools
from collections.abc import Sequence

import tokenizers

from pagoda.base.abbreviate import shorten
from pagoda.base.errors import RequestError
from pagoda.engine.cancellation import Cancellation
from pagoda.engine.templates.special_marks import SpecialMarks
from pagoda.engine.tokenizers.marked_encoder import MarkedEncoder

LONG_TEXT_CHARS = 1024
"""From this length on, an event loop tokenises texts on a thread: they take about half a millisecond or more."""

_BATCH_TEXTS = 256  # between two of them, an interrupt is noticed


class TextEncoder:
    """Encodes with one backend, to which it adds tokens of its own. Thread-safe.

    inline_chars: an event loop may encode shorter texts itself.
    """

    inline_chars = LONG_TEXT_CHARS

    def __init__(self, backend: tokenizers.Tokenizer, marks: SpecialMarks, unknown: str | None) -> None:
        """unknown: the unknown token, which encoding any text may produce."""
        self._backend = backend
        marked = set(marks.texts)
        added = backend.get_added_tokens_decoder()
        ids = {token.content: token_id for token_id, token in added.items() if token.content in marked}
        self._marked = MarkedEncoder(backend, marks, ids, unknown)

    def encode(self, text: str, add_special_tokens: bool = True, cancellation: Cancellation | None = None) -> list[int]:
        """See Tokenizer.encode. Not cancelled once it has begun."""
        _check(cancellation)
        return _encode(self._backend, text, add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Tokenizer.encode_batch."""
        found: list[list[int]] = []
        for begin in range(0, len(texts), _BATCH_TEXTS):
            some = texts[begin : begin + _BATCH_TEXTS]
            try:
                found += [one.ids for one in self._backend.encode_batch_fast(some, add_special_tokens=True)]
            except BaseException as error:
                if not is_panic(error):
                    raise
                found += [self.encode(text) for text in some]  # names the text that it cannot split
        return found

    def encode_marked(
        self, text: str, add_special_tokens: bool = False, cancellation: Cancellation | None = None
    ) -> list[int]:
        """See Tokenizer.encode_marked. Not cancelled once it has begun."""
        _check(cancellation)
        return self._marked.encode(text, functools.partial(_encode, param="messages"), add_special_tokens)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def _check(cancellation: Cancellation | None) -> None:
    if cancellation is not None:
        cancellation.check()


def _encode(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False, param: str = "prompt"
) -> tokenizers.Encoding:
    """Encode a text. Raises RequestError, which blames `param`, where the library's regular expressions give up."""
    try:
        if len(text) < LONG_TEXT_CHARS:
            return backend.encode(text, add_special_tokens=add_special_tokens)
        # Unlike `encode`, this releases the GIL, and does not compute the tokens' offsets in the text.
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    except BaseException as error:  # its regular expression engine panics after too many steps
        if not is_panic(error):
            raise
        raise RequestError(f"{param}: the tokenizer cannot split this text: {shorten(str(error))}", param) from None


def is_panic(error: BaseException) -> bool:
    """Return whether `error` is a panic of a Rust library: not an Exception, and its class cannot be imported."""
    return type(error).__name__ == "PanicException"
