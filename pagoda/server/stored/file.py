"""StoreFile: what a store keeps, in an SQLite file that only this user can read."""

import logging
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from pagoda.server.database import naming_file, open_database
from pagoda.server.stored.store import Entry, Key, StoredConversation, StoredResponse

logger = logging.getLogger("pagoda.server")

_VERSION = 1
_TABLE = "CREATE TABLE kept (owner TEXT, id TEXT, item TEXT, data BLOB, UNIQUE (owner, id, item))"
_PUT = "INSERT INTO kept VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET data = excluded.data"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredResponse | StoredConversation).decode


class StoreFile:
    """The file of one server, written on a thread of its own.

    An entry is a row with an empty item; each item of a conversation is a row of its own, in the order of their ids in
    the file (rowid), which a changed item keeps. What waits to be written is at most what the store holds: of several
    changes of a row, the last one counts.
    """

    def __init__(self, path: str) -> None:
        """Raises ConfigError if the file cannot be used."""
        self._path = path
        self._gone: set[Key] = set()  # before what waits was put
        self._waiting: defaultdict[Key, dict[str, bytes | None]] = defaultdict(dict)
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "pagoda-store")
        self._file = open_database("responses_file", path, _VERSION, (_TABLE,))
        self._file.execute("PRAGMA secure_delete=ON")

    def load(self) -> Iterator[Entry]:
        """Iterate over the entries, the least recently changed first. Raises ConfigError for a damaged file."""
        with naming_file("responses_file", self._path):
            rows = self._file.execute("SELECT owner, id, data FROM kept WHERE item = ''")
            entries = {(owner, id): _decode(data) for owner, id, data in rows}
            for owner, id, item, data in self._file.execute("SELECT * FROM kept WHERE item != '' ORDER BY rowid"):
                entry = entries.get((owner, id))
                if isinstance(entry, StoredConversation):
                    entry.items[item] = data
        yield from sorted(entries.values(), key=lambda entry: entry.changed_s)

    def write(self, key: Key, item: str, value: Entry | bytes | None) -> None:
        """Write an entry or an item soon; None: it is gone. See OnChange."""
        if isinstance(value, StoredConversation):
            value = msgspec.structs.replace(value, items={})
        data = _encode(value) if isinstance(value, Entry) else value
        with self._lock:
            is_first = not self._waiting and not self._gone
            if item or data is not None:
                self._waiting[key][item] = data
            else:
                self._waiting.pop(key, None)
                self._gone.add(key)
        if is_first:
            self._writer.submit(self._write)

    def _write(self) -> None:
        with self._lock:
            gone, self._gone = self._gone, set()
            waiting, self._waiting = self._waiting, defaultdict(dict)
        put = [(*key, item, data) for key, rows in waiting.items() for item, data in rows.items() if data is not None]
        items = [(*key, item) for key, rows in waiting.items() for item, data in rows.items() if data is None]
        try:
            self._file.execute("BEGIN")
            self._file.executemany("DELETE FROM kept WHERE (owner, id) = (?, ?)", gone)
            self._file.executemany("DELETE FROM kept WHERE (owner, id, item) = (?, ?, ?)", items)
            self._file.executemany(_PUT, put)
            self._file.execute("COMMIT")
        except sqlite3.Error as error:
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            logger.error("responses_file %s cannot be written, and lacks %d changes: %s", self._path, len(put), error)

    def close(self) -> None:
        """Write what waits. Idempotent."""
        self._writer.shutdown()
        self._file.close()
