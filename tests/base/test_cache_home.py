"""The folder of files that can be made again."""

from pathlib import Path

import pytest

from pagoda.base.cache_home import cache_home
from pagoda.kernels.native.build import default_cache_dir as kernels_dir
from pagoda.loading.fetch_wheel import default_cache_dir as models_dir


def test_xdg_cache_home_is_honoured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_dir() == cache_home() == tmp_path / "pagoda"
    assert kernels_dir() == tmp_path / "pagoda" / "native"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_home() == Path.home() / ".cache" / "pagoda"


def test_a_user_without_a_home_has_a_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_home().parent == tmp_path
