"""A grammar in Lark's syntax as a regular expression, if none of its rules contains itself.

A string in JSON can be held to an expression, but not to a grammar: this is how a tool's text is held to one.
"""

import re
from dataclasses import dataclass

from pagoda.base.text import is_encodable

_MAX_CHARS = 65_536
_MAX_DEPTH = 64
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|(?://|\#)[^\n]*)
    |(?P<line>\n)
    |(?P<string>"(?:[^"\\\n]|\\[^\n])*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\[^\n])+/[imslux]*)
    |(?P<directive>%[a-z]+)
    |(?P<define>[?!]*[A-Za-z_][A-Za-z0-9_]*(?:\.-?[0-9]+)?[ \t]*:(?!:))
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<repeat>~[ \t]*[0-9]+(?:[ \t]*\.\.[ \t]*[0-9]+)?)
    |(?P<mark>->|\.\.|[()\[\]|?*+,.])""",
    re.VERBOSE,
)
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*|\.[0-9]+)",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
}
"""What `%import common` offers, as far as it is known here."""
_ESCAPED = {char: f"\\{char}" for char in r"\.+*?()|[]{}^$-"} | {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def regex_of_lark(grammar: str) -> str:
    """Return an expression for the texts of a grammar. Raises ValueError, saying why, if there is none."""
    if len(grammar) > _MAX_CHARS:
        raise ValueError(f"it has {len(grammar)} characters, more than {_MAX_CHARS}")
    return _Rules(_split(grammar)).expression("start")


def _split(grammar: str) -> list[tuple[str, str]]:
    """Return (kind, text) of the tokens."""
    tokens: list[tuple[str, str]] = []
    at = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None or found.lastgroup is None:
            raise ValueError(f"it is not in Lark's syntax at {grammar[at : at + 20]!r}")
        if found.lastgroup != "space":
            tokens.append((found.lastgroup, found[0]))
        at = found.end()
    return tokens


class _Rules:
    """The rules of a grammar."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._bodies: dict[str, list[tuple[str, str]]] = {}
        self._done: dict[str, str] = {}
        self._open: list[str] = []  # rules that contain each other
        body: list[tuple[str, str]] = []
        for number, (kind, text) in enumerate(tokens):
            if kind == "directive":
                body = []
                self._import(text, tokens, number + 1)
            elif kind == "define":
                body = self._bodies.setdefault(text.rstrip(" \t:").lstrip("?!").partition(".")[0], [])
                if body:
                    raise ValueError(f"the rule {text.strip()!r} is there twice")
            else:
                body.append((kind, text))

    def _import(self, directive: str, tokens: list[tuple[str, str]], at: int) -> None:
        """Add what `%import common.NAME -> OWN` or `%import common (A, B)` defines.   at: the token after `%import`."""
        line: list[str] = []
        while at < len(tokens) and tokens[at][0] not in ("line", "directive", "define"):
            line.append(tokens[at][1])
            at += 1
        match line:
            case ["common", ".", name] | ["common", ".", name, "->", _] if directive == "%import" and name in _COMMON:
                self._done[line[-1]] = _COMMON[name]
            case ["common", "(", *names, ")"] if directive == "%import" and {*names} <= {*_COMMON, ","}:
                self._done.update({name: _COMMON[name] for name in names if name != ","})
            case _:
                raise ValueError(f"{' '.join((directive, *line))[:80]!r} is not supported")

    def expression(self, name: str) -> str:
        """Return the expression of a rule."""
        if name in self._done:
            return self._done[name]
        if name not in self._bodies:
            raise ValueError(f"there is no rule {name[:80]!r}")
        if name in self._open:
            raise ValueError(f"the rule {name[:80]!r} contains itself, which no regular expression can follow")
        if len(self._open) >= _MAX_DEPTH:
            raise ValueError(f"its rules are nested deeper than {_MAX_DEPTH}")
        self._open.append(name)
        made = _Body(self, [one for one in self._bodies[name] if one[0] != "line"]).alternatives()
        self._open.pop()
        self._done[name] = made
        return made


@dataclass(slots=True)
class _Body:
    """Reads the body of a rule, from its front.   depth: of the parentheses around the place."""

    rules: _Rules
    rest: list[tuple[str, str]]
    at: int = 0
    depth: int = 0

    def alternatives(self) -> str:
        """Read up to the end, or to a closing parenthesis."""
        choices: list[list[str]] = [[]]
        num_chars = 0
        while self.at < len(self.rest):
            kind, text = self.rest[self.at]
            if text in (")", "]") and kind == "mark":
                break
            self.at += 1
            if text == "|" and kind == "mark":
                choices.append([])
                continue
            if text == "->":
                self.at += 1  # a name for the alternative
                continue
            one = self._repeated(self._atom(kind, text))
            num_chars += len(one)
            if num_chars > _MAX_CHARS:
                raise ValueError(f"as a regular expression it has more than {_MAX_CHARS} characters")
            choices[-1].append(one)
        if self.at < len(self.rest) and not self.depth:
            raise ValueError("a parenthesis is closed that was not opened")
        made = "|".join(map("".join, choices))
        return f"(?:{made})" if len(choices) > 1 else made

    def _atom(self, kind: str, text: str) -> str:
        if kind == "string":
            if self._follows(".."):
                return self._range(text)
            is_any_case = text.endswith("i")
            made = "".join(_ESCAPED.get(char, char) for char in _value_of(text.removesuffix("i")))
            return f"(?i:{made})" if is_any_case else made
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            return f"(?{flags.replace('u', '')}:{body})"
        if kind == "name":
            return self.rules.expression(text)
        if kind == "mark" and text in ("(", "["):
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise ValueError(f"its parentheses are nested deeper than {_MAX_DEPTH}")
            inner = self.alternatives()
            if not self._follows(")" if text == "(" else "]"):
                raise ValueError("a parenthesis is not closed")
            self.depth -= 1
            return inner if text == "(" else f"(?:{inner})?"
        raise ValueError(f"{text!r} is not expected there")

    def _repeated(self, atom: str) -> str:
        for mark in "?*+":
            if self._follows(mark):
                return f"(?:{atom}){mark}"
        if self.at < len(self.rest) and self.rest[self.at][0] == "repeat":
            least, _, most = self.rest[self.at][1].removeprefix("~").partition("..")
            self.at += 1
            return f"(?:{atom}){{{least.strip()}{',' + most.strip() if most else ''}}}"
        return atom

    def _range(self, first: str) -> str:
        last = self.rest[self.at][1] if self.at < len(self.rest) else ""
        self.at += 1
        ends = [_value_of(one) for one in (first, last)]
        if [len(one) for one in ends] != [1, 1]:
            raise ValueError(f"{first}..{last} is not a range of characters")
        return f"[{'-'.join(_ESCAPED.get(one, one) for one in ends)}]"

    def _follows(self, mark: str) -> bool:
        is_next = self.at < len(self.rest) and self.rest[self.at] == ("mark", mark)
        self.at += is_next
        return is_next


_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.)")
_MEANINGS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}


def _value_of(string: str) -> str:
    """Return what a string in quotes stands for."""

    def meant(found: re.Match[str]) -> str:
        escaped = found[1]
        return chr(int(escaped[1:], 16)) if len(escaped) > 1 else _MEANINGS.get(escaped, escaped)

    value = _ESCAPE.sub(meant, string[1:-1])
    if not is_encodable(value):
        raise ValueError(f"{string[:80]} is not valid Unicode")
    return value
