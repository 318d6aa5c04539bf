"""GBNF, llama.cpp's grammar format, as a grammar in llguidance's variant of Lark's syntax.

A rule that no recursion and no token reaches becomes a terminal, which the library follows with an automaton instead of
its parser. If that is the root, the whole grammar is one regular expression. A terminal is read as far as it matches:
where that would change the language, `gbnf_lexing.py` has it read character by character.
"""

import json
import re
from collections.abc import Collection, Mapping

from pagoda.engine.grammars.gbnf_lexing import split_terminals
from pagoda.engine.grammars.gbnf_tree import Group, Item, ItemKind, Node, Ranges, Repeat

_DEFINITION = re.compile(r"([\w-]+)\s*::=")
_SPACE = re.compile(r"(?:\s|#[^\r\n]*)*")
_ITEM = re.compile(
    r'"(?P<literal>(?:[^"\\]|\\.)*)"'
    r"|\[(?P<class>\^?(?:[^\]\\]|\\.)*)\]"
    r"|(?P<dot>\.)"
    r"|(?P<token>!?<\[[0-9]{1,9}\]>|<[^\s<>\[\]]+>)"
    r"|(?P<name>[\w-]+)"
    r"|(?P<open>\()"
    r"|(?P<close>\))"
    r"|(?P<bar>\|)"
    r"|(?P<repeat>[*+?]|\{\s*[0-9]{1,9}\s*(?:,\s*[0-9]{0,9}\s*)?\})",
    re.DOTALL,
)
_CHAR = re.compile(r'\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\[tnr\\"\[\]]|[^\\]', re.DOTALL)
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r"}
LAST_CHAR = 0x10FFFF
_MAX_DEPTH = 100
_MAX_REPEATS = 4  # of one another, as in "a"?+


def gbnf_to_lark(text: str, start: str = "start", suffix: str = "") -> str:
    """Return the grammar. Raises ValueError, with the line, for what is not GBNF.

    start: the name of its first rule.   suffix: of the names of all others.
    """
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
    bodies = {name: rule.body for name, rule in rules.items()}
    regular, spelled = split_terminals(bodies, _regular(rules))
    called = {name: f"R{i}{suffix.upper()}" if name in regular else f"r{i}{suffix}" for i, name in enumerate(rules)}
    written = (
        f"{called[name]}: {_written_choices(rule.body.choices, called, () if name in regular else spelled)}"
        for name, rule in rules.items()
    )
    return "\n".join([f"{start}: {called['root']}", *written])


def _error(text: str, at: int, what: str) -> ValueError:
    line = text.count("\n", 0, at) + 1
    return ValueError(f"line {line}, at {text[at : at + 20]!r}: {what}")


def _written(node: Node, called: Mapping[str, str], spelled: Collection[str]) -> str:
    """Return a node in Lark's syntax.   called: the names of rules there.   spelled: literals, as single characters."""
    match node:
        case Item(ItemKind.NAME, text):
            return called[text]
        case Item(ItemKind.LITERAL, text):
            return " ".join(map(json.dumps, text)) if text in spelled else json.dumps(text)
        case Item(_, text):
            return text
        case Repeat(inner, operators):
            written = _written(inner, called, spelled)
            if isinstance(inner, Item) and inner.text in spelled:
                written = f"({written})"
            for count, operator in enumerate(operators):
                written = f"({written}){operator}" if count else written + operator
            return written
        case Group(choices):
            return "(" + _written_choices(choices, called, spelled) + ")"


def _written_choices(choices: list[list[Node]], called: Mapping[str, str], spelled: Collection[str]) -> str:
    return " | ".join(" ".join(_written(node, called, spelled) for node in choice) or '""' for choice in choices)


