"""SpecialMarks: tells the special tokens that a chat template writes from the same text inside a message.

A template is compiled with a mark in place of each special token in its own text (chat_template.py). A mark is a string
that no caller can guess, so after rendering every mark is the template's, and text that spells a special token is the
caller's. The tokenizer reads marks as special tokens and everything else as ordinary text (`encode_marked`).
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

# Unicode reserves these code points for use inside a program.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


class SpecialMarks:
    """The marks of one tokenizer.   texts: its special tokens, as they are written."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        nonce = secrets.token_hex(8)
        self._mark_of = {text: f"{_OPEN}{nonce}{index:x}{_CLOSE}" for index, text in enumerate(texts) if text}
        self._text_of = {mark: text for text, mark in self._mark_of.items()}
        self._any_mark = re.compile(f"{_OPEN}{nonce}[0-9a-f]+{_CLOSE}")
        self._nonce = nonce

    def put(self, text: str) -> str:
        """`text` with a mark in place of each special token. For short texts: it looks for every special token."""
        return self.put_only(text, self._occurring_in(text))

    def remove(self, text: str) -> str:
        """`text` with each mark as the special token that it stands for."""
        return self.replace(text, lambda special: special)

    def replace(self, text: str, by: Callable[[str], str]) -> str:
        """`text` with `by(special token)` in place of each mark, called in the order of the text."""
        return self._any_mark.sub(lambda match: by(self._text_of[match[0]]), text)

    def unmarked_in(self, text: str) -> set[str]:
        """The special tokens that stand in `text` without a mark. For short texts."""
        pattern = _any_of(self._occurring_in(text))
        return set() if pattern is None else set(pattern.findall(text))

    def _occurring_in(self, text: str) -> list[str]:
        # A pattern of all of them would take longer to compile: some vocabularies have thousands.
        return [special for special in self._mark_of if special in text]

    def put_only(self, text: str, specials: Iterable[str]) -> str:
        """As `put`, for some special tokens only: fast in a long text."""
        pattern = _any_of(specials)
        return text if pattern is None else pattern.sub(lambda match: self._mark_of[match[0]], text)

    def new_mark(self) -> str:
        """A string that no caller can guess, and that stands for no special token."""
        return f"{_OPEN}{self._nonce}{secrets.token_hex(4)}x{_CLOSE}"

    @property
    def texts(self) -> Iterable[str]:
        return self._mark_of.keys()


class Shield:
    """Hides special tokens in a caller's values from a template, and puts them back into what it rendered."""

    def __init__(self, marks: SpecialMarks, specials: Iterable[str]) -> None:
        self._hidden = {special: marks.new_mark() for special in specials}
        self._pattern = _any_of(self._hidden)

    def is_needed(self, value: object) -> bool:
        """Return whether any string in `value` has one of the special tokens."""
        return self._pattern is not None and any(self._pattern.search(text) for text in _strings(value))

    def hide(self, value: Any) -> Any:
        """A copy of `value`, JSON-like, with a placeholder for each special token in its strings."""
        if isinstance(value, str):
            return value if self._pattern is None else self._pattern.sub(lambda match: self._hidden[match[0]], value)
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {self.hide(name): self.hide(item) for name, item in items}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in cast("list[Any]", value)]
        return value

    def show(self, text: str) -> str:
        """`text` with the special tokens in place of their placeholders."""
        for special, placeholder in self._hidden.items():
            text = text.replace(placeholder, special)
        return text


def _any_of(texts: Iterable[str]) -> "re.Pattern[str] | None":
    """A pattern that finds the longest of these first, as tokenizers do; None for no text."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _strings(value: object) -> Iterator[str]:
    """Every string in a JSON-like value, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in cast("Mapping[object, object]", value).items():
            yield from _strings(name)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[object]", value):
            yield from _strings(item)
