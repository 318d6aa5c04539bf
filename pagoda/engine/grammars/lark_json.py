"""A grammar in Lark's syntax for the characters inside a string in JSON, which is how a call has a tool's text.

It becomes GBNF, which knows no terminals: a line break is the two characters of its escape, and a terminal of the
caller's could not be read as far as it matches. `gbnf.py` makes terminals of what can be read so.
"""

import json
import re
from dataclasses import dataclass

from pagoda.base.text import is_encodable
from pagoda.engine.grammars.gbnf import other_chars
from pagoda.engine.grammars.gbnf_regex import MEANINGS, RegexReader, in_any_case
from pagoda.engine.grammars.gbnf_tree import Ranges

_MAX_CHARS = 65_536
_MAX_DEPTH = 24
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
_EXPONENT, _DECIMAL = "([eE][+-]?[0-9]+)", r"([0-9]+\.[0-9]*|\.[0-9]+)"
_FLOAT = f"([0-9]+{_EXPONENT}|{_DECIMAL}{_EXPONENT}?)"
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": _DECIMAL,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"({_FLOAT}|[0-9]+)",
    "SIGNED_NUMBER": f"[+-]?({_FLOAT}|[0-9]+)",
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
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
"""What `%import common` offers, as far as it is known here."""


def lark_in_json(grammar: str) -> str:
    """Return the grammar, in GBNF, of the texts as they are written inside a string in JSON.

    Raises ValueError, saying why, if there is none.
    """
    if len(grammar) > _MAX_CHARS:
        raise ValueError(f"it has {len(grammar)} characters, more than {_MAX_CHARS}")
    return _Rules(_split(grammar)).written()


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
    """The rules of a grammar, and of what they are written with."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._bodies: dict[str, list[tuple[str, str]]] = {}
        self._ignored: list[list[tuple[str, str]]] = []
        self._chars: dict[Ranges, str] = {}
        self._written: dict[str, str] = {}
        at = 0
        while at < len(tokens):
            kind, text = tokens[at]
            ends = ("define", "directive", "line") if kind == "directive" else ("define", "directive")
            end = next((end for end in range(at + 1, len(tokens)) if tokens[end][0] in ends), len(tokens))
            body = [one for one in tokens[at + 1 : end] if one[0] != "line"]
            if kind == "directive":
                self._direct(text, body)
            elif kind == "define":
                name = text.rstrip(" \t:").lstrip("?!").partition(".")[0]
                if self._bodies.setdefault(name, body) is not body:
                    raise ValueError(f"the rule {text.strip()!r} is there twice")
            elif kind != "line":
                raise ValueError(f"{text[:80]!r} is not expected there")
            at = end

    def _direct(self, directive: str, line: list[tuple[str, str]]) -> None:
        """Obey `%import common.NAME -> OWN`, `%import common (A, B)` or `%ignore` with a terminal."""
        match [directive, *(text for _, text in line)]:
            case ["%import", "common", ".", name] | ["%import", "common", ".", name, "->", _] if name in _COMMON:
                self._bodies[line[-1][1]] = [("regex", f"/{_COMMON[name]}/")]
            case ["%import", "common", "(", *names, ")"] if {*names} <= {*_COMMON, ","}:
                self._bodies.update({name: [("regex", f"/{_COMMON[name]}/")] for name in names if name != ","})
            case ["%ignore", _, *_]:
                self._ignored.append(line)
            case words:
                raise ValueError(f"{' '.join(words)[:80]!r} is not supported")

    def written(self) -> str:
        """Return the grammar in GBNF."""
        if "start" not in self._bodies:
            raise ValueError("there is no rule 'start'")
        names = {name: f"rule-{name}" for name in self._bodies}
        ignored = " | ".join(_Body(self, line, names, "").read() for line in self._ignored)
        begin, after = ("ignored ", " ignored") if ignored else ("", "")
        rules = [f"root ::= {begin}{names['start']}"]
        if ignored:
            rules.append(f"ignored ::= ({ignored})*")
        for name, body in self._bodies.items():
            is_terminal = name.isupper()
            rules.append(f"{names[name]} ::= {_Body(self, body, names, '' if is_terminal else after).read()}")
        return "\n".join([*rules, *(f"{name} ::= {_written_chars(ranges)}" for ranges, name in self._chars.items())])

    def one_of(self, ranges: Ranges) -> str:
        """Return the rule for one of these characters."""
        if not ranges:
            raise ValueError("a class of characters is empty")
        return self._chars.setdefault(ranges, f"chars-{len(self._chars)}")


_ESCAPES = {char: json.dumps(char)[1:-1] for char in map(chr, (*range(0x20), ord('"'), ord("\\")))}
"""Each character that is not itself in a string in JSON, as it is written there."""
_SURROGATES = (0xD800, 0xDFFF)


def _literal(text: str) -> str:
    """Return a text, as it is written in JSON, as a literal in GBNF."""
    inside = "".join(_ESCAPES.get(char, char) for char in text)
    return '"' + inside.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _written_chars(ranges: Ranges) -> str:
    escaped = [char for char in _ESCAPES if any(low <= ord(char) <= high for low, high in ranges)]
    others = [(low, high) for low, high in _others_in(ranges) if low <= high]
    written = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in others)
    return " | ".join([*map(_literal, escaped), *([f"[{written}]"] if written else [])])


def _others_in(ranges: Ranges) -> Ranges:
    """Return the ranges without the characters that are escaped, and without surrogates."""
    gone = [*((ord(char), ord(char)) for char in _ESCAPES), _SURROGATES]
    return other_chars([*other_chars(list(ranges)), *gone])


@dataclass(slots=True)
class _Body:
    """Reads the body of a rule, from its front.   after: what may follow each terminal.   depth: of parentheses."""

    rules: _Rules
    rest: list[tuple[str, str]]
    names: dict[str, str]
    after: str
    at: int = 0
    depth: int = 0

    def read(self) -> str:
        """Return the whole body in GBNF."""
        made = self._alternatives()
        if self.at < len(self.rest):
            raise ValueError("a parenthesis is closed that was not opened")
        return made

    def _alternatives(self) -> str:
        """Read up to the end, or to a closing parenthesis."""
        choices: list[list[str]] = [[]]
        while self.at < len(self.rest):
            kind, text = self.rest[self.at]
            if text in (")", "]") and kind == "mark":
                break
            self.at += 1
            if text == "|" and kind == "mark":
                choices.append([])
            elif text == "->":
                self.at += 1  # a name for the alternative
            else:
                choices[-1].append(self._repeated(self._atom(kind, text)))
        return " | ".join(" ".join(choice) or '""' for choice in choices)

    def _atom(self, kind: str, text: str) -> str:
        if kind == "name":
            if text not in self.names:
                raise ValueError(f"there is no rule {text[:80]!r}")
            return self._terminal(self.names[text]) if text.isupper() else self.names[text]
        if kind == "string":
            if self._follows(".."):
                return self._terminal(self._range(text))
            value = _value_of(text.removesuffix("i"))
            if not text.endswith("i"):
                return self._terminal(_literal(value))
            each = (self.rules.one_of(in_any_case(((ord(char), ord(char)),))) for char in value)
            return self._terminal(f"({' '.join(each)})")
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            return self._terminal(f"({RegexReader(body, flags, self.rules.one_of).read()})")
        if kind == "mark" and text in ("(", "["):
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise ValueError(f"its parentheses are nested deeper than {_MAX_DEPTH}")
            inner = self._alternatives()
            if not self._follows(")" if text == "(" else "]"):
                raise ValueError("a parenthesis is not closed")
            self.depth -= 1
            return f"({inner})" + ("?" if text == "[" else "")
        raise ValueError(f"{text!r} is not expected there")

    def _terminal(self, written: str) -> str:
        return f"({written}{self.after})" if self.after else written

    def _repeated(self, atom: str) -> str:
        for mark in "?*+":
            if self._follows(mark):
                return f"({atom}){mark}"
        if self.at < len(self.rest) and self.rest[self.at][0] == "repeat":
            least, _, most = self.rest[self.at][1].removeprefix("~").partition("..")
            self.at += 1
            return f"({atom}){{{least.strip()}{',' + most.strip() if most else ''}}}"
        return atom

    def _range(self, first: str) -> str:
        last = self.rest[self.at][1] if self.at < len(self.rest) else ""
        self.at += 1
        ends = [_value_of(one) for one in (first, last)]
        if [len(one) for one in ends] != [1, 1] or ends[0] > ends[1]:
            raise ValueError(f"{first}..{last} is not a range of characters")
        return self.rules.one_of(((ord(ends[0]), ord(ends[1])),))

    def _follows(self, mark: str) -> bool:
        is_next = self.at < len(self.rest) and self.rest[self.at] == ("mark", mark)
        self.at += is_next
        return is_next


_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.)")


def _value_of(string: str) -> str:
    """Return the text of a string in quotes."""

    def meant(found: re.Match[str]) -> str:
        escaped = found[1]
        return chr(int(escaped[1:], 16)) if len(escaped) > 1 else MEANINGS.get(escaped, escaped)

    value = _ESCAPE.sub(meant, string[1:-1])
    if not is_encodable(value):
        raise ValueError(f"{string[:80]} is not valid Unicode")
    return value
