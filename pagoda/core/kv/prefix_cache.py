"""PrefixCache: hashes of full blocks, the map from hash to block, and which blocks of rows are in it.

A block's hash is the SHA-256 of everything before its end: the seed, the adapter, the salt, every token, the media
items that the blocks touch, and the bytes of prompt embeddings. It is taken from one running hasher, so that a block
costs one short update and no parent is hashed again; equal hashes mean equal prefixes, which is what a chain of parent
hashes is for.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import TypeAlias

import numpy as np

from pagoda.base.errors import InvariantBroken
from pagoda.core.events import EventStream, Removed, Stored
from pagoda.core.kv.block_pool import NO_BLOCKS, BlockPools
from pagoda.core.kv.sizing import KVGroup, KVSizing
from pagoda.core.request import LoraRef, MediaItem, PromptEmbeds, Request, Sequence
from pagoda.core.request_table import RequestTable

_TOKEN_BYTES = 4
_HASHED_AT_ONCE = 16
"""Blocks of a prompt: one alone costs twice as much."""

KnownBlock: TypeAlias = tuple[int, bytes]
"""The KV group and the hash of a block. A block that is filled again is known by another object."""


def _sized(*parts: bytes) -> bytes:
    """Join the parts, each after its length, so that different lists never give equal bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


@lru_cache(maxsize=256)
def make_root(seed: bytes, lora: LoraRef | None, cache_salt: str | None) -> bytes:
    """Return what every hash of a request starts from. Requests share blocks only where these agree."""
    adapter = b""
    if lora is not None:
        adapter = _sized(b"lora", *(word.encode() for word in lora.identity))
    salt = _sized(b"salt", cache_salt.encode()) if cache_salt is not None else b""
    return hashlib.sha256(_sized(seed, adapter, salt)).digest()


