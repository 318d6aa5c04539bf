"""Databases of a server: SQLite files that only this user can read, each of one process at a time, or in memory."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from pagoda.base.errors import ConfigError


def open_database(setting: str, file: str | None, version: int, tables: Sequence[str]) -> sqlite3.Connection:
    """Return a database, with its tables if it is new.   setting: that names the file; None: it is in memory.

    version: of the tables and of what is in them. One thread may use it at a time.
    Raises ConfigError for a file that another process uses, that has another version, or that is something else.
    """
    with naming_file(setting, file), contextlib.ExitStack() as at_error:
        if file is not None:
            file = str(Path(file).expanduser())
            with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as opened:
                os.fchmod(opened.fileno(), 0o600)  # SQLite gives its other files the same mode
        db = sqlite3.connect(file or ":memory:", timeout=1.0, isolation_level=None, check_same_thread=False)
        at_error.callback(db.close)
        # NORMAL: a power failure takes the last changes, but leaves a file that can be read.
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL"):
            db.execute(f"PRAGMA {pragma}")
        db.execute("BEGIN EXCLUSIVE")  # fails if another server has it
        (found,) = db.execute("PRAGMA user_version").fetchone()
        if not found and not db.execute("SELECT * FROM sqlite_master").fetchone():
            for table in tables:
                db.execute(table)
            db.execute(f"PRAGMA user_version={version}")
        elif found != version:
            raise ConfigError(f"{setting}: {file} was not made by this version of the server; name another")
        db.execute("COMMIT")
        at_error.pop_all()
    return db


@contextlib.contextmanager
def naming_file(setting: str, file: str | None) -> Iterator[None]:
    """Turn errors of the block, which uses a database, into ConfigError."""
    try:
        yield
    except (OSError, ValueError, sqlite3.Error) as error:
        raise ConfigError(f"{setting}: {file} cannot be used: {error}; name another file, or remove it") from None
