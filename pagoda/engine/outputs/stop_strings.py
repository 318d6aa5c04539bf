"""Stop strings: find the first occurrence of any of several strings in a growing text.

An Aho-Corasick automaton. A state represents the longest suffix of the text that is a prefix of some string. Building
it takes time and memory linear in the strings' total length; each character of text takes amortised constant time,
regardless of the number and length of the strings.
"""

from array import array
from collections.abc import Sequence

_NO_CHAR = "\ud800"  # a lone surrogate, which no decoded text holds


class StopStrings:
    """The automaton of one request's stop strings. Immutable: all outputs of the request share it.

    States are integers; 0 is the root. A state's first child usually has the next number, so that a long string is a
    run of consecutive states and takes a few bytes per character.

    labels: str, per state the character that leads to it from state - 1; _NO_CHAR if that is not its parent.
    jumps: (state, character) -> child, for children other than state + 1.
    fallback: int32 per state, the state of its longest proper suffix that is also a state.
    found: int32 per state, index in `strings` of the longest string that ends there, -1 if none.
    held: int32 per state, length of the longest suffix that further characters may complete to a string.
    first_chars: first characters of the strings.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """strings: at least one, none of them empty."""
        self.strings = tuple(dict.fromkeys(strings))
        self.first_chars = frozenset(string[0] for string in self.strings)
        labels = [_NO_CHAR, _NO_CHAR]  # one more than there are states, so that labels[state + 1] always exists
        parents, chars = array("i", [0]), [""]
        self.jumps: dict[tuple[int, str], int] = {}
        self.found = array("i", [-1])
        self.held = array("i", [0])
        has_child = bytearray(1)
        for index, string in enumerate(self.strings):
            state = 0
            for depth, char in enumerate(string, 1):
                child = state + 1 if labels[state + 1] == char else self.jumps.get((state, char))
                if child is None:
                    child = len(parents)
                    if child == state + 1:
                        labels[child] = char
                    else:
                        self.jumps[state, char] = child
                    labels.append(_NO_CHAR)
                    parents.append(state)
                    chars.append(char)
                    self.found.append(-1)
                    self.held.append(depth)
                    has_child.append(0)
                    has_child[state] = 1
                state = child
            self.found[state] = index
        self.labels = "".join(labels)
        self.fallback = array("i", bytes(len(parents) * parents.itemsize))
        self._link(parents, chars, has_child)

    def _link(self, parents: Sequence[int], chars: Sequence[str], has_child: bytearray) -> None:
        """Set `fallback`, and update `found` and `held` from it, in order of depth."""
        fallback, found, held = self.fallback, self.found, self.held
        order = sorted(range(1, len(parents)), key=held.__getitem__)
        for state in order:
            parent = parents[state]
            fallback[state] = self.step(fallback[parent], chars[state]) if parent else 0
            if found[state] < 0:
                found[state] = found[fallback[state]]
        for state in order:
            if not has_child[state]:
                held[state] = held[fallback[state]]

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        labels, jumps, fallback = self.labels, self.jumps, self.fallback
        while True:
            if labels[state + 1] == char:
                return state + 1
            child = jumps.get((state, char))
            if child is not None:
                return child
            if not state:
                return 0
            state = fallback[state]


class StopSearch:
    """Searches for a request's stop strings in the text of one output.

    found: the string that ended the output.
    num_held: length of the longest suffix of the text that is a proper prefix of a string.
    """

    __slots__ = ("_state", "_strings", "found", "num_held")

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self.found: str | None = None
        self.num_held = 0

    def feed(self, text: str, may_stop: bool = True) -> int | None:
        """Add text. If it completes a string, set `found` and return the number of characters after its end.

        may_stop: if False, ignore strings that end within `text`. If several end at once, the longest counts.
        """
        strings = self._strings
        labels, jumps, fallback, ends = strings.labels, strings.jumps, strings.fallback, strings.found
        state = self._state
        if not state and strings.first_chars.isdisjoint(text):
            return None
        for at, char in enumerate(text, 1):
            # StopStrings.step, inlined: this loop runs for every character of every output.
            while labels[state + 1] != char:
                child = jumps.get((state, char))
                if child is not None:
                    state = child
                    break
                if not state:
                    break
                state = fallback[state]
            else:
                state += 1
            if may_stop and ends[state] >= 0:
                self.found, self.num_held = strings.strings[ends[state]], 0
                return len(text) - at
        self._state, self.num_held = state, strings.held[state]
        return None
