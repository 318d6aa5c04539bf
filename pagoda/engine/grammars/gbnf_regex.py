"""Regular expressions as GBNF. Their classes (\\d, \\w, \\s) are those of ASCII."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from pagoda.engine.grammars.gbnf import LAST_CHAR, other_chars
from pagoda.engine.grammars.gbnf_tree import Ranges

_MAX_DEPTH = 24
_MAX_CASED = 2_048  # characters of a class that are looked up in the other case
MEANINGS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
"""What letters and digits after a backslash stand for."""
_DIGITS: Ranges = ((ord("0"), ord("9")),)
_WORD: Ranges = (*_DIGITS, (ord("A"), ord("Z")), (ord("_"), ord("_")), (ord("a"), ord("z")))
_SPACE: Ranges = ((9, 13), (32, 32))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CODE = re.compile(r"x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[xu]\{[0-9A-Fa-f]{1,6}\}|U[0-9A-Fa-f]{8}")
_COUNT = re.compile(r"[*+?]|\{[0-9]{1,9}(?:,[0-9]{0,9})?\}")
_GROUP = re.compile(r"\((?:\?(?:P?<[A-Za-z_]\w*>|[imsux]*:))?")


def in_any_case(ranges: Ranges) -> Ranges:
    """Return the characters with the same ones in the other case."""
    found = list(ranges)
    for low, high in ranges:
        for char in map(chr, range(low, min(high, low + _MAX_CASED) + 1)):
            found += [(ord(other), ord(other)) for other in (char.lower(), char.upper()) if len(other) == 1]
    return other_chars(list(other_chars(found)))


@dataclass(slots=True)
class RegexReader:
    """Reads a regular expression, from its front.

    one_of: returns the rule for one of some characters.   depth: of parentheses.
    """

    text: str
    flags: str
    one_of: Callable[[Ranges], str]
    at: int = 0
    depth: int = 0

    def read(self) -> str:
        """Return the whole expression in GBNF. Raises ValueError for what is not supported."""
        made = self._alternatives()
        if self.at < len(self.text):
            raise self._error("a parenthesis is closed that was not opened")
        return made

    def _error(self, what: str) -> ValueError:
        return ValueError(f"in the regular expression /{self.text[:80]}/: {what}")

    def _alternatives(self) -> str:
        choices: list[list[str]] = [[]]
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] == "|":
                self.at += 1
                choices.append([])
            elif "x" in self.flags and self.text[self.at].isspace():
                self.at += 1
            else:
                choices[-1].append(self._repeated(self._atom()))
        return " | ".join(" ".join(choice) or '""' for choice in choices)

    def _atom(self) -> str:
        char = self.text[self.at]
        if char == "(":
            return self._group()
        if char == ".":
            self.at += 1
            return self.one_of(((0, LAST_CHAR),) if "s" in self.flags else ((0, 9), (11, LAST_CHAR)))
        if char == "[":
            return self.one_of(self._cased(self._class()))
        if char in "^$*+?{":
            raise self._error(f"{char!r} is not supported there")
        return self.one_of(self._cased(self._chars()))

    def _cased(self, ranges: Ranges) -> Ranges:
        return in_any_case(ranges) if "i" in self.flags else ranges

    def _group(self) -> str:
        found = _GROUP.match(self.text, self.at)
        if found is None or (self.text.startswith("(?", self.at) and len(found[0]) < 3):
            raise self._error(f"{self.text[self.at : self.at + 4]!r} is not supported")
        if self.depth == _MAX_DEPTH:
            raise self._error(f"its parentheses are nested deeper than {_MAX_DEPTH}")
        outer, self.at, self.depth = self.flags, found.end(), self.depth + 1
        if found[0].endswith(":"):
            self.flags += found[0][2:-1]
        inner = self._alternatives()
        if not self.text.startswith(")", self.at):
            raise self._error("a parenthesis is not closed")
        self.flags, self.at, self.depth = outer, self.at + 1, self.depth - 1
        return f"({inner})"

    def _repeated(self, atom: str) -> str:
        if (found := _COUNT.match(self.text, self.at)) is None:
            return atom
        self.at = found.end()
        if self.text.startswith("?", self.at):  # which way it is read does not matter
            self.at += 1
        return f"({atom}){found[0]}"

    def _chars(self) -> Ranges:
        """Read one character, or an escape for several."""
        char = self.text[self.at]
        self.at += 1
        if char != "\\":
            return ((ord(char), ord(char)),)
        escaped = self.text[self.at : self.at + 1]
        if (code := _CODE.match(self.text, self.at)) is not None:
            self.at = code.end()
            number = int(code[0][1:].strip("{}"), 16)
            return ((number, number),)
        self.at += 1
        if escaped.lower() in _CLASSES:
            known = _CLASSES[escaped.lower()]
            return known if escaped.islower() else other_chars(list(known))
        if (escaped.isalnum() and escaped not in MEANINGS) or not escaped:
            raise self._error(f"\\{escaped} is not supported")
        meant = ord(MEANINGS.get(escaped, escaped))
        return ((meant, meant),)

    def _class(self) -> Ranges:
        """Read a class of characters."""
        is_negated = self.text.startswith("[^", self.at)
        begin = self.at = self.at + 1 + is_negated
        found: list[tuple[int, int]] = []
        while self.at == begin or not self.text.startswith("]", self.at):
            if self.at >= len(self.text) or self.text.startswith(("[:", "&&", "--"), self.at):
                raise self._error("a class of characters is not closed, or of a form that is not supported")
            ranges = self._chars()
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                last = self._chars() if self.at < len(self.text) else ranges[:0]
                low, high = ranges[0][0], max((end for _, end in last), default=-1)
                if len(ranges) > 1 or len(last) != 1 or low > high:
                    raise self._error("a range of characters is empty")
                ranges = ((low, high),)
            found += ranges
        self.at += 1
        return other_chars(found) if is_negated else other_chars(list(other_chars(found)))
