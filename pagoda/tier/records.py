"""Records: a folder of blocks, a file for each.

    FOLDER/seed                        of the hashes, as a hexadecimal number; mode 0600
    FOLDER/<root>/<2 digits>/<hash>    a record: SHA-256 of root, hash and content; then the content
    FOLDER/<root>/writing-<pid>        a record that is being written

root: names everything that the content depends on besides what the hash covers: the model's files, data types, kernels,
layout. A record is renamed to its place when it is complete, and never changed. Its time of modification says when it
was last used; a time to come, until when it is to be kept. Several engines may use a folder at once.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.base.kv_tier import read_kv_tier

logger = logging.getLogger("pagoda")

_CHECKSUM_BYTES = 32
_SEED_BYTES = 15
_SHARDS = tuple(f"{number:02x}" for number in range(256))
_LOG_EVERY_S = 60.0
PAUSE_S = 30.0
"""After a record could not be written, none is written for so long."""


def read_seed(folder: Path) -> int:
    """Return the seed of the hashes of a folder, which is drawn when the folder is first used.

    Raises ConfigError if the folder cannot be used, or others can read the seed.
    """
    path = folder / "seed"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            own = folder / f"seed-{os.getpid()}-{threading.get_ident()}"
            with open(own, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(secrets.token_hex(_SEED_BYTES))
            with contextlib.suppress(FileExistsError):  # another engine was faster
                os.link(own, path)
            own.unlink()
        mode, digits = path.stat().st_mode, path.read_text()
    except OSError as error:
        raise ConfigError(f"kv_tier: the folder {folder} cannot be used: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"kv_tier: {path} can be read by others, who could then guess prompts: chmod 600 it")
    try:
        return int(digits, 16)
    except ValueError:
        raise ConfigError(f"kv_tier: {path} is not a seed; remove it, and the records next to it") from None


def tiers_seed(config: EngineConfig) -> int | None:
    """Return the seed of the prefix-cache hashes that the settings give, or the folder of their tier; else None."""
    if config.debug.prefix_hash_seed is not None or config.cache.kv_tier is None:
        return config.debug.prefix_hash_seed
    return read_seed(Path(read_kv_tier(config.cache.kv_tier).path))


class Records:
    """The records of one root. Threads may call it; only one may write.

    Errors are logged, once a minute of each kind at most, and never raised.
    """

    def __init__(self, folder: Path, root: str, max_bytes: int) -> None:
        """max_bytes: of all records in `folder`, those of other roots included."""
        self._folder, self._root, self._max_bytes = folder, root, max_bytes
        self._own = folder / root
        self._lock = threading.Lock()  # of what follows
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by root/shard/hash, the one used least recently first
        self._kept: dict[str, int] = {}  # until which second
        self._num_bytes = 0
        self._changes: tuple[list[bytes], list[bytes]] = [], []
        self._seen: dict[str, int] = {}  # shard -> its time of modification when it was read
        self._paused_until_s = 0.0
        self._logged: dict[str, tuple[float, int]] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        return self._name(block_hash) in self._sizes

    def __len__(self) -> int:
        """Records of all roots."""
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def _name(self, block_hash: bytes) -> str:
        digits = block_hash.hex()
        return f"{self._root}/{digits[:2]}/{digits[2:]}"

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes of records that were added and that were lost, since the last call."""
        with self._lock:
            changes, self._changes = self._changes, ([], [])
        return changes

    # Reading

    def read(self, block_hash: bytes, content: np.ndarray) -> str:
        """Fill `content` (uint8) with a record's. Return why not, for people; "" if that is done.

        A record that is not what it was is removed.
        """
        name = self._name(block_hash)
        try:
            with open(self._folder / name, "rb", buffering=0) as file:
                checksum = file.read(_CHECKSUM_BYTES)
                num_read, view = 0, content.data
                while num_read < len(view) and (count := file.readinto(view[num_read:])):
                    num_read += count
            if num_read == len(view) and checksum == self._checksum(block_hash, content):
                self._use(name, time.time())
                return ""
            os.unlink(self._folder / name)
            why = "a record is damaged"
        except FileNotFoundError:
            why = "a record is gone"
        except OSError as error:
            why = f"a record cannot be read: {error.strerror}"
        self._lose(name)
        self._log(f"{why} ({name}); its tokens are computed again")
        return why

    def _checksum(self, block_hash: bytes, content: np.ndarray) -> bytes:
        digest = hashlib.sha256(self._root.encode() + block_hash)
        digest.update(content.data)
        return digest.digest()

    def _use(self, name: str, at_s: float) -> None:
        with self._lock:
            if name not in self._sizes:
                return
            self._sizes.move_to_end(name)
            at_s = max(at_s, self._kept.get(name, 0))
        with contextlib.suppress(OSError):
            os.utime(self._folder / name, (at_s, at_s))

    def keep(self, hashes: Sequence[bytes], until_s: int) -> None:
        """Rather remove other records than these until `until_s` on the system's clock."""
        for name in map(self._name, hashes):
            if name in self._sizes:
                self._kept[name] = max(until_s, self._kept.get(name, 0))
                self._use(name, until_s)

    # Writing

    def write(self, block_hash: bytes, content: np.ndarray) -> None:
        """Keep a record with `content` (uint8), after others were removed if there is no room."""
        name, size = self._name(block_hash), _CHECKSUM_BYTES + len(content)
        if name in self._sizes or time.monotonic() < self._paused_until_s or not self._make_room(size):
            return
        path, own = self._folder / name, self._own / f"writing-{os.getpid()}"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(own, "wb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(self._checksum(block_hash, content))
                view = content.data
                while view:
                    view = view[file.write(view) :]
            os.replace(own, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                own.unlink()
            self._paused_until_s = time.monotonic() + PAUSE_S
            self._log(f"a record cannot be written: {error.strerror}; none is for {PAUSE_S:.0f} s")
            return
        with self._lock:
            self._add(name, size)

    def _make_room(self, size: int) -> bool:
        """Remove the records used least recently until there is room. Return whether there is."""
        num_passed = 0
        while self._num_bytes + size > self._max_bytes and self._sizes:
            with self._lock:
                name = next(iter(self._sizes))
                if self._kept.get(name, 0) > time.time() and num_passed < len(self._sizes):
                    self._sizes.move_to_end(name)
                    num_passed += 1
                    continue
            with contextlib.suppress(OSError):
                os.unlink(self._folder / name)
            self._lose(name)
        return self._num_bytes + size <= self._max_bytes

    def _add(self, name: str, size: int) -> None:
        if name in self._sizes:
            return
        self._sizes[name] = size
        self._num_bytes += size
        root, shard, rest = name.split("/")
        if root == self._root:
            self._changes[0].append(bytes.fromhex(shard + rest))

    def _lose(self, name: str) -> None:
        with self._lock:
            size = self._sizes.pop(name, None)
            self._kept.pop(name, None)
            if size is None:
                return
            self._num_bytes -= size
            root, shard, rest = name.split("/")
            if root == self._root:
                self._changes[1].append(bytes.fromhex(shard + rest))

    # What is there

    def scan(self) -> None:
        """Find the records that other engines have added or removed; at first, all there are, of all roots."""
        roots = [self._root]
        if not self._seen:
            with contextlib.suppress(OSError):
                self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
                roots += [one.name for one in os.scandir(self._folder) if one.is_dir() and one.name != self._root]
                self._remove_unfinished()
        shards: dict[str, dict[str, os.stat_result]] = {}  # those that have changed: their records
        for shard in (f"{root}/{digits}" for root in roots for digits in _SHARDS):
            if (there := self._read_shard(shard)) is not None:
                shards[shard] = there
        gone = [name for name in tuple(self._sizes) if name not in shards.get(name.rpartition("/")[0], (name,))]
        for name in gone:
            self._lose(name)
        found = [(facts.st_mtime, name, facts.st_size) for there in shards.values() for name, facts in there.items()]
        now_s = time.time()
        with self._lock:
            for used_s, name, size in sorted(found):
                self._add(name, size)
                if used_s > now_s:
                    self._kept[name] = max(int(used_s), self._kept.get(name, 0))
        self._make_room(0)

    def _remove_unfinished(self) -> None:
        """Remove what processes that have ended were writing."""
        for path in self._own.glob("writing-*"):
            pid = path.name.removeprefix("writing-")
            if not Path(f"/proc/{pid}").exists():
                path.unlink(missing_ok=True)

    def _read_shard(self, shard: str) -> dict[str, os.stat_result] | None:
        """Return the records of a shard; None if it has not changed since it was read.

        One of a wrong size is removed when it is read.
        """
        try:
            modified_ns = os.stat(self._folder / shard).st_mtime_ns
            if self._seen.get(shard) == modified_ns:
                return None
            there = {
                f"{shard}/{one.name}": one.stat() for one in os.scandir(self._folder / shard) if _is_name(one.name)
            }
        except OSError:  # not there, or it changes just now
            return None
        self._seen[shard] = modified_ns
        return there

    def _log(self, what: str) -> None:
        kind, now_s = what.split("(")[0], time.monotonic()
        last_s, num_since = self._logged.get(kind, (-_LOG_EVERY_S, 0))
        if now_s - last_s < _LOG_EVERY_S:
            self._logged[kind] = last_s, num_since + 1
            return
        self._logged[kind] = now_s, 0
        more = f" ({num_since} more like this since the last such line)" if num_since else ""
        logger.warning("kv_tier: %s%s", what, more)


def _is_name(digits: str) -> bool:
    return len(digits) == 62 and all(digit in "0123456789abcdef" for digit in digits)
