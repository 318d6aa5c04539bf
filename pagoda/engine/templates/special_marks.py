"""SpecialMarks: distinguish special tokens written by a chat template from the same text inside a message.

A template is compiled with a mark in place of each special token in its own text (chat_template.py). A mark is a string
that callers cannot guess, so after rendering every mark comes from the template, and any literal special token comes
from the caller. The tokenizer turns marks into special tokens and the rest into ordinary text (`encode_marked`).
"""

import re
import secrets
from collections.abc import Callable, Iterable

# Unicode reserves these code points for use inside a program.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


class SpecialMarks:
    """The marks of one tokenizer.   texts: its special tokens as text."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        nonce = secrets.token_hex(8)
        self._mark_of = {text: f"{_OPEN}{nonce}{index:x}{_CLOSE}" for index, text in enumerate(texts) if text}
        self._text_of = {mark: text for text, mark in self._mark_of.items()}
        self._any_mark = re.compile(f"{_OPEN}{nonce}[0-9a-f]+{_CLOSE}")
        self._nonce = nonce

    def put(self, text: str) -> str:
        """Replace special tokens in `text` with marks. For short texts: it searches for every special token."""
        return self.put_only(text, self._occurring_in(text))

    def remove(self, text: str) -> str:
        """Replace marks in `text` with their special tokens."""
        return self.replace(text, lambda special: special)

    def replace(self, text: str, by: Callable[[str], str]) -> str:
        """Replace each mark in `text` with `by(special token)`, called from left to right."""
        return self._any_mark.sub(lambda match: by(self._text_of.get(match[0], "")), text)

    def unmarked_in(self, text: str) -> set[str]:
        """Return the special tokens that occur literally in `text`. For short texts."""
        pattern = _any_of(self._occurring_in(text))
        return set() if pattern is None else set(pattern.findall(text))

    def in_order(self, text: str) -> list[str]:
        """Return the marks in `text`, from left to right."""
        return self._any_mark.findall(text)

    def _occurring_in(self, text: str) -> list[str]:
        # Compiling a pattern of all special tokens would take longer: some vocabularies have thousands.
        return [special for special in self._mark_of if special in text]

    def put_only(self, text: str, specials: Iterable[str]) -> str:
        """Like `put`, for the given special tokens only. Fast for long texts."""
        pattern = _any_of(specials)
        return text if pattern is None else pattern.sub(lambda match: self._mark_of[match[0]], text)

    def new_mark(self) -> str:
        """Return a string that callers cannot guess and that is not the mark of any special token."""
        return f"{_OPEN}{self._nonce}{secrets.token_hex(4)}x{_CLOSE}"

    @property
    def texts(self) -> Iterable[str]:
        return self._mark_of.keys()


def _any_of(texts: Iterable[str]) -> "re.Pattern[str] | None":
    """Return a pattern that matches the longest of the texts first, as tokenizers do; None if there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
