"""Which terminals of a grammar must be split, because the library reads a terminal as far as it can.

A terminal has been read as far as the grammar means, and the next character is one that may follow it. If that
character also continues this terminal, or another one that may begin at the same place, the library goes on with that
and does not come back. Such terminals are split: a rule into its items, a literal into its characters.

Languages are approximated from above: a rule's characters are followed by the same ones wherever it is used, and `x{2}`
is `x+`. So some terminals are split without need. That costs time, and changes no language.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

from pagoda.engine.grammars.gbnf_tree import Group, Item, ItemKind, Node, Ranges, Repeat

_MAX_STEPS = 300_000
"""Of a search: less than a second. Where a grammar needs more, terminals may be read too far."""

_Place = TypeVar("_Place", int, Item)


@dataclass(frozen=True, slots=True)
class _Parts(Generic[_Place]):
    """The places with which a part of a grammar begins and ends, and whether it may be empty."""

    can_be_empty: bool
    first: frozenset[_Place] = frozenset()
    last: frozenset[_Place] = frozenset()


@dataclass(frozen=True, slots=True)
class _Automaton:
    """A terminal; places are characters.   following: place -> sets of places that may come next."""

    parts: _Parts[int]
    following: Mapping[int, Sequence[Collection[int]]]


class _TooManyStepsError(Exception):
    pass


def split_terminals(rules: Mapping[str, Group], regular: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the rules that are terminals, and the literals that other rules have as single characters.

    regular: the rules that may be terminals, each after those that it uses.
    """
    whole, spelled = set(regular), set[str]()
    if "root" in whole:
        return whole, spelled
    try:
        search = _Search(rules, regular)
        while found := search.read_too_far(whole, spelled):
            whole -= {item.text for item in found if item.kind is ItemKind.NAME}
            spelled |= {item.text for item in found if item.kind is ItemKind.LITERAL}
    except _TooManyStepsError:
        pass
    return whole, spelled