class HashChain:
    """Hashes of one sequence's full blocks, extended as its tokens become known.

    hashes: one of 32 bytes per full block, in order.
    """

    __slots__ = ("_block_size", "_embeds", "_embeds_end", "_hasher", "_media", "hashes")

    def __init__(
        self,
        root: bytes,
        block_size: int,
        media: tuple[MediaItem, ...] = (),
        embeds: PromptEmbeds | None = None,
    ) -> None:
        self.hashes: list[bytes] = []
        self._hasher = hashlib.sha256(root)
        self._block_size = block_size
        self._media = media
        self._embeds = embeds
        self._embeds_end = 0 if embeds is None else embeds.end

    def extend(self, token_ids: np.ndarray, num_tokens: int) -> None:
        """Hash every full block among the first `num_tokens` of `token_ids` (int32, the whole sequence)."""
        size, first = self._block_size, len(self.hashes)
        data, width = token_ids[first * size : num_tokens // size * size].tobytes(), size * _TOKEN_BYTES
        has_inputs = bool(self._media) or first * size < self._embeds_end
        for at in range(0, len(data), width):
            if has_inputs:
                self._add_inputs((first + at // width) * size)
            self._hasher.update(data[at : at + width])
            self.hashes.append(self._hasher.digest())

    def _add_inputs(self, begin: int) -> None:
        """Start a new hasher for the block that begins at `begin`, if it has other inputs than tokens.

        If an item touches it, the hasher is keyed by what came before and by the items with their offsets from the
        block's start; with embeddings, by what came before, and the places in the block and the bytes of the
        embeddings. Blocks before the first item thus keep the hashes they have without it.
        """
        end = begin + self._block_size
        items = [
            _sized(item.content_hash.encode(), str(item.offset - begin).encode())
            for item in self._media
            if item.overlaps(begin, end)
        ]
        if items:
            self._hasher = hashlib.sha256(b"media" + _sized(self._hasher.digest(), *items))
        if self._embeds is not None and (own := self._embeds.within(begin, end)):
            given = own.positions.tobytes(), own.values.tobytes()
            self._hasher = hashlib.sha256(b"embeds" + _sized(self._hasher.digest(), *given))

    def fork(self) -> "HashChain":
        """Return a copy that can be extended on its own."""
        twin = copy(self)
        twin.hashes, twin._hasher = list(self.hashes), self._hasher.copy()
        return twin


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """Tokens of a sequence that the prefix cache has.   blocks: theirs, int32 per KV group; 0: out of the window.

    parts_at: tokens that groups without windows have, if that is more: where a state would have been of use; else 0.
    """

    num_tokens: int
    blocks: tuple[np.ndarray, ...]
    parts_at: int = 0


def hashes_of_prompt(request: Request, seed: int, block_size: int) -> Iterator[bytes]:
    """Yield the hashes by which caches with this seed find the prompt's blocks, of those that a lookup asks for.

    Few more are computed than are asked for: a prompt whose beginning is nowhere is not hashed to its end.
    """
    root = make_root(_seed_bytes(seed), request.lora, request.cache_salt)
    chain = HashChain(root, block_size, request.media, request.prompt_embeds)
    count = (request.num_prompt_tokens - 1) // block_size
    for first in range(0, count, _HASHED_AT_ONCE):
        chain.extend(request.prompt_token_ids, min(first + _HASHED_AT_ONCE, count) * block_size)
        yield from chain.hashes[first:]


def _seed_bytes(seed: int) -> bytes:
    return seed.to_bytes(16, "little", signed=True)


class PrefixCache:
    """What device blocks hold: hash -> block per KV group. BlockPools know which of them are free.

    Equal blocks may exist several times; the one inserted first is found, and when it is removed, the next.
    Hashing is lazy: tokens of a row are hashed at the next lookup, or when a block is freed.

    entries: the block tables' entries per KV group, read only here.
    num_cached: int32 [rows], leading hashed blocks of each row that were inserted into the cache.
    nothing: what a request has that is not looked up.
    enabled: whether prefix caching is on (never for encoder-decoder models: their KV depends on the encoder's input).
    seed: of the hashes; None draws a secret one.
    note_filled: told of each block that a request fills, when the step that does is planned, or that was loaded for
        it; None if there is no tier.
    """

    note_filled: Callable[[Request, int, KnownBlock], None] | None = None

    def __init__(
        self,
        table: RequestTable,
        entries: list[np.ndarray],
        pools: BlockPools,
        sizing: KVSizing,
        events: EventStream,
        *,
        enabled: bool,
        seed: int | None,
    ) -> None:
        self.enabled = enabled
        self.seed = _seed_bytes(seed) if seed is not None else secrets.token_bytes(16)
        self.num_cached = np.zeros(table.max_rows, np.int32)
        self.nothing = CachedPrefix(0, (NO_BLOCKS,) * len(sizing.groups))
        self._table = table
        self._entries = entries
        self._pools = pools
        self._sizing = sizing
        self._events = events
        self._groups = tuple(group for group in sizing.groups if group.grows)
        self._windows = tuple(group for group in self._groups if group.is_window)
        self._blocks: list[dict[bytes, int]] = [{} for _ in sizing.groups]
        self._twins: list[dict[bytes, list[int]]] = [{} for _ in sizing.groups]
        self._hash_of: dict[int, KnownBlock] = {}
        self._chains: dict[Sequence, HashChain] = {}

    # Hashes and blocks

    def insert(self, group: int, hashes: list[bytes], blocks: list[int]) -> list[int]:
        """`blocks[i]` now holds what `hashes[i]` says. Null and known blocks are skipped. Return the others."""
        table, hash_of = self._blocks[group], self._hash_of
        inserted: list[int] = []
        for block_hash, block in zip(hashes, blocks, strict=True):
            if block == 0 or block in hash_of:
                continue
            if table.setdefault(block_hash, block) != block:
                self._twins[group].setdefault(block_hash, []).append(block)
            hash_of[block] = (group, block_hash)
            inserted.append(block)
        if inserted:
            self._pools.note_content(inserted)
        return inserted

    def insert_loaded(
        self, sequence: Sequence, first_block: int, hashes: list[bytes], blocks: list[int], parent: bytes | None
    ) -> None:
        """`insert` what was loaded for a sequence without a row, of the first KV group: its blocks from a number on.

        parent: the hash before the first, if there is one.
        """
        spec = sequence.request.spec
        if self._events.cache_folds:
            self._write_stored(spec, sequence.token_ids, self._sizing.groups[0], first_block, hashes, blocks, parent)
        self._insert(spec, 0, hashes, blocks)

    def _insert(self, request: Request, group: int, hashes: list[bytes], blocks: list[int]) -> None:
        """`insert` what is there for a request, and tell of it."""
        inserted = self.insert(group, hashes, blocks)
        if self.note_filled is not None:
            for block in inserted:
                self.note_filled(request, block, self._hash_of[block])

    def holds(self, block: int, known: KnownBlock) -> bool:
        """Whether the block still holds what it held when it became known as this object. (May be asked by threads.)"""
        return self._hash_of.get(block) is known

    def _write_stored(
        self,
        request: Request,
        token_ids: np.ndarray,
        group: KVGroup,
        first_block: int,
        hashes: list[bytes],
        blocks: list[int],
        parent: bytes | None,
    ) -> None:
        """Write which of a sequence's blocks, from `first_block` on, are new to the cache. They are not in it yet."""
        table = self._blocks[group.index]
        is_new = [block != 0 and one not in table for one, block in zip(hashes, blocks, strict=True)]
        for first, end in np.diff([False, *is_new, False]).nonzero()[0].reshape(-1, 2).tolist():  # runs of them
            begin, size = first_block + first, group.block_size
            before = hashes[first - 1] if first else parent
            tokens = token_ids[begin * size : (first_block + end) * size].tobytes()
            about = tuple(hashes[first:end]), before, request, begin * size, tokens
            self._events.write_cache(Stored(*self._events.now(), group.index, *about))

    def _write_removed(self, hashes: Iterable[KnownBlock]) -> None:
        """Write which hashes, each with its group, no block has any more."""
        by_group: dict[int, list[bytes]] = {}
        for group, block_hash in hashes:
            by_group.setdefault(group, []).append(block_hash)
        for group, removed in by_group.items():
            self._events.write_cache(Removed(*self._events.now(), group, tuple(removed)))

    def remove(self, blocks: Iterable[int]) -> None:
        """These blocks are about to hold something else."""
        removed: list[KnownBlock] = []
        for block in blocks:
            known = self._hash_of.pop(block, None)
            if known is None:
                continue
            group, block_hash = known
            table, twins = self._blocks[group], self._twins[group]
            others = twins.get(block_hash)
            if table[block_hash] == block:
                if others:
                    table[block_hash] = others.pop(0)
                else:
                    del table[block_hash]
                    removed.append(known)
            elif others:
                others.remove(block)
            if others is not None and not others:
                del twins[block_hash]
        if removed and self._events.cache_folds:
            self._write_removed(removed)

    def blocks_with(self, group: int, hashes: Iterable[bytes]) -> list[int]:
        """Return every block that holds what one of `hashes` says."""
        table, twins = self._blocks[group], self._twins[group]
        return [block for one in hashes if one in table for block in (table[one], *twins.get(one, ()))]

    def longest_cached_prefix(self, group: int, hashes: Iterable[bytes]) -> list[int]:
        """Return the cached blocks of `hashes` up to the first miss. None of them is 0, the null block."""
        return list(takewhile(bool, map(self._blocks[group].get, hashes)))  # type: ignore[arg-type]

    def last_cached_run(self, group: int, hashes: list[bytes], length: int) -> list[int]:
        """Return what a window group can use: blocks up to the end of the last run of `length` hits, 0 before the run.

        Searched from the right. If no run is that long, the run at the very front counts, whatever its length.
        """
        table = self._blocks[group]
        found = [0] * len(hashes)
        run = 0
        for at in range(len(hashes) - 1, -1, -1):
            block = table.get(hashes[at])
            if block is None:
                run = 0
                continue
            found[at] = block
            run += 1
            if run >= length:
                return found[: at + run]
        return found[:run]

    # Rows and sequences

    def start_row(self, row: int, num_tokens: int) -> None:
        """The row begins with blocks of the cache for `num_tokens`; what it had is another sequence's."""
        self.num_cached[row] = num_tokens // self._sizing.block_size

    def share(self, source: int, row: int, num_tokens: int) -> None:
        """`row` references the blocks of the first `num_tokens` tokens of `source`, and their hashes if it has none."""
        sequence, chain = self._table.owner(row), self._chains.get(self._table.owner(source))
        num_full = num_tokens // self._sizing.block_size
        if chain is not None and sequence not in self._chains and len(chain.hashes) <= num_full:
            self._chains[sequence] = chain.fork()
        self.num_cached[row] = min(int(self.num_cached[source]), num_full)

    def hash_tokens(self, sequence: Sequence) -> HashChain:
        """Hash the full blocks of a sequence without a row."""
        chain = self._chains.get(sequence)
        if chain is None:
            spec = sequence.request.spec
            root = make_root(self.seed, spec.lora, spec.cache_salt)
            chain = self._chains[sequence] = HashChain(root, self._sizing.block_size, spec.media, spec.prompt_embeds)
        chain.extend(sequence.token_ids, len(sequence.token_ids))
        return chain

    def remove_hashes(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._chains.pop(sequence, None)

    def longest_prefix(self, sequence: Sequence) -> CachedPrefix:
        """Return the longest prefix of the sequence's tokens, without the last one, that all groups have cached."""
        if not self.enabled:
            return self.nothing
        hashes = self.hash_tokens(sequence).hashes[: (len(sequence.token_ids) - 1) // self._sizing.block_size]
        found: list[list[int]] = [[] for _ in self._sizing.groups]
        for group in self._groups:
            if not group.is_window:
                found[group.index] = self.longest_cached_prefix(group.index, hashes)
                hashes = hashes[: len(found[group.index])]
        num_matched, before = len(hashes), -1
        while self._windows and before != len(hashes):  # a window may shorten what another one agreed to
            before = len(hashes)
            for group in self._windows:
                found[group.index] = self.last_cached_run(group.index, hashes, group.num_hit_blocks)
                hashes = hashes[: len(found[group.index])]
        size, blocks = self._sizing.block_size, tuple(np.array(blocks[: len(hashes)], np.int32) for blocks in found)
        return CachedPrefix(len(hashes) * size, blocks, num_matched * size if num_matched > len(hashes) else 0)

    def cache_blocks(self, row: int, num_computed: int) -> None:
        """Insert the row's blocks that are full of known tokens once `num_computed` are computed."""
        table = self._table
        sequence = table.sequence_of[row]
        chain = self._chains.get(sequence) if sequence is not None else None
        if sequence is None or chain is None:
            return
        filled = min(num_computed, int(table.num_tokens[row]))
        first, last = int(self.num_cached[row]), filled // self._sizing.block_size
        if last <= first:
            return
        chain.extend(table.token_ids[row], filled)
        for group in self._groups:
            blocks, hashes = self._entries[group.index][row, first:last].tolist(), chain.hashes[first:last]
            if self._events.cache_folds:
                parent = chain.hashes[first - 1] if first else None
                self._write_stored(sequence.request.spec, table.token_ids[row], group, first, hashes, blocks, parent)
            self._insert(sequence.request.spec, group.index, hashes, blocks)
        self.num_cached[row] = last

    def cache_filled(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """`cache_blocks` for all of `rows` that have new full blocks. ends: computed tokens, int32 [num_rows]."""
        if not self.enabled:
            return
        filled = np.minimum(ends, self._table.num_tokens[rows]) // self._sizing.block_size
        for i in (filled > self.num_cached[rows]).nonzero()[0].tolist():
            self.cache_blocks(int(rows[i]), int(ends[i]))

    def uncache_uncomputed(self, row: int) -> None:
        """The row was taken out of the step: blocks cached for it hold nothing."""
        first = int(self._table.num_computed[row]) // self._sizing.block_size
        last = int(self.num_cached[row])
        for group in self._groups:
            self.uncache_blocks(self._entries[group.index][row, first:last])
        self.num_cached[row] = min(first, last)

    def uncache(self, sequence: Sequence, tables: tuple[np.ndarray, ...] = (), *, after: int = 0) -> None:
        """The sequence's KV cannot be trusted: remove the blocks of its row, and all that its hashes find where its
        tables do not tell: in every group without a row, with one in those whose window has left the first blocks.

        tables: of its row, if it has one, per KV group.   after: without a row, not what so many tokens fill.
        """
        if not self.enabled:
            return
        row = sequence.row
        if row >= 0:
            chain = self._chains.get(sequence)
            hashes = [] if chain is None else chain.hashes[: int(self.num_cached[row])]
            self.num_cached[row] = max(map(len, tables))
        else:
            hashes = self.hash_tokens(sequence).hashes[after // self._sizing.block_size :]
        for group in self._groups:
            if row >= 0:
                self.uncache_blocks(tables[group.index])
            if row < 0 or group.is_window:
                self.uncache_blocks(np.array(self.blocks_with(group.index, hashes), np.int32))
        if sequence.is_finished:
            self.remove_hashes(sequence)

    def uncache_blocks(self, blocks: np.ndarray) -> None:
        """Remove `blocks`, of any group, from the cache. 0 is the null block."""
        blocks = blocks[blocks != 0]
        self.remove(blocks.tolist())
        self._pools.drop_content(blocks)

    def reset(self) -> bool:
        """Remove all content; False, and nothing done, while any block is in use."""
        if self._pools.num_free != self._pools.num_blocks:
            return False
        if self._events.cache_folds:
            self._write_removed((group, one) for group, table in enumerate(self._blocks) for one in table)
        for table in (*self._blocks, *self._twins):
            table.clear()
        self._hash_of.clear()
        self._pools.drop_content(np.flatnonzero(self._pools.has_content))
        return True

    def check(self) -> None:
        """Check that every known block is found by its hash, or is the twin of one that is, and that only unfinished
        sequences have hashes. Raises InvariantBroken."""
        for block, (group, block_hash) in self._hash_of.items():
            if self._blocks[group].get(block_hash) != block and block not in self._twins[group].get(block_hash, ()):
                raise InvariantBroken(f"block {block} is not found by its hash")
        for sequence in self._chains:
            if sequence.is_finished:
                raise InvariantBroken(f"{sequence.request.spec.request_id}: a finished sequence still has block hashes")
