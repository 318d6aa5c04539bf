"""The folder in memory: nobody else's, and removed when no engine uses it."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pagoda.base.errors import ConfigError
from pagoda.tier import bytes_in, hold, read_seed


def test_the_last_one_removes_it(tmp_path: Path) -> None:
    folder = tmp_path / "host"
    assert bytes_in(folder) == 0
    first, second = hold(folder, 1), hold(folder, 1)
    (folder / "record").write_bytes(bytes(100_000))
    assert bytes_in(folder) >= 100_000
    first()
    assert (folder / "record").exists()
    second()
    assert not folder.exists()


def test_what_a_killed_engine_leaves_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "host"
    if (child := os.fork()) == 0:
        hold(folder, 1)
        (folder / "record").write_text("x")
        os._exit(0)
    os.waitpid(child, 0)
    end = hold(folder, 1)
    assert (folder / "record").exists()
    end()
    assert not folder.exists()


def test_a_folder_that_is_removed_while_an_engine_starts_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, open_file, link = tmp_path / "host", os.open, os.link

    def remove_first(*args: Any, **options: Any) -> int:
        monkeypatch.setattr(os, "open", open_file)
        shutil.rmtree(folder)
        return open_file(*args, **options)

    def remove_then(*args: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        link(*args)
        shutil.rmtree(folder)

    monkeypatch.setattr(os, "link", remove_then)
    seed = read_seed(folder)
    assert read_seed(folder) == seed
    monkeypatch.setattr(os, "open", remove_first)
    hold(folder, 1)()
    assert not folder.exists()


def test_a_folder_of_others_and_one_that_is_too_small_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "host"
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="others have access to"):
        hold(folder, 1)
    folder.chmod(0o700)
    with pytest.raises(ConfigError, match="--shm-size"):
        hold(folder, 1 << 60)
    with pytest.raises(ConfigError, match="cannot be used for host=SIZE"):
        hold(tmp_path / "none" / "host", 1)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="others have access to"):
        hold(tmp_path / "link", 1)
