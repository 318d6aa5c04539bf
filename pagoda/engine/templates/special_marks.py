"""Special tokens in a chat: those that the template writes, and text of callers that must never become one.

A template is compiled with a mark in place of each special token in its own text (chat_template.py). A mark is a string
that callers cannot guess, so after rendering every mark comes from the template, and any literal special token comes
from the caller. The tokenizer turns marks into special tokens and the rest into ordinary text (`encode_marked`).
HiddenText is for templates that compose special tokens, or could, by cutting and joining callers' text.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from pagoda.base.errors import RequestError

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
        self.any_numbered = re.compile(f"{_OPEN}{nonce}n([0-9]+)x{_CLOSE}")
        """Finds what `numbered` returns, and its number."""
        self.slot = self.new_mark()
        """Stands for tokens that are known already: see `MarkedEncoder.encode`."""

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

    def pieces(self, text: str) -> Iterator[tuple[str, str, int]]:
        """Yield (text, special token after it, position after both in `text`); the last special token is ""."""
        at = 0
        for match in self._any_mark.finditer(text):
            if (special := self._text_of.get(match[0])) is not None:
                yield text[at : match.start()], special, match.end()
                at = match.end()
        yield text[at:], "", len(text)

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

    def numbered(self, number: int) -> str:
        """Return such a string for something that a conversation has in a place, the same for the same number."""
        return f"{_OPEN}{self._nonce}n{number}x{_CLOSE}"

    @property
    def texts(self) -> Iterable[str]:
        return self._mark_of.keys()


def _any_of(texts: Iterable[str]) -> "re.Pattern[str] | None":
    """Return a pattern that matches the longest of the texts first, as tokenizers do; None if there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


# ---- text of callers while a template processes it


_PRIVATE_USE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")


class HiddenText:
    """Replaces the punctuation of special tokens in a caller's values with private-use characters, one for one.

    Without its punctuation, no text of the caller can become part of a special token, whatever the template cuts or
    joins. Pieces that the template may search for (its own string constants, such as "</think>") are kept, so that it
    processes the values as before, unless they look like a part of a special token.
    """

    def __init__(self, values: object, specials: Iterable[str], constants: Iterable[str]) -> None:
        """constants: the strings in the template's expressions.   Raises RequestError if all characters are in use."""
        specials = list(specials)
        punctuation = sorted(set().union(*map(_punctuation, specials)))
        texts = list(_strings(values))
        hidden = re.compile(f"[{re.escape(''.join(punctuation))}]") if punctuation else re.compile(r"(?!)")
        self.is_needed = any(hidden.search(text) for text in texts)
        if not self.is_needed:
            return
        used = set().union(*(_PRIVATE_USE.findall(text) for text in texts))
        free = (character for code in range(0xF0000, 0x10FFFE) if (character := chr(code)) not in used)
        try:
            self._stand_ins = [(character, next(free)) for character in punctuation]
        except StopIteration:
            raise RequestError("the messages use every private character of Unicode", "messages") from None
        pairs = {pair for special in specials for pair in _pairs(special, hidden)}
        kept = [text for text in constants if hidden.search(text) and _may_keep(text, hidden, pairs)]
        longest_first = sorted(kept, key=len, reverse=True)
        self._kept = re.compile("|".join(map(re.escape, longest_first))) if kept else None

    def hide(self, value: Any) -> Any:
        """Return a copy of the JSON-like `value` with hidden punctuation in its strings."""
        return _changed(value, self._hide)

    def show(self, text: str) -> str:
        """Return `text` with the punctuation again."""
        for character, stand_in in self._stand_ins:
            text = text.replace(stand_in, character)
        return text

    def _hide(self, text: str) -> str:
        if self._kept is None:
            return self._without_punctuation(text)
        parts: list[str] = []
        end = 0
        for match in self._kept.finditer(text):
            parts += self._without_punctuation(text[end : match.start()]), match[0]
            end = match.end()
        return "".join(parts) + self._without_punctuation(text[end:])

    def _without_punctuation(self, text: str) -> str:
        # Not str.translate, which keeps the GIL for a second on the longest of texts.
        for character, stand_in in self._stand_ins:
            text = text.replace(character, stand_in)
        return text


def _punctuation(special: str) -> set[str]:
    """Return the characters without which `special` cannot be spelled, and which mean nothing else to a template.

    A special token that consists of letters only has none: its first letter must do.
    """
    return {character for character in special if not (character.isalnum() or character in "_ \t\n")} or {special[0]}


def _pairs(text: str, hidden: "re.Pattern[str]") -> Iterator[str]:
    """Yield every two adjacent characters of which one is hidden."""
    return (pair for at in range(len(text) - 1) if hidden.search(pair := text[at : at + 2]))


def _may_keep(constant: str, hidden: "re.Pattern[str]", pairs: set[str]) -> bool:
    return any(map(str.isalnum, constant)) and pairs.isdisjoint(_pairs(constant, hidden))


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {_changed(name, change): _changed(item, change) for name, item in items}
    if isinstance(value, list | tuple):
        return [_changed(item, change) for item in cast("list[Any]", value)]
    return value


def _strings(value: object) -> Iterator[str]:
    """Yield every string in a JSON-like value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in cast("Mapping[object, object]", value).items():
            yield from _strings(name)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[object]", value):
            yield from _strings(item)