class _Search:
    """Looks for terminals that are read too far. Raises _TooManyStepsError."""

    def __init__(self, rules: Mapping[str, Group], regular: Sequence[str]) -> None:
        self._rules = rules
        self._num_steps = 0
        self._chars: list[Ranges] = []  # of each place
        self._parts: dict[str, _Parts[int]] = {}
        self._reached: dict[str, set[str]] = {}
        self._following: dict[str, dict[int, list[Collection[int]]]] = {}
        self._automata: dict[Item, _Automaton] = {}
        for name in regular:
            self._following[name] = defaultdict(list)
            self._reached[name] = {name}
            self._parts[name] = self._connect(rules[name], partial(self._chars_of, user=name), self._following[name])

    def read_too_far(self, whole: Collection[str], spelled: Collection[str]) -> set[Item]:
        """Return terminals to split: rules among `whole`, and literals that are not `spelled` yet."""
        following, begin = self._terminals(whole, spelled)
        after = {item: frozenset[Item]().union(*sets) for item, sets in following.items()}
        beside = self._beside(begin, after)
        found: set[Item] = set()
        for item, others in beside.items():
            leads = 0
            for one in after.get(item, ()):
                leads |= self._leads(self._automaton(one).parts.first)
            for other in others if leads else ():
                to_split = next((one for one in (item, other) if _can_be_split(one)), None)
                if to_split is not None and to_split not in found and self._goes_on(item, leads, other):
                    found.add(to_split)
        return found

    def _beside(self, begin: frozenset[Item], after: dict[Item, frozenset[Item]]) -> dict[Item, frozenset[Item]]:
        """Return which terminals may begin at a place where a given one may.

        begin: those with which the grammar begins.   after: those that may follow each. Terminals of which the same
        text may be read at the same place are both followed: their sets are joined here.
        """
        while True:
            beside: dict[Item, frozenset[Item]] = defaultdict(frozenset)
            for together in {begin, *after.values()}:
                for item in together:
                    self._count(len(together))
                    beside[item] |= together
            has_changed = False
            for item, others in beside.items():
                for other in others:
                    joined = after.get(item, frozenset()) | after.get(other, frozenset())
                    if joined != after.get(item) and self._share_text(item, other):
                        after[item] = joined
                        has_changed = True
            if not has_changed:
                return beside

    def _goes_on(self, item: Item, leads: int, other: Item) -> bool:
        """Return whether `other` goes on where `item` may end, with a character that begins like those of `leads`."""
        ends, following = self._automaton(item).parts.last, self._automaton(other).following
        return any(
            at in ends and any(self._leads(places) & leads for places in following.get(beside, ()))
            for at, beside in self._pairs(item, other)
        )

    def _share_text(self, item: Item, other: Item) -> bool:
        ends, others = self._automaton(item).parts.last, self._automaton(other).parts.last
        return item != other and any(at in ends and beside in others for at, beside in self._pairs(item, other))

    def _pairs(self, item: Item, other: Item) -> Iterator[tuple[int, int]]:
        """Yield the places of the two terminals that the same text may reach."""
        one, two = self._automaton(item), self._automaton(other)
        pairs = self._alike(one.parts.first, two.parts.first)
        seen = set(pairs)
        while pairs:
            at, beside = pairs.pop()
            yield at, beside
            for places in one.following.get(at, ()):
                for others in two.following.get(beside, ()):
                    new = [pair for pair in self._alike(places, others) if pair not in seen]
                    seen.update(new)
                    pairs += new

    def _alike(self, places: Collection[int], others: Collection[int]) -> list[tuple[int, int]]:
        """Return the pairs of places that have a character in common."""
        return [(a, b) for a in places for b in others if self._overlap(self._chars[a], self._chars[b])]

    def _overlap(self, ranges: Ranges, others: Ranges) -> bool:
        """Return whether there is a character in both."""
        self._count(len(ranges) * len(others))
        return any(low <= other_high and other_low <= high for low, high in ranges for other_low, other_high in others)

    def _leads(self, places: Collection[int]) -> int:
        """Return the bytes with which the characters at `places` begin, as the bits of a number."""
        found = 0
        for place in places:
            self._count(len(self._chars[place]))
            for low, high in self._chars[place]:
                found |= (2 << _lead(high)) - (1 << _lead(low))
        return found

    def _terminals(
        self, whole: Collection[str], spelled: Collection[str]
    ) -> tuple[dict[Item, list[Collection[Item]]], frozenset[Item]]:
        """Return which terminals may follow each one, as sets, and those with which the grammar begins."""
        parts: dict[str, _Parts[Item]] = {name: _Parts(False) for name in self._rules if name not in whole}
        following: dict[Item, list[Collection[Item]]] = defaultdict(list)

        def parts_of(item: Item) -> _Parts[Item]:
            if item.kind is ItemKind.NAME and item.text not in whole:
                return parts[item.text]
            if item.kind is ItemKind.LITERAL and (not item.text or item.text in spelled):
                chars = [Item(ItemKind.LITERAL, char) for char in item.text]
                for char, after in pairwise(chars):
                    following[char].append(frozenset((after,)))
                return _Parts(not chars, frozenset(chars[:1]), frozenset(chars[-1:]))
            can_be_empty = item.kind is ItemKind.NAME and self._parts[item.text].can_be_empty
            return _Parts(can_be_empty, frozenset((item,)), frozenset((item,)))

        has_changed = True
        while has_changed:
            has_changed = False
            following.clear()
            for name, before in parts.items():
                parts[name] = self._connect(self._rules[name], parts_of, following)
                has_changed |= parts[name] != before
        return following, parts["root"].first

    def _automaton(self, item: Item) -> _Automaton:
        if item not in self._automata:
            following: dict[int, list[Collection[int]]] = defaultdict(list)
            if item.kind is ItemKind.NAME:
                parts = self._parts[item.text]
                for name in self._reached[item.text]:
                    for place, sets in self._following[name].items():
                        self._count(len(sets))
                        following[place] += sets
            else:
                parts = self._places(item, following)
            self._automata[item] = _Automaton(parts, following)
        return self._automata[item]

    def _chars_of(self, item: Item, user: str) -> _Parts[int]:
        """Return the characters of an item of the rule `user`."""
        if item.kind is not ItemKind.NAME:
            return self._places(item, self._following[user])
        self._reached[user] |= self._reached[item.text]
        self._count(len(self._reached[item.text]))
        return self._parts[item.text]

    def _places(self, item: Item, following: dict[int, list[Collection[int]]]) -> _Parts[int]:
        """Make places for the characters of an item; one without characters, such as a token, has none."""
        chars = [item.ranges] if item.kind is ItemKind.CHARS else []
        if item.kind is ItemKind.LITERAL:
            chars = [((ord(char), ord(char)),) for char in item.text]
        first = len(self._chars)
        self._chars += chars
        self._count(len(chars))
        places = range(first, len(self._chars))
        for place in places[1:]:
            following[place - 1].append((place,))
        return _Parts(not chars, frozenset(places[:1]), frozenset(places[-1:]))

    def _connect(
        self, node: Node, parts_of: Callable[[Item], _Parts[_Place]], following: dict[_Place, list[Collection[_Place]]]
    ) -> _Parts[_Place]:
        """Return a node's parts; add to `following` what comes after what inside of it."""
        match node:
            case Item():
                return parts_of(node)
            case Repeat(inner):
                parts = self._connect(inner, parts_of, following)
                if node.can_be_many:
                    self._join(parts.last, parts.first, following)
                return _Parts(parts.can_be_empty or node.can_be_none, parts.first, parts.last)
            case Group(choices):
                found = [self._connect_sequence(choice, parts_of, following) for choice in choices]
                first, last = (one.first for one in found), (one.last for one in found)
                can_be_empty = any(one.can_be_empty for one in found)
                return _Parts(can_be_empty, frozenset[_Place]().union(*first), frozenset[_Place]().union(*last))

    def _connect_sequence(
        self,
        sequence: list[Node],
        parts_of: Callable[[Item], _Parts[_Place]],
        following: dict[_Place, list[Collection[_Place]]],
    ) -> _Parts[_Place]:
        can_be_empty, first, last = True, frozenset[_Place](), frozenset[_Place]()
        for node in sequence:
            parts = self._connect(node, parts_of, following)
            self._join(last, parts.first, following)
            first = first | parts.first if can_be_empty else first
            last = last | parts.last if parts.can_be_empty else parts.last
            can_be_empty &= parts.can_be_empty
            self._count(len(first) + len(last))
        return _Parts(can_be_empty, first, last)

    def _join(
        self, last: Collection[_Place], first: Collection[_Place], following: dict[_Place, list[Collection[_Place]]]
    ) -> None:
        self._count(len(last))
        for place in last:
            following[place].append(first)

    def _count(self, steps: int) -> None:
        self._num_steps += 1 + steps
        if self._num_steps > _MAX_STEPS:
            raise _TooManyStepsError


def _can_be_split(item: Item) -> bool:
    return item.kind is ItemKind.NAME or (item.kind is ItemKind.LITERAL and len(item.text) > 1)


def _lead(code: int) -> int:
    """Return the first byte of a character in UTF-8."""
    if code < 0x80:
        return code
    for length, prefix in ((2, 0xC0), (3, 0xE0), (4, 0xF0)):
        if code < 1 << (5 * length + 1):
            return prefix | code >> 6 * (length - 1)
    raise AssertionError(code)
