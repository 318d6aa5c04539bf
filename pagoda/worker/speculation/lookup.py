"""Drafts that are looked up: the last few tokens occurred before, and what followed them then may follow now.

NgramDrafter searches the row's own text, SuffixDrafter also outputs that finished earlier (OutputPool). Occurrences are
found with vector instructions instead of an index: no memory, no upkeep.
"""

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from pagoda.core.request import RequestKey
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.speculation.drafter import NO_DRAFT, Draft, grade_of_match
from pagoda.worker.table_mirror import TableMirror

_NONE = np.empty(0, np.int64)

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


class NgramDrafter:
    """Prompt lookup: copy what followed the last occurrence of the row's last few tokens. Keeps no state.

    Saxena, "Prompt lookup decoding", 2023.
    """

    runs_model = False

    def __init__(self, lookup_min: int, lookup_max: int) -> None:
        """lookup_min, lookup_max: tokens that must match, and most tokens that are compared."""
        self._min = lookup_min
        self._max = lookup_max

    def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
        """Nothing to note."""

    def propose(self, table: TableMirror, rows: np.ndarray, most: np.ndarray) -> Sequence[Draft]:
        return [self._draft(table, row, count) for row, count in zip(rows.tolist(), most.tolist(), strict=True)]

    def _draft(self, table: TableMirror, row: int, most: int) -> Draft:
        tokens = table.token_ids[row, : table.num_tokens[row]]
        ends, length = longest_suffix_matches(tokens, self._max)
        if length < self._min:
            return NO_DRAFT
        return Draft(continue_from(tokens, int(ends[-1]), most), grade_of_match(length))


_POOL_TOKENS = 1 << 18
_MOST_VOTES = 8  # occurrences whose continuations are counted, latest first


class SuffixDrafter:
    """Continue the longest suffix that occurred before, in the row's own text or in outputs with the same cache salt.

    Oliaro et al., "SuffixDecoding", 2024. The matches are those that suffix trees over the same texts would give (of
    finished outputs, the last 16 occurrences), with no memory for running requests and 20 bytes per token for finished
    ones.
    """

    runs_model = False

    def __init__(
        self,
        max_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
    ) -> None:
        """max_depth: longest match looked for, in tokens.   max_cached_requests: finished outputs kept, 0 for none.

        max_spec_factor: most draft tokens per token of the match.   min_token_prob: stop the draft where the
        share of continuations that agree with it falls below this.
        """
        self._max_depth = max_depth
        self._max_spec_factor = max_spec_factor
        self._min_token_prob = min_token_prob
        self._pool = OutputPool(_POOL_TOKENS, max_cached_requests)
        self._owners: dict[int, int] = {}  # by row
        self._requests: dict[int, RequestKey] = {}  # by row

    def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
        """Keep the outputs of released rows; note the cache salts of new ones."""
        for row in output.released.tolist():
            owner = self._owners.pop(row, None)
            if owner is not None and self._requests.pop(row) not in output.preempted:
                begin = max(0, int(table.num_prompt[row]) - self._max_depth)
                self._pool.add(table.token_ids[row, begin : table.num_tokens[row]], owner)
        for init in output.admitted:
            if init.sampling is not None:
                self._owners[init.row] = _owner(init.cache_salt)
                self._requests[init.row] = init.key
        for fork in output.forks:
            self._owners[fork.dst] = self._owners[fork.src]
            self._requests[fork.dst] = self._requests[fork.src]

    def propose(self, table: TableMirror, rows: np.ndarray, most: np.ndarray) -> Sequence[Draft]:
        return [self._draft(table, row, count) for row, count in zip(rows.tolist(), most.tolist(), strict=True)]

    def _draft(self, table: TableMirror, row: int, most: int) -> Draft:
        depth = self._max_depth
        tokens = table.token_ids[row, : table.num_tokens[row]]
        ends, length = longest_suffix_matches(tokens, depth)
        pooled, pooled_length = self._pool.longest_matches(tokens, self._owners.get(row, 0), depth)
        count = min(most, int(self._max_spec_factor * max(length, pooled_length)))
        if count < 1:
            return NO_DRAFT
        if pooled_length > length:
            following = [self._pool.following(end, count) for end in pooled[:_MOST_VOTES].tolist()]
        elif len(ends) == 1:
            return Draft(continue_from(tokens, int(ends[0]), count), grade_of_match(length))
        else:
            latest = ends[-_MOST_VOTES:][::-1]
            following = [continue_from(tokens, end, count).tolist() for end in latest.tolist()]
        voted = _most_common_path(following, count, self._min_token_prob)
        return Draft(np.array(voted, np.int32), grade_of_match(max(length, pooled_length)))


def _most_common_path(following: list[list[int]], count: int, least: float) -> list[int]:
    """Return the tokens that most continuations agree on, one after the other, while their share is at least `least`.

    following: latest first; of tokens that are equally common, the one that occurs latest is taken.
    """
    path: list[int] = []
    total = len(following)
    while len(path) < count:
        votes: dict[int, int] = {}
        for one in following:
            if len(path) < len(one):
                votes[one[len(path)]] = votes.get(one[len(path)], 0) + 1
        if not votes:
            break
        token = max(votes, key=votes.__getitem__)
        if votes[token] < least * total:
            break
        path.append(token)
        following = [one for one in following if len(one) >= len(path) and one[len(path) - 1] == token]
        if len(following) == 1:
            return following[0][:count]
    return path


def _owner(cache_salt: str | None) -> int:
    """Return a number for a salt: 0 for none, else 62 bits that only the salt's holder can produce."""
    if cache_salt is None:
        return 0
    return 1 + (int.from_bytes(blake2b(cache_salt.encode(), digest_size=8).digest(), "little") >> 2)


_HASHED = 3  # tokens: shorter matches are too common to say anything
_HEAD_BITS = 17
_MOST_CANDIDATES = 16  # occurrences looked at, latest first
_BETWEEN = -1  # separates outputs, and equals no token


class OutputPool:
    """Finished outputs in bounded memory, searched by their last three tokens; only those of the same owner are found.

    An owner is a cache salt. A ring of tokens with hash chains, as compressors find matches: `_heads` has the last
    position of each hash, `_links` the previous position with the same hash. The oldest tokens are overwritten, which
    also ends their chains.
    """

    def __init__(self, capacity: int, max_texts: int) -> None:
        """capacity: tokens held, 20 bytes each.   max_texts: texts held; the oldest go first."""
        self._capacity = capacity
        self._max_texts = max_texts
        self._tokens = np.full(capacity, _BETWEEN, np.int32)
        self._owners = np.zeros(capacity, np.int64)
        self._links = np.full(capacity, -1, np.int64)
        self._heads = np.full(1 << _HEAD_BITS, -1, np.int64)
        self._begins: deque[int] = deque()
        self._end = 0  # positions are never used again; position p is at p % capacity
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
