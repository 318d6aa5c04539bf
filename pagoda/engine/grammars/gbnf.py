"""GBNF, llama.cpp's grammar format, as a grammar in llguidance's variant of Lark's syntax.

A rule that no recursion and no token reaches becomes a terminal, which the library follows with an automaton instead of
its parser. If that is the root, the whole grammar is one regular expression.
"""

import json
import re
from collections.abc import Mapping

_DEFINITION = re.compile(r"([\w-]+)\s*::=")
_SPACE = re.compile(r"(?:\s|#[^\r\n]*)*")
_ITEM = re.compile(
    r'"(?P<literal>(?:[^"\\]|\\.)*)"'
    r"|\[(?P<class>\^?(?:[^\]\\]|\\.)*)\]"
    r"|(?P<dot>\.)"
    r"|(?P<token>!?<\[\d{1,9}\]>|<[^\s<>\[\]]+>)"
    r"|(?P<name>[\w-]+)"
    r"|(?P<open>\()"
    r"|(?P<close>\))"
    r"|(?P<bar>\|)"
    r"|(?P<repeat>[*+?]|\{\s*\d{1,9}\s*(?:,\s*\d{0,9}\s*)?\})",
    re.DOTALL,
)
_CHAR = re.compile(r'\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\[tnr\\"\[\]]|[^\\]', re.DOTALL)
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r"}
_MAX_DEPTH = 100
_MAX_REPEATS = 4  # of one another, as in "a"?+


def gbnf_to_lark(text: str) -> str:
    """Return the grammar. Raises ValueError, with the line, for what is not GBNF."""
    rules: dict[str, _Rule] = {}
    at = _SPACE.match(text).end()  # type: ignore[union-attr]  # it may be empty
    while at < len(text):
        definition = _DEFINITION.match(text, at)
        if definition is None:
            raise _error(text, at, "expected a rule, NAME ::= ...")
        rule = _Rule(text, definition.end())
        if rules.setdefault(definition[1], rule) is not rule:
            raise _error(text, at, f"the rule {definition[1]!r:.80} is defined twice")
        at = rule.end
    if "root" not in rules:
        raise ValueError("there is no rule named root")
    for rule in rules.values():
        for name, place in rule.names.items():
            if name not in rules:
                raise _error(text, place, f"there is no rule named {name!r:.80}")
    regular = _regular(rules)
    called = {name: f"R{i}" if name in regular else f"r{i}" for i, name in enumerate(rules)}
    bodies = (f"{called[name]}: {rule.body(called)}" for name, rule in rules.items())
    return "\n".join([f"start: {called['root']}", *bodies])


def _error(text: str, at: int, what: str) -> ValueError:
    line = text.count("\n", 0, at) + 1
    return ValueError(f"line {line}, at {text[at : at + 20]!r}: {what}")