class _Rule:
    """One rule.   body: its alternatives.   names: of other rules, and where they are in the text.

    end: where the next rule begins.
    has_tokens: it names tokens of the vocabulary, and so cannot be part of a terminal.
    """

    def __init__(self, text: str, begin: int) -> None:
        """begin: after the `::=`."""
        self.body = Group([[]])
        self.names: dict[str, int] = {}
        self.has_tokens = False
        self._text = text
        self.end = self._parse(begin)

    def _parse(self, at: int) -> int:
        opened = [self.body]  # groups that have not ended
        can_repeat = False
        while True:
            at = _SPACE.match(self._text, at).end()  # type: ignore[union-attr]  # it may be empty
            if at == len(self._text) or _DEFINITION.match(self._text, at):
                break
            found = _ITEM.match(self._text, at)
            if found is None:
                raise _error(self._text, at, "unexpected character")
            kind, text, sequence = str(found.lastgroup), found[0], opened[-1].choices[-1]
            if kind == "repeat":
                if not can_repeat:
                    raise _error(self._text, at, "nothing to repeat")
                if not isinstance(sequence[-1], Repeat):
                    sequence[-1] = Repeat(sequence[-1], [])
                if len(sequence[-1].operators) == _MAX_REPEATS:
                    raise _error(self._text, at, "too many operators")
                sequence[-1].operators.append(re.sub(r"\s", "", text))
            elif kind == "close":
                if len(opened) == 1:
                    raise _error(self._text, at, "there is no ( for this )")
                opened.pop()
                can_repeat = True
            elif kind == "bar":
                opened[-1].choices.append([])
                can_repeat = False
            elif kind == "open":
                group = Group([[]])
                sequence.append(group)
                opened.append(group)
                if len(opened) > _MAX_DEPTH + 1:
                    raise _error(self._text, at, f"groups are nested more than {_MAX_DEPTH} deep")
                can_repeat = False
            else:
                sequence.append(self._item(kind, found))
                can_repeat = True
            at = found.end()
        if len(opened) > 1:
            raise _error(self._text, at, "there is no ) for a (")
        return at

    def _item(self, kind: str, found: re.Match[str]) -> Item:
        text = found[0]
        if kind == "name":
            self.names.setdefault(text, found.start())
            return Item(ItemKind.NAME, text)
        if kind == "literal":
            return Item(ItemKind.LITERAL, "".join(self._chars(found["literal"], found.start())))
        if kind == "class":
            return self._char_class(found["class"], found.start())
        if kind == "token":
            self.has_tokens = True
            return Item(ItemKind.TOKEN, f"<[^{text[3:]}" if text[0] == "!" else text)
        return Item(ItemKind.CHARS, "/(?s:.)/", ((0, LAST_CHAR),))

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

    def _char_class(self, text: str, place: int) -> Item:
        """Return a class of characters as a regular expression, with each character as its number."""
        is_negated = text.startswith("^")
        given = [(char[0], self._char(char[0], place)) for char in _CHAR.finditer(text, is_negated)]
        if sum(len(written) for written, _ in given) != len(text) - is_negated or not given:
            raise _error(self._text, place, "a class of characters is empty, or has an unknown escape")
        ranges: list[tuple[int, int]] = []
        at = 0
        while at < len(given):
            low = high = given[at][1]
            if at + 2 < len(given) and given[at + 1][0] == "-":
                high = given[at + 2][1]
                at += 2
            if low > high:
                raise _error(self._text, place, f"the range {low!r} to {high!r} is empty")
            ranges.append((ord(low), ord(high)))
            at += 1
        written = "".join(f"\\u{{{low:x}}}-\\u{{{high:x}}}" for low, high in ranges)
        given_ranges = other_chars(ranges) if is_negated else tuple(ranges)
        return Item(ItemKind.CHARS, f"/[{'^' if is_negated else ''}{written}]/", given_ranges)


def other_chars(ranges: list[tuple[int, int]]) -> Ranges:
    """Return the ranges of the characters that are in none of `ranges`."""
    found: list[tuple[int, int]] = []
    begin = 0
    for low, high in sorted(ranges):
        if low > begin:
            found.append((begin, low - 1))
        begin = max(begin, high + 1)
    return (*found, (begin, LAST_CHAR)) if begin <= LAST_CHAR else tuple(found)


def _regular(rules: Mapping[str, _Rule]) -> list[str]:
    """Return the names of the rules that neither recursion nor a token reaches, each after those that it uses."""
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
    return found
