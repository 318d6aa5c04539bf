"""Find earlier occurrences of the end of a text, with vector instructions instead of an index: no memory, no upkeep."""

import numpy as np

MOST_SCANNED = 32_768
"""Tokens at the end of a text that are searched: this bounds the search of a very long text to 50 us."""


def longest_suffix_matches(tokens: np.ndarray, longest: int) -> tuple[np.ndarray, int]:
    """Return where the longest suffix of `tokens` that occurs earlier ends, and its length in tokens.

    tokens: int32 [n].   longest: matches are not extended beyond this length.
    Return (int64 [m] positions of the last token of each occurrence, ascending; length), ([], 0) if there is none.
    """
    if len(tokens) < 2:
        return _NONE, 0
    begin = max(0, len(tokens) - 1 - MOST_SCANNED)
    ends = np.flatnonzero(tokens[begin:-1] == tokens[-1]) + begin
    if not ends.size:
        return _NONE, 0
    length = 1
    while length < longest:
        longer = ends[ends >= length]  # the others are at the beginning of the text
        longer = longer[tokens[longer - length] == tokens[-1 - length]]
        if not longer.size:
            break
        ends, length = longer, length + 1
    return ends, length


def continue_from(tokens: np.ndarray, end: int, count: int) -> np.ndarray:
    """Return the `count` tokens after position `end`, int32; where the text ends, what follows `end` is repeated."""
    following = tokens[end + 1 : end + 1 + count]
    return following if len(following) == count else np.resize(following, count)


_NONE = np.empty(0, np.int64)
