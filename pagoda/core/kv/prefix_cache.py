"""Prefix cache: hashes of full blocks, and the map from hash to block.

A block's hash is the SHA-256 of everything before its end: the seed, the adapter, the salt, every token, the media
items that the blocks touch, and the bytes of prompt embeddings. It is taken from one running hasher, so that a block
costs one short update and no parent is hashed again; equal hashes mean equal prefixes, which is what a chain of parent
hashes is for.
"""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from copy import copy

import numpy as np

from pagoda.core.request import LoraRef, MediaItem

_TOKEN_BYTES = 4


def _sized(*parts: bytes) -> bytes:
    """Join the parts, each after its length, so that different lists never give equal bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


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

    __slots__ = ("_block_bytes", "_block_size", "_embeds", "_hasher", "_media", "_num_embeds", "hashes")

    def __init__(
        self,
        root: bytes,
        block_size: int,
        media: tuple[MediaItem, ...] = (),
        embeds: np.ndarray | None = None,
    ) -> None:
        """embeds: of the first positions, as Request.prompt_embeds."""
        self.hashes: list[bytes] = []
        self._hasher = hashlib.sha256(root)
        self._block_size = block_size
        self._block_bytes = block_size * _TOKEN_BYTES
        self._media = media
        self._embeds = embeds
        self._num_embeds = 0 if embeds is None else len(embeds)

    def extend(self, token_ids: np.ndarray, num_tokens: int) -> None:
        """Hash every full block among the first `num_tokens` of `token_ids` (int32, the whole sequence)."""
        first = len(self.hashes)
        last = num_tokens // self._block_size
        if last <= first:
            return
        if self._media or first * self._block_size < self._num_embeds:
            self._extend_with_inputs(token_ids, first, last)
            return
        data = token_ids[first * self._block_size : last * self._block_size].tobytes()
        width = self._block_bytes
        update, digest, append = self._hasher.update, self._hasher.digest, self.hashes.append
        for at in range(0, len(data), width):
            update(data[at : at + width])
            append(digest())

    def _extend_with_inputs(self, token_ids: np.ndarray, first: int, last: int) -> None:
        """Blocks that an item touches start a new hasher, keyed by what came before and by the items with their
        offsets from the block's start; blocks with embeddings, by what came before and the bytes of the embeddings,
        which are in place of tokens. Blocks before the first item thus keep the hashes they have without it."""
        size = self._block_size
        for block in range(first, last):
            begin, end = block * size, (block + 1) * size
            items = [
                _sized(item.content_hash.encode(), str(item.offset - begin).encode())
                for item in self._media
                if item.offset < end and item.offset + item.length > begin
            ]
            if items:
                self._hasher = hashlib.sha256(b"media" + _sized(self._hasher.digest(), *items))
            num_embeds = min(max(self._num_embeds - begin, 0), size)
            if num_embeds and self._embeds is not None:
                given = self._embeds[begin : begin + num_embeds].tobytes()
                self._hasher = hashlib.sha256(b"embeds" + _sized(self._hasher.digest(), given))
            self._hasher.update(token_ids[begin + num_embeds : end].tobytes())
            self.hashes.append(self._hasher.digest())

    def fork(self) -> "HashChain":
        """Return a copy that can be extended on its own."""
        twin = copy(self)
        twin.hashes, twin._hasher = list(self.hashes), self._hasher.copy()
        return twin


class PrefixCache:
    """Hash -> block, per KV group. BlockPool knows which blocks are free; this knows only what they hold.

    Equal blocks may exist several times; the one inserted first is found, and when it is removed, the next.
    """

    def __init__(self, num_groups: int, seed: int | None, on_content: Callable[[Sequence[int]], None]) -> None:
        self.seed = seed.to_bytes(16, "little", signed=True) if seed is not None else secrets.token_bytes(16)
        self._blocks: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._twins: list[dict[bytes, list[int]]] = [{} for _ in range(num_groups)]
        self._hash_of: dict[int, tuple[int, bytes]] = {}
        self._on_content = on_content

    def __len__(self) -> int:
        return len(self._hash_of)

    def insert(self, group: int, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """`blocks[i]` now holds what `hashes[i]` says. Null blocks (0) and known blocks are skipped."""
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
            self._on_content(inserted)

    def remove(self, blocks: Sequence[int]) -> None:
        """These blocks are about to hold something else."""
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
            elif others:
                others.remove(block)
            if others is not None and not others:
                del twins[block_hash]

    def blocks_with(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        """Return every block that holds what one of `hashes` says."""
        table, twins = self._blocks[group], self._twins[group]
        return [block for one in hashes if one in table for block in (table[one], *twins.get(one, ()))]

    def clear(self) -> None:
        for table in (*self._blocks, *self._twins):
            table.clear()
        self._hash_of.clear()

    def longest_cached_prefix(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        """Return the cached blocks of `hashes` up to the first miss."""
        table = self._blocks[group]
        found: list[int] = []
        for block_hash in hashes:
            block = table.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def last_cached_run(self, group: int, hashes: Sequence[bytes], length: int) -> list[int]:
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

    def check(self) -> None:
        """Check that every known block is found by its hash, or is the twin of one that is."""
        for block, (group, block_hash) in self._hash_of.items():
            assert self._blocks[group][block_hash] == block or block in self._twins[group].get(block_hash, ())
