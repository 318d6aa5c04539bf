"""Records: a folder of blocks, a file for each.

    FOLDER/seed                        of the hashes, as a hexadecimal number; mode 0600
    FOLDER/<root>/<2 digits>/<hash>    a record: SHA-256 of root, hash and content; then the content
    FOLDER/<root>/<2 digits>/<hash>-<owner>    the same, of a caller with a key; owner: 8 digits of a hash
    FOLDER/<root>/writing-<16 digits>    a record that is being written, and locked; digits: of this Records alone

root: names everything that the content depends on besides what the hash covers: the model's files, data types, kernels,
layout. A record is renamed to its place when it is complete, and never changed. Its time of modification says when it
was last used; a time to come, until when it is to be kept. Several engines may use a folder at once.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.base.kv_tier import read_kv_tier

logger = logging.getLogger("pagoda")

_CHECKSUM_BYTES = 32
_SEED_BYTES = 15
_SHARDS = tuple(f"{number:02x}" for number in range(256))
_ROOT_NAME = re.compile("[0-9a-f]{32}")
_FILE_NAME = re.compile("([0-9a-f]{62})(?:-([0-9a-f]{8}))?")
_LOG_EVERY_S = 60.0
SHARE = 4
"""An owner may have one of so many parts of the folder; more, as long as nobody else needs the room."""
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
        is_in_it = isinstance(error, FileNotFoundError) and str(error.filename) != str(folder)
        if is_in_it and not path.is_symlink():  # the folder was made, and removed just now: see hold
            return read_seed(folder)
        raise ConfigError(f"kv_tier: the folder {folder} cannot be used: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"kv_tier: {path} can be read by others, who could then guess prompts: chmod 600 it")
    try:
        return int(digits, 16)
    except ValueError:
        raise ConfigError(f"kv_tier: {path} is not a seed; remove it, and the records next to it") from None


def tiers_seed(config: EngineConfig) -> int | None:
    """Return the seed of the prefix-cache hashes that the settings give, or a folder of their tier; else None."""
    if config.debug.prefix_hash_seed is not None or config.cache.kv_tier is None:
        return config.debug.prefix_hash_seed
    return read_seed(Path(read_kv_tier(config.cache.kv_tier)[-1].path))  # that of files outlives that of memory


def hash_seed(config: EngineConfig) -> int | None:
    """Return as much of that seed as hashes are made with: the 64 bits that a message to an engine can hold."""
    seed = tiers_seed(config)
    return None if seed is None else seed % (1 << 64)


@dataclass(slots=True)
class _Record:
    """size: bytes.   owner: see SHARE; "" for callers without keys.   used: grows from one use to the next.

    kept_until_s: on the system's clock; 0: it is not to be kept.
    """

    size: int
    owner: str
    used: float = 0.0
    kept_until_s: int = 0


class Records:
    """The records of one root. Threads may call it; only one may write.

    Errors are logged, once a minute of each kind at most, and never raised.
    tier: the name of the folder in events.
    """

    def __init__(self, folder: Path, root: str, max_bytes: int, tier: str = "disk") -> None:
        """max_bytes: of all records in `folder`, those of other roots included."""
        self.tier = tier
        self._folder, self._root, self._max_bytes = folder, root, max_bytes
        self._own = folder / root
        self._unfinished = self._own / f"writing-{secrets.token_hex(8)}"
        self._lock = threading.Lock()  # of what follows
        self._records: dict[str, _Record] = {}  # by root/shard/hash
        self._orders: dict[tuple[str, bool], OrderedDict[str, None]] = {}  # by owner, and whether to be kept
        self._bytes_of = Counter[str]()  # by owner
        self._num_uses = 0
        self._num_bytes = 0
        self._changes: dict[bytes, bool] = {}  # since they were told: whether a record is there now
        self._seen: dict[str, int] = {}  # shard -> its time of modification when it was read
        self._paused_until_s = 0.0
        self._logged: dict[str, tuple[float, int]] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        return self._name(block_hash) in self._records

    def __len__(self) -> int:
        """Records of all roots."""
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def _name(self, block_hash: bytes) -> str:
        digits = block_hash.hex()
        return f"{self._root}/{digits[:2]}/{digits[2:]}"

    def _path(self, name: str, owner: str) -> Path:
        return self._folder / (f"{name}-{owner}" if owner else name)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes of records that are there and that are gone, other than at the last call."""
        with self._lock:
            changes, self._changes = self._changes, {}
        added, lost = list[bytes](), list[bytes]()
        for block_hash, is_there in changes.items():
            (added if is_there else lost).append(block_hash)
        return added, lost

    def _note_change(self, name: str, is_there: bool) -> None:
        root, shard, rest = name.split("/")
        if root != self._root:
            return
        block_hash = bytes.fromhex(shard + rest)
        if self._changes.get(block_hash, is_there) is is_there:
            self._changes[block_hash] = is_there
        else:  # as it was
            del self._changes[block_hash]

    # Reading

    def read(self, block_hash: bytes, content: np.ndarray) -> str:
        """Fill `content` (uint8) with a record's. Return why not, for people; "" if that is done.

        A record that is not what it was is removed.
        """
        name = self._name(block_hash)
        record = self._records.get(name)
        if record is None:
            return "a record is gone"
        path = self._path(name, record.owner)
        try:
            with open(path, "rb", buffering=0) as file:
                checksum = file.read(_CHECKSUM_BYTES)
                num_read, view = 0, content.data
                while num_read < len(view) and (count := file.readinto(view[num_read:])):
                    num_read += count
            if num_read == len(view) and checksum == self._checksum(block_hash, content):
                self._use(name, time.time())
                return ""
            os.unlink(path)
            why = "a record is damaged"
        except FileNotFoundError:
            why = "a record is gone"
        except OSError as error:
            why = f"a record cannot be read: {error.strerror}"
        self._lose(name)
        self._log(f"{why} ({path}); its tokens are computed again")
        return why

    def _checksum(self, block_hash: bytes, content: np.ndarray) -> bytes:
        digest = hashlib.sha256(self._root.encode() + block_hash)
        digest.update(content.data)
        return digest.digest()

    def _use(self, name: str, at_s: float, keep_until_s: int = 0) -> None:
        with self._lock:
            if (record := self._records.get(name)) is None:
                return
            self._leave_order(name, record)
            until_s = max(keep_until_s, record.kept_until_s)
            record.kept_until_s = until_s if until_s > at_s else 0
            self._enter_order(name, record)
            at_s = max(at_s, record.kept_until_s)
        with contextlib.suppress(OSError):
            os.utime(self._path(name, record.owner), (at_s, at_s))

    def keep(self, hashes: Sequence[bytes], until_s: int) -> None:
        """Rather remove other records of their owner than these until `until_s` on the system's clock."""
        for name in map(self._name, hashes):
            self._use(name, time.time(), until_s)

    # Writing

    def write(self, block_hash: bytes, content: np.ndarray, owner: str = "") -> None:
        """Keep a record with `content` (uint8), after others were removed if there is no room.

        owner: whose it is: 8 hexadecimal digits, or "".
        """
        name, size = self._name(block_hash), _CHECKSUM_BYTES + len(content)
        if name in self._records or time.monotonic() < self._paused_until_s or not self._make_room(size):
            return
        path, own = self._path(name, owner), self._unfinished
        try:
            for part in (self._own, path.parent):  # not the folder itself: the last engine may have removed that
                part.mkdir(mode=0o700, exist_ok=True)
            with open(own, "wb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                with contextlib.suppress(OSError):  # a file system without locks: then no engine removes it either
                    fcntl.flock(file, fcntl.LOCK_EX)
                file.write(self._checksum(block_hash, content))
                view = content.data
                while view:
                    view = view[file.write(view) :]
                os.replace(own, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                own.unlink()
            self._paused_until_s = time.monotonic() + PAUSE_S
            self._log(f"a record cannot be written to {self._own}: {error.strerror}; none is for {PAUSE_S:.0f} s")
            return
        with self._lock:
            self._add(name, _Record(size, owner))

    def _make_room(self, size: int) -> bool:
        """Remove records until there is room. Return whether there is."""
        while self._num_bytes + size > self._max_bytes:
            with self._lock:
                if not self._records:
                    break
                _, order = min(self._orders.items(), key=self._when_to_go)
                name = next(iter(order))
                path = self._path(name, self._records[name].owner)
            with contextlib.suppress(OSError):
                os.unlink(path)
            self._lose(name)
        return self._num_bytes + size <= self._max_bytes

    def _when_to_go(self, item: tuple[tuple[str, bool], OrderedDict[str, None]]) -> tuple[bool, bool, float]:
        """Of owners with more than their share first; of those what is not to be kept; of that the least recent."""
        (owner, is_kept), order = item
        return self._bytes_of[owner] * SHARE <= self._max_bytes, is_kept, self._records[next(iter(order))].used

    def _add(self, name: str, record: _Record) -> None:
        if name in self._records:
            return
        self._records[name] = record
        self._enter_order(name, record)
        self._num_bytes += record.size
        self._bytes_of[record.owner] += record.size
        self._note_change(name, is_there=True)

    def _lose(self, name: str) -> None:
        with self._lock:
            record = self._records.get(name)
            if record is None:
                return
            self._leave_order(name, record)
            del self._records[name]
            self._num_bytes -= record.size
            self._bytes_of[record.owner] -= record.size
            if not self._bytes_of[record.owner]:
                del self._bytes_of[record.owner]
            self._note_change(name, is_there=False)

    def _enter_order(self, name: str, record: _Record) -> None:
        self._num_uses += 1
        record.used = self._num_uses
        self._orders.setdefault((record.owner, record.kept_until_s > 0), OrderedDict())[name] = None

    def _leave_order(self, name: str, record: _Record) -> None:
        key = record.owner, record.kept_until_s > 0
        del self._orders[key][name]
        if not self._orders[key]:
            del self._orders[key]

    # What is there

    def scan(self) -> None:
        """Find the records that other engines have added or removed, of all roots; at first, all there are."""
        roots = [self._root]
        with contextlib.suppress(OSError):
            if not self._seen:
                self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._remove_leftovers()
            roots += [one.name for one in os.scandir(self._folder) if one.is_dir() and one.name != self._root]
        shards: dict[str, dict[str, _Record]] = {}  # those that have changed: their records
        for shard in (f"{root}/{digits}" for root in roots for digits in _SHARDS):
            if (there := self._read_shard(shard)) is not None:
                shards[shard] = there
        gone = [name for name in tuple(self._records) if name not in shards.get(name.rpartition("/")[0], (name,))]
        for name in gone:
            self._lose(name)
        found = [(record.used, name, record) for there in shards.values() for name, record in there.items()]
        now_s = time.time()
        with self._lock:
            for used_s, name, record in sorted(found, key=lambda one: one[:2]):
                record.kept_until_s = int(used_s) if used_s > now_s else 0
                self._add(name, record)
            kept = [name for (_, is_kept), order in self._orders.items() if is_kept for name in order]
            over = [name for name in kept if self._records[name].kept_until_s <= now_s]
        for name in over:
            self._use(name, now_s)
        self._make_room(0)

    def _remove_leftovers(self) -> None:
        """Remove what engines that have ended were writing, and folders of other roots without a record."""
        others = [one for one in self._folder.iterdir() if _ROOT_NAME.fullmatch(one.name) and one != self._own]
        for path in (path for root in (self._own, *others) for path in root.glob("writing-*")):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while an engine writes, in any container
                path.unlink()
        for path in (path for root in others for path in (*(root / shard for shard in _SHARDS), root)):
            with contextlib.suppress(OSError):  # it has a record
                path.rmdir()

    def _read_shard(self, shard: str) -> dict[str, _Record] | None:
        """Return the records of a shard, used when their files say; None if it has not changed since it was read.

        One of a wrong size is removed when it is read.
        """
        there: dict[str, _Record] = {}
        try:
            modified_ns = os.stat(self._folder / shard).st_mtime_ns
            if self._seen.get(shard) == modified_ns:
                return None
            for one in os.scandir(self._folder / shard):
                if (match := _FILE_NAME.fullmatch(one.name)) is not None:
                    facts = one.stat()
                    there[f"{shard}/{match[1]}"] = _Record(facts.st_size, match[2] or "", facts.st_mtime)
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
