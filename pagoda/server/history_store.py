"""HistoryStore: what assistants have sampled, for the next turn. One process owns it, each that serves HTTP may ask."""

import contextlib
import logging
import sqlite3
from collections.abc import Iterable, Iterator

from pagoda.base.server_config import ServerConfig
from pagoda.engine.clients.calls import offered
from pagoda.server.database import naming_file, open_database

logger = logging.getLogger("pagoda.server")

Found = list[tuple[bytes, bytes]]
"""Messages, or other notes, with their keys."""
MAX_BYTES = 128 * 2**20
MAX_BYTES_PER_OWNER = 32 * 2**20
_MAX_PER_KEY = 8  # answers to the same prompt
_VERSION = 1
_ROW_BYTES = 128  # what a message costs next to its own size
_TABLES = (
    "CREATE TABLE messages (id INTEGER PRIMARY KEY, owner TEXT, key BLOB, data BLOB, size INTEGER, used INTEGER)",
    "CREATE INDEX by_key ON messages (owner, key)",
    "CREATE INDEX by_use ON messages (used, id DESC)",
    "CREATE INDEX by_use_of_owner ON messages (owner, used, id DESC)",
)


class HistoryStore:
    """Messages by owner and key, those used last. In memory, or in a file.

    owner: see `History.owner_of`.   bytes_of: each owner's.
    """

    def __init__(
        self, file: str | None = None, max_bytes: int = MAX_BYTES, max_bytes_per_owner: int = MAX_BYTES_PER_OWNER
    ) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._max_bytes, self._max_per_owner = max_bytes, max_bytes_per_owner
        self._db = open_database("history", file, _VERSION, _TABLES)
        with naming_file("history", file):
            sizes = self._db.execute("SELECT owner, SUM(size) FROM messages GROUP BY owner")
            self.bytes_of: dict[str, int] = dict(sizes)
            (self._uses,) = self._db.execute("SELECT COALESCE(MAX(used), 0) FROM messages").fetchone()

    @classmethod
    def of(cls, config: ServerConfig) -> "HistoryStore":
        """Return the store of a server. Raises ConfigError."""
        where = config.answer_defaults.history
        return cls(None if where in ("memory", "off") else where)

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_of.values())

    @offered
    def remember(self, client: int, owner: str, key: bytes, data: bytes) -> None:
        """Keep a message. One that is larger than an owner's share is not kept."""
        size = len(data) + len(key) + _ROW_BYTES
        if size > self._max_per_owner:
            return
        with _logged("kept"):
            same = self._db.execute(
                "SELECT id, data, size FROM messages WHERE owner = ? AND key = ? ORDER BY used", (owner, key)
            ).fetchall()
            old = [row for row in same if row[1] == data] or same[: max(0, len(same) + 1 - _MAX_PER_KEY)]
            self._delete(owner, [(row[0], row[2]) for row in old])
            self._uses += 1
            self._db.execute(
                "INSERT INTO messages (owner, key, data, size, used) VALUES (?, ?, ?, ?, ?)",
                (owner, key, data, size, self._uses),
            )
            self.bytes_of[owner] = self.bytes_of.get(owner, 0) + size
            self._evict()

    @offered
    def recall(self, client: int, owner: str, keys: list[bytes]) -> Found:
        """Return the messages at these keys, the last ones first.   keys: a few hundred at most."""
        found: Found = []
        with _logged("found"):
            self._uses += 1
            where = f"owner = ? AND key IN ({','.join('?' * len(keys))})"
            rows = self._db.execute(f"SELECT key, data FROM messages WHERE {where} ORDER BY id DESC", (owner, *keys))
            found += rows
            self._db.execute(f"UPDATE messages SET used = ? WHERE {where}", (self._uses, owner, *keys))
        return found

    def close(self) -> None:
        self._db.close()

    def _evict(self) -> None:
        """Delete of the owner that has most: so no owner loses what is within its part, whatever others write.

        What was used longest ago goes first: the last messages of a conversation before the first, which others need.
        """
        by_use = "SELECT id, size FROM messages WHERE owner = ? ORDER BY used, id DESC LIMIT 1"
        while self.bytes_of:
            owner = max(self.bytes_of, key=self.bytes_of.__getitem__)
            if self.bytes_of[owner] <= self._max_per_owner and self.num_bytes <= self._max_bytes:
                return
            self._delete(owner, self._db.execute(by_use, (owner,)).fetchall())

    def _delete(self, owner: str, rows: Iterable[tuple[int, int]]) -> None:
        for number, size in rows:
            self._db.execute("DELETE FROM messages WHERE id = ?", (number,))
            self.bytes_of[owner] -= size
            if not self.bytes_of[owner]:
                del self.bytes_of[owner]


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log what fails in the block: an answer does not fail for it."""
    try:
        yield
    except sqlite3.Error as error:
        logger.warning("history: a message could not be %s: %s", what, error)
