"""merges_of: the merges of a SentencePiece BPE vocabulary, which states only the rank of each token.

A token is the result of every pair of tokens that spell it. Vocabularies have hundreds of thousands of tokens with
millions of places to cut them, so all are looked up together, by hashes of their parts.
"""

import numpy as np

from pagoda.base.errors import ConfigError

_BASE = 0x9E3779B97F4A7C15  # of the polynomial, modulo 2 ** 64; odd, so it has an inverse
_SLOT_BITS = 22
_MOST_TOKENS = 1 << 21  # three numbers of a token fit into 63 bits


def merges_of(tokens: list[str], ranks: np.ndarray) -> list[tuple[str, str]]:
    """Return all pairs of tokens that merge into a token, best result first; ties by the ids of the parts.

    ranks: of each token as a result, largest first; ties by id: float [vocab_size]. Of tokens that are alike, the last
    is the part. Raises ConfigError for more than two million tokens.
    """
    count = len(tokens)
    if count > _MOST_TOKENS:
        raise ConfigError(f"a vocabulary of {count} tokens is not supported; at most {_MOST_TOKENS}")
    lengths = np.fromiter(map(len, tokens), np.int64, count)
    ends = lengths.cumsum()
    starts = ends - lengths
    hashes = _Hashes("".join(tokens))
    known = _Ids(hashes.between(starts, ends))
    token = np.repeat(np.arange(count), lengths)
    cuts = np.arange(len(token))
    inner = cuts > starts[token]
    cuts, token = cuts[inner], token[inner]
    left = known.find(hashes.between(starts[token], cuts))
    is_token = left >= 0
    cuts, token, left = cuts[is_token], token[is_token], left[is_token]
    right = known.find(hashes.between(cuts, ends[token]))
    is_token = right >= 0
    token, left, right = token[is_token], left[is_token], right[is_token]
    place = np.empty(count, np.int64)
    place[np.argsort(-ranks, kind="stable")] = np.arange(count)
    order = np.argsort(((place[token] << 21 | left) << 21) | right)
    texts = np.array(tokens, object)
    return list(zip(texts[left[order]].tolist(), texts[right[order]].tolist(), strict=True))


class _Hashes:
    """Hashes of all parts of a text: uint64, equal for equal parts, wherever they are."""

    def __init__(self, text: str) -> None:
        letters = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint64) + np.uint64(1)
        letters *= np.uint64(0xBF58476D1CE4E5B9)
        letters ^= letters >> np.uint64(29)
        letters *= np.uint64(0x94D049BB133111EB)
        letters ^= letters >> np.uint64(32)
        letters *= _powers(_BASE, len(letters))
        self._sums = np.concatenate([np.zeros(1, np.uint64), letters.cumsum()])
        self._inverse = _powers(pow(_BASE, -1, 1 << 64), len(letters) + 1)

    def between(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """uint64, one for each part."""
        found = (self._sums[end] - self._sums[begin]) * self._inverse[begin]
        return found ^ (found >> np.uint64(31))


def _powers(base: int, count: int) -> np.ndarray:
    """base ** 0, base ** 1, ..., modulo 2 ** 64."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.multiply.accumulate(factors)


class _Ids:
    """Finds the ids of hashes, in tables of which each has what did not fit into those before it."""

    def __init__(self, hashes: np.ndarray) -> None:
        self._hashes, self._tables = hashes, list[np.ndarray]()
        ids = np.arange(len(hashes))
        while len(ids):
            table = np.full(1 << _SLOT_BITS, -1, np.int32)
            slots = self._slots(hashes[ids], len(self._tables))
            table[slots] = ids  # of several, the last one
            self._tables.append(table)
            ids = ids[hashes[table[slots]] != hashes[ids]]

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """int64, -1 for a hash that is not known."""
        found = np.full(len(hashes), -1, np.int64)
        missing = np.arange(len(hashes))
        for number, table in enumerate(self._tables):
            ids = table[self._slots(hashes[missing], number)]
            hit = (ids >= 0) & (self._hashes[ids] == hashes[missing])
            found[missing[hit]] = ids[hit]
            missing = missing[~hit & (ids >= 0)]
        return found

    def _slots(self, hashes: np.ndarray, table: int) -> np.ndarray:
        shifted = hashes >> np.uint64(7 * table % (64 - _SLOT_BITS))
        return (shifted & np.uint64((1 << _SLOT_BITS) - 1)).astype(np.int64)
