"""The files of a server's databases: what all of them refuse at the start."""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.base.errors import ConfigError
from pagoda.server.history_store import HistoryStore
from pagoda.server.stored.service import StoreService

OPENERS = pytest.mark.parametrize("opened", [HistoryStore, StoreService])


def run(file: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(file)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


@OPENERS
def test_a_database_of_another_version_or_program_is_refused_and_left_alone(
    opened: Callable[[str], HistoryStore | StoreService], tmp_path: Path
) -> None:
    newer, other = tmp_path / "newer", tmp_path / "other"
    opened(str(newer)).close()
    run(newer, "PRAGMA user_version=99")
    run(other, "CREATE TABLE notes (text)")
    for file in (newer, other):
        with pytest.raises(ConfigError, match=rf"{file} was not made by this version of the server; name another"):
            opened(str(file))
        with pytest.raises(ConfigError):  # nor is it in use by the first attempt
            opened(str(file))
    with contextlib.closing(sqlite3.connect(other)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("notes",)]


@OPENERS
def test_a_damaged_database_is_refused(opened: Callable[[str], HistoryStore | StoreService], tmp_path: Path) -> None:
    file = tmp_path / "damaged"
    opened(str(file)).close()
    data = bytearray(file.read_bytes())
    data[200:] = b"\xff" * (len(data) - 200)
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"damaged cannot be used: .*; name another file, or remove it"):
        opened(str(file))


def test_a_response_that_cannot_be_read_is_refused_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    StoreService(str(file)).close()
    run(file, "INSERT INTO kept VALUES ('a', 'resp_1', '', x'c1')")
    with pytest.raises(ConfigError, match=r"responses_file: .*kept cannot be used: .*; name another file"):
        StoreService(str(file))
