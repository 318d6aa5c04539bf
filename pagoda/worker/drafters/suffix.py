"""SuffixDrafter: continue the longest suffix that occurred earlier, in the row's own text or in finished outputs.

Oliaro et al., "SuffixDecoding", 2024. The matches are those that suffix trees over the same texts would give (of
finished outputs, the last 16 occurrences); vector instructions find them without a tree, with no memory of
their own for running requests and 20 bytes per token for finished ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.drafters.drafter import NO_DRAFT, Draft, grade_of_match
from pagoda.worker.drafters.matching import continue_from, longest_suffix_matches
from pagoda.worker.drafters.output_pool import OutputPool
from pagoda.worker.table_mirror import TableMirror

_POOL_TOKENS = 1 << 18
_MOST_VOTES = 8  # occurrences whose continuations are counted, latest first


@dataclass(frozen=True, slots=True)
class SuffixSettings:
    """max_depth: longest match looked for, in tokens.   max_cached_requests: finished outputs kept, 0 for none.

    max_spec_factor: most draft tokens per token of the match.   min_token_prob: stop the draft where the
    share of continuations that agree with it falls below this.
    """

    max_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


class SuffixDrafter:
    """Searches the row's own text and outputs that finished earlier with the same cache salt."""

    runs_model = False

    def __init__(self, settings: SuffixSettings, pool_tokens: int = _POOL_TOKENS) -> None:
        self._settings = settings
        self._pool = OutputPool(pool_tokens, settings.max_cached_requests)
        self._owners: dict[int, int] = {}  # by row
        self._request_ids: dict[int, str] = {}  # by row

    def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
        """Keep the outputs of released rows; note the cache salts of new ones."""
        for row in output.released.tolist():
            owner = self._owners.pop(row, None)
            if owner is not None and self._request_ids.pop(row) not in output.preempted_ids:
                begin = max(0, int(table.num_prompt[row]) - self._settings.max_depth)
                self._pool.add(table.token_ids[row, begin : table.num_tokens[row]], owner)
        for init in output.admitted:
            if init.sampling is not None:
                self._owners[init.row] = _owner(init.cache_salt)
                self._request_ids[init.row] = init.request_id
        for fork in output.forks:
            self._owners[fork.dst] = self._owners[fork.src]
            self._request_ids[fork.dst] = self._request_ids[fork.src]

    def propose(self, table: TableMirror, rows: np.ndarray, most: np.ndarray) -> Sequence[Draft]:
        return [self._draft(table, row, count) for row, count in zip(rows.tolist(), most.tolist(), strict=True)]

    def _draft(self, table: TableMirror, row: int, most: int) -> Draft:
        depth = self._settings.max_depth
        tokens = table.token_ids[row, : table.num_tokens[row]]
        ends, length = longest_suffix_matches(tokens, depth)
        pooled, pooled_length = self._pool.longest_matches(tokens, self._owners.get(row, 0), depth)
        count = min(most, int(self._settings.max_spec_factor * max(length, pooled_length)))
        if count < 1:
            return NO_DRAFT
        if pooled_length > length:
            following = [self._pool.following(end, count) for end in pooled[:_MOST_VOTES].tolist()]
        elif len(ends) == 1:
            return Draft(continue_from(tokens, int(ends[0]), count), grade_of_match(length))
        else:
            latest = ends[-_MOST_VOTES:][::-1]
            following = [continue_from(tokens, end, count).tolist() for end in latest.tolist()]
        voted = _most_common_path(following, count, self._settings.min_token_prob)
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
