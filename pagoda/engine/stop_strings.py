"""Stop strings: find the first end of any of some strings in a growing text.

An Aho-Corasick automaton. A state stands for the longest end of the text that begins some string. Building it takes
time and memory linear in the strings' total length, and each further character of text constant time on average,
however long the strings are and however many of them there are.
"""

from array import array
from collections.abc import Sequence

_NO_CHAR = "\ud800"  # a lone surrogate, which no decoded text holds


class StopStrings:
    """The automaton of one request's stop strings. Immutable: all outputs of the request share it.

    States are numbers; 0 is the root. The first child of a state usually is the next number, so that a long string is
    a run of consecutive states and costs a few bytes per character.

    labels: str, per state the character that leads to it from the state before it; _NO_CHAR if its parent is another.
    jumps: (state, character) -> child, for children that are not the next state.
    fallback: int32 per state, the longest proper end of what it stands for that is a state too.
    found: int32 per state, index in `strings` of the longest string that ends there, -1 for none.
    held: int32 per state, length of the longest end of the text there that a further character may complete.
    first_chars: the characters with which some string begins.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """strings: at least one, none of them empty."""
        self.strings = tuple(dict.fromkeys(strings))
        self.first_chars = frozenset(string[0] for string in self.strings)
        labels = [_NO_CHAR, _NO_CHAR]  # one more than states: the last state has a next one to look at
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
        """Set the fallbacks, and what follows from them, from short states to long ones."""
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
        """The state after one more character."""
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
    """Looks for a request's stop strings in the text of one output.

    found: the string that ended the output.
    num_held: length of the longest end of the text that some string begins with and does not end with.
    """

    __slots__ = ("_state", "_strings", "found", "num_held")

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self.found: str | None = None
        self.num_held = 0

    def feed(self, text: str, may_stop: bool = True) -> int | None:
        """Take more text. When a string is complete: how many characters follow its end, and `found` is set.

        may_stop: False lets strings that end within `text` pass. Of several that end at once, the longest counts.
        """
        strings = self._strings
        labels, jumps, fallback, ends = strings.labels, strings.jumps, strings.fallback, strings.found
        state = self._state
        if not state and strings.first_chars.isdisjoint(text):
            return None
        for at, char in enumerate(text, 1):
            # StopStrings.step, written out: this loop runs for every character of every output.
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
