"""OutputPool: finished outputs of earlier requests, in bounded memory, searched by their last three tokens.

A ring of tokens with hash chains, as compressors find matches: `_heads` has the last position of each hash, `_links`
the previous position with the same hash. The oldest tokens are overwritten, which also ends their chains.
"""

from collections import deque

import numpy as np

_HASHED = 3  # tokens: shorter matches are too common to say anything
_HEAD_BITS = 17
_MOST_CANDIDATES = 16  # occurrences looked at, latest first
_BETWEEN = -1  # separates outputs, and equals no token


class OutputPool:
    """Texts by owner: only those of the same owner (a cache salt) are found."""

    def __init__(self, capacity: int, max_texts: int) -> None:
        """capacity: tokens held, 20 bytes each.   max_texts: texts held; the oldest go first."""
        self._capacity = capacity
        self._max_texts = max_texts
        self._tokens = np.full(capacity, _BETWEEN, np.int32)
        self._owners = np.zeros(capacity, np.int64)
        self._links = np.full(capacity, -1, np.int64)
        self._heads = np.full(1 << _HEAD_BITS, -1, np.int64)
        self._begins: deque[int] = deque()
        self._end = 0  # positions count up for ever; position p is at p % capacity
        self._oldest = 0

    def add(self, tokens: np.ndarray, owner: int) -> None:
        """Add a text (int32 [n]); if it is longer than the pool, only its end."""
        tokens = tokens[-(self._capacity // 2) :]
        if len(tokens) <= _HASHED or not self._max_texts:
            return
        at = np.arange(self._end, self._end + len(tokens) + 1)
        slots = at % self._capacity
        self._tokens[slots[:-1]] = tokens
        self._tokens[slots[-1]] = _BETWEEN
        self._owners[slots] = owner
        self._links[slots] = -1
        self._link(at[_HASHED - 1 : -1], _hashes(tokens, owner))
        self._begins.append(self._end)
        self._end += len(tokens) + 1
        if len(self._begins) > self._max_texts:
            self._begins.popleft()
            self._oldest = self._begins[0]
        self._oldest = max(self._oldest, self._end - self._capacity)

    def _link(self, at: np.ndarray, hashes: np.ndarray) -> None:
        """Put positions (ascending) at the front of the chains of their hashes."""
        order = np.argsort(hashes, kind="stable")
        hashes, at = hashes[order], at[order]
        links = self._heads[hashes]
        follows = np.flatnonzero(hashes[1:] == hashes[:-1]) + 1
        links[follows] = at[follows - 1]
        self._links[at % self._capacity] = links
        is_last = np.append(hashes[1:] != hashes[:-1], True)
        self._heads[hashes[is_last]] = at[is_last]

    def longest_matches(self, tokens: np.ndarray, owner: int, longest: int) -> tuple[np.ndarray, int]:
        """As `longest_suffix_matches`, in the owner's texts: positions (int64 [m], latest first), and the length."""
        if len(tokens) < _HASHED or not self._begins:
            return _NONE, 0
        found: list[int] = []
        at = int(self._heads[_hashes(tokens[-_HASHED:], owner)[0]])
        while at >= self._oldest and len(found) < _MOST_CANDIDATES:
            found.append(at)
            at = int(self._links[at % self._capacity])
        if not found:
            return _NONE, 0
        ends = np.array(found, np.int64)
        pattern = tokens[-longest:][::-1]
        before = ends[:, None] - np.arange(len(pattern))
        slots = before % self._capacity
        agree = (self._tokens[slots] == pattern) & (before >= self._oldest)
        lengths = np.logical_and.accumulate(agree, axis=1).sum(1)
        lengths[self._owners[slots[:, 0]] != owner] = 0
        length = int(lengths.max())
        return (ends[lengths == length], length) if length >= _HASHED else (_NONE, 0)

    def following(self, end: int, count: int) -> list[int]:
        """Return the up to `count` tokens after position `end`, as far as its text goes."""
        slots = np.arange(end + 1, min(end + 1 + count, self._end)) % self._capacity
        tokens: list[int] = self._tokens[slots].tolist()
        return tokens[: tokens.index(_BETWEEN)] if _BETWEEN in tokens else tokens


def _hashes(tokens: np.ndarray, owner: int) -> np.ndarray:
    """Return a hash for every three tokens in a row and the owner: int64 [n - 2], below 2 ** _HEAD_BITS."""
    wide = tokens.astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = (wide[:-2] * _FACTORS[0] + wide[1:-1]) * _FACTORS[1] + wide[2:] + np.uint64(owner)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _FACTORS[2]
    return (mixed >> np.uint64(64 - _HEAD_BITS)).astype(np.int64)


_FACTORS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
_NONE = np.empty(0, np.int64)