class _Rule:
    """One rule.   names: of other rules, and where they are in the text.   end: where the next rule begins.

    has_tokens: it names tokens of the vocabulary, and so cannot be part of a terminal.
    """

    def __init__(self, text: str, begin: int) -> None:
        """begin: after the `::=`."""
        self._pieces: list[tuple[str, bool]] = []  # text, and whether it is a name
        self.names: dict[str, int] = {}
        self.has_tokens = False
        self._text = text
        self.end = self._parse(begin)

    def body(self, called: Mapping[str, str]) -> str:
        """Return the rule's body.   called: the names of rules in the new grammar."""
        return " ".join(called[piece] if is_name else piece for piece, is_name in self._pieces)

    def _parse(self, at: int) -> int:
        opened: list[int] = []  # where in `pieces` groups begin
        first, num_repeats = -1, 0  # where the last item begins, -1 for none; operators after it
        while True:
            at = _SPACE.match(self._text, at).end()  # type: ignore[union-attr]  # it may be empty
            if at == len(self._text) or _DEFINITION.match(self._text, at):
                break
            found = _ITEM.match(self._text, at)
            if found is None:
                raise _error(self._text, at, "unexpected character")
            kind, text = str(found.lastgroup), found[0]
            if kind == "repeat":
                if first < 0 or num_repeats == _MAX_REPEATS:
                    raise _error(self._text, at, "nothing to repeat" if first < 0 else "too many operators")
                if num_repeats:
                    self._pieces.insert(first, ("(", False))
                    self._add(")")
                self._add(re.sub(r"\s", "", text))
                num_repeats += 1
            elif kind == "close":
                if not opened:
                    raise _error(self._text, at, "there is no ( for this )")
                self._end_sequence()
                self._add(")")
                first, num_repeats = opened.pop(), 0
            else:
                if kind == "bar":
                    self._end_sequence()
                first, num_repeats = -1 if kind in ("bar", "open") else len(self._pieces), 0
                if kind == "open":
                    opened.append(len(self._pieces))
                    if len(opened) > _MAX_DEPTH:
                        raise _error(self._text, at, f"groups are nested more than {_MAX_DEPTH} deep")
                self._add_item(kind, found)
            at = found.end()
        if opened:
            raise _error(self._text, at, "there is no ) for a (")
        self._end_sequence()
        return at

    def _add(self, piece: str, is_name: bool = False) -> None:
        self._pieces.append((piece, is_name))

    def _end_sequence(self) -> None:
        """Write what is empty, between two of `(`, `|` and `)`, as an empty string."""
        if not self._pieces or self._pieces[-1] in (("(", False), ("|", False)):
            self._add('""')

    def _add_item(self, kind: str, found: re.Match[str]) -> None:
        text = found[0]
        if kind == "name":
            self.names.setdefault(text, found.start())
            self._add(text, is_name=True)
        elif kind == "literal":
            self._add(json.dumps("".join(self._chars(found["literal"], found.start()))))
        elif kind == "class":
            self._add(self._char_class(found["class"], found.start()))
        elif kind == "token":
            self.has_tokens = True
            self._add(f"<[^{text[3:]}" if text[0] == "!" else text)
        else:
            self._add("/(?s:.)/" if kind == "dot" else text)

    def _chars(self, text: str, place: int) -> list[str]:
        """Return the characters that a text with escapes stands for."""
        found: list[str] = []
        at = 0
        while at < len(text):
            char = _CHAR.match(text, at)
            if char is None:
                raise _error(self._text, place, f"{text[at : at + 2]!r} is not an escape; write \\\\ for a backslash")
            found.append(self._char(char[0], place))
            at = char.end()
        return found

    def _char(self, written: str, place: int) -> str:
        if written[0] != "\\":
            return written
        if written[1] not in "xuU":
            return _CONTROLS.get(written[1], written[1])
        code = int(written[2:], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise _error(self._text, place, f"{written} is not a character")
        return chr(code)

    def _char_class(self, text: str, place: int) -> str:
        """Return a class of characters as a regular expression, with each character as its number."""
        is_negated = text.startswith("^")
        given = [(char[0], self._char(char[0], place)) for char in _CHAR.finditer(text, is_negated)]
        if sum(len(written) for written, _ in given) != len(text) - is_negated or not given:
            raise _error(self._text, place, "a class of characters is empty, or has an unknown escape")
        ranges: list[str] = []
        at = 0
        while at < len(given):
            low = high = given[at][1]
            if at + 2 < len(given) and given[at + 1][0] == "-":
                high = given[at + 2][1]
                at += 2
            if low > high:
                raise _error(self._text, place, f"the range {low!r} to {high!r} is empty")
            ranges.append(f"\\u{{{ord(low):x}}}-\\u{{{ord(high):x}}}")
            at += 1
        return f"/[{'^' if is_negated else ''}{''.join(ranges)}]/"


def _regular(rules: Mapping[str, _Rule]) -> set[str]:
    """Return the names of the rules that neither recursion nor a token reaches."""
    used_by: dict[str, list[str]] = {}
    missing = {name: len(rule.names) for name, rule in rules.items() if not rule.has_tokens}
    for name, rule in rules.items():
        for other in rule.names:
            used_by.setdefault(other, []).append(name)
    found = [name for name, count in missing.items() if count == 0]
    for name in found:  # grows meanwhile
        for user in used_by.get(name, ()):
            if user in missing:
                missing[user] -= 1
                if missing[user] == 0:
                    found.append(user)
    return set(found)
