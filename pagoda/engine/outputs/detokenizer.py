"""Detokenizer: decode one output's tokens as they arrive, in whole characters, and cut it at stop strings.

Stop strings are found with an Aho-Corasick automaton. A state represents the longest suffix of the text that is a
prefix of some string. Building it takes time and memory linear in the strings' total length; each character of text
takes amortised constant time, regardless of the number and length of the strings.
"""

import codecs
from array import array
from collections.abc import Sequence

from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.tokenizers.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")
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


class Detokenizer:
    """The text of one growing output.

    Each token is converted to bytes once. The bytes of an incomplete character are held back until it is complete, and
    so is text that may be the beginning of a stop string; all other text is available at once.

    The output ends at the first character that completes any stop string, regardless of token boundaries; if several
    end there, the longest counts. A stop string completed before token min_tokens + 1 is ordinary text.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stops: StopStrings | None = None) -> None:
        """stops: the automaton of `params.stop`, if several outputs share it; built here if None."""
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.facts.special_token_ids if params.skip_special_tokens else frozenset[int]()
        self._utf8 = _Utf8(errors="replace")
        if stops is None and params.stop:
            stops = StopStrings(params.stop)
        self._stop = StopSearch(stops) if stops is not None else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """The text available so far that `take` has not returned."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def take(self) -> str:
        """Return the text that became available since the last call."""
        text, self._pieces = "".join(self._pieces), []
        return text

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the output, or None."""
        return self._stop.found if self._stop is not None else None

    def append(self, token_ids: Sequence[int]) -> int:
        """Add tokens; return how many of them belong to the output (tokens after a stop string do not)."""
        stop = self._stop
        if stop is None:
            skipped, token_bytes = self._skipped, self._token_bytes
            data = b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in skipped])
            self._show(self._utf8.decode(data))
            self._num_tokens += len(token_ids)
            return len(token_ids)
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if token_id in self._skipped:
                continue
            text = self._utf8.decode(self._token_bytes(token_id))
            if text and self._append_text(stop, text):
                return index + 1
        return len(token_ids)

    def _append_text(self, stop: StopSearch, text: str) -> bool:
        """Add text; return True if a stop string is complete."""
        may_stop = self._num_tokens > self._min_tokens
        cut = stop.feed(text, may_stop)
        self._held += text
        if cut is not None:
            surplus = cut if self._include_stop else cut + len(stop.found or "")
            self._show(self._held[: len(self._held) - surplus])
            self._held = ""
            return True
        keep = 0 if self._include_stop else stop.num_held
        at = len(self._held) - keep
        self._show(self._held[:at])
        self._held = self._held[at:]
        return False

    def finish(self) -> None:
        """Release the held-back text: the output has ended without a stop string. Drop an incomplete character."""
        self._show(self._held)
        self._held = ""

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(text)
