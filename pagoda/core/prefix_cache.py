"""Prefix cache: the names of full blocks (chained hashes) and the map from name to block.

A block's name is the SHA-256 of everything before its end: the seed, the adapter, the salt, every token, and the media
items that the blocks touch. It is taken from one running hasher, so that a block costs one short update and no parent
has to be hashed again; equal names mean equal prefixes, which is what a chain of parent hashes is for.
"""

import hashlib
import secrets
from collections.abc import Callable, Sequence

import numpy as np

from pagoda.core.request import LoraRef, MediaItem

_TOKEN_BYTES = 4


def _sized(*parts: bytes) -> bytes:
    """The parts, each behind its length, so that different lists never give equal bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def make_root(seed: bytes, lora: LoraRef | None, cache_salt: str | None) -> bytes:
    """What every name of a request starts from. Requests share blocks only where these agree."""
    adapter = _sized(b"lora", lora.name.encode(), lora.path.encode()) if lora else b""
    salt = _sized(b"salt", cache_salt.encode()) if cache_salt is not None else b""
    return hashlib.sha256(_sized(seed, adapter, salt)).digest()


class HashChain:
    """The names of one sequence's full blocks, extended as its tokens become known.

    names: one 32-byte name a full block, in order.
    """

    __slots__ = ("_block_bytes", "_block_size", "_hasher", "_media", "names")

    def __init__(self, root: bytes, block_size: int, media: tuple[MediaItem, ...] = ()) -> None:
        self.names: list[bytes] = []
        self._hasher = hashlib.sha256(root)
        self._block_size = block_size
        self._block_bytes = block_size * _TOKEN_BYTES
        self._media = media

    def extend(self, token_ids: np.ndarray, num_tokens: int) -> None:
        """Name every full block among the first `num_tokens` of `token_ids` (int32, the whole sequence)."""
        first = len(self.names)
        last = num_tokens // self._block_size
        if last <= first:
            return
        if self._media:
            self._extend_with_media(token_ids, first, last)
            return
        data = token_ids[first * self._block_size : last * self._block_size].tobytes()
        width = self._block_bytes
        update, digest, append = self._hasher.update, self._hasher.digest, self.names.append
        for at in range(0, len(data), width):
            update(data[at : at + width])
            append(digest())

    def _extend_with_media(self, token_ids: np.ndarray, first: int, last: int) -> None:
        """Blocks that an item touches start a new hasher, keyed by what came before and by the items with their
        offsets from the block's start. Blocks before the first item thus keep the names they have without it."""
        size = self._block_size
        for block in range(first, last):
            tokens = token_ids[block * size : (block + 1) * size].tobytes()
            items = [
                _sized(item.content_hash.encode(), str(item.offset - block * size).encode())
                for item in self._media
                if item.offset < (block + 1) * size and item.offset + item.length > block * size
            ]
            if items:
                self._hasher = hashlib.sha256(b"media" + _sized(self._hasher.digest(), *items))
            self._hasher.update(tokens)
            self.names.append(self._hasher.digest())

    def fork(self) -> "HashChain":
        """A chain that goes its own way from here."""
        twin = HashChain.__new__(HashChain)
        twin.names = list(self.names)
        twin._hasher = self._hasher.copy()
        twin._block_size = self._block_size
        twin._block_bytes = self._block_bytes
        twin._media = self._media
        return twin


class PrefixCache:
    """Name -> block, per KV group. Blocks come and go in BlockPool; this only knows what they hold.

    Equal blocks may exist several times; the one registered first is found, and when it goes, the next.
    """

    def __init__(self, num_groups: int, seed: int | None, on_content: Callable[[Sequence[int]], None]) -> None:
        self.seed = seed.to_bytes(16, "little", signed=True) if seed is not None else secrets.token_bytes(16)
        self._blocks: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._twins: list[dict[bytes, list[int]]] = [{} for _ in range(num_groups)]
        self._name_of: dict[int, tuple[int, bytes]] = {}
        self._on_content = on_content

    def __len__(self) -> int:
        return len(self._name_of)

    def register(self, group: int, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """`blocks[i]` now holds what `names[i]` says. Null blocks (0) and blocks that have a name are passed over."""
        table, name_of = self._blocks[group], self._name_of
        named: list[int] = []
        for name, block in zip(names, blocks, strict=True):
            if block == 0 or block in name_of:
                continue
            if table.setdefault(name, block) != block:
                self._twins[group].setdefault(name, []).append(block)
            name_of[block] = (group, name)
            named.append(block)
        if named:
            self._on_content(named)

    def forget(self, blocks: Sequence[int]) -> None:
        """These blocks are about to hold something else."""
        for block in blocks:
            known = self._name_of.pop(block, None)
            if known is None:
                continue
            group, name = known
            table, twins = self._blocks[group], self._twins[group]
            others = twins.get(name)
            if table[name] == block:
                if others:
                    table[name] = others.pop(0)
                else:
                    del table[name]
            elif others:
                others.remove(block)
            if others is not None and not others:
                del twins[name]

    def clear(self) -> None:
        for table in (*self._blocks, *self._twins):
            table.clear()
        self._name_of.clear()

    def first_misses(self, group: int, names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known run of `names` from the front."""
        table = self._blocks[group]
        found: list[int] = []
        for name in names:
            block = table.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def last_run(self, group: int, names: Sequence[bytes], length: int) -> list[int]:
        """What a window group can use: blocks up to the end of the last run of `length` known blocks, 0 before the run.

        Searched from the right. Where no run is that long, the run at the very front counts, whatever its length.
        """
        table = self._blocks[group]
        found = [0] * len(names)
        run = 0
        for at in range(len(names) - 1, -1, -1):
            block = table.get(names[at])
            if block is None:
                run = 0
                continue
            found[at] = block
            run += 1
            if run >= length:
                return found[: at + run]
        return found[:run]

    def check(self) -> None:
        """Every named block is found under its name or stands behind a twin."""
        for block, (group, name) in self._name_of.items():
            assert self._blocks[group][name] == block or block in self._twins[group].get(name, ())
