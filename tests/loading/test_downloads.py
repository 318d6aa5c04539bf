"""Downloads from a hub on this machine, by `pagoda pull` as a process: broken, killed, damaged."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.loading.fake_hub import COMMIT, FakeHub, fake_hub

GGUF = b"GGUF" + random.Random(0).randbytes(30 << 20)
FILE = "m-Q4_K_M.gguf"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub("org/name", {FILE: GGUF, "README.md": b"#"}) as hub:
        yield hub


def pulling(hub: FakeHub, cache: Path) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "*",
        "HF_TOKEN": "secret",
    }
    command = [sys.executable, "-m", "pagoda", "pull", "org/name:Q4_K_M", "--cache-dir", str(cache)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def pulled(hub: FakeHub, cache: Path) -> tuple[int, str, str]:
    process = pulling(hub, cache)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def wait_for(found: Callable[[], list[Path]]) -> list[Path]:
    """Return what is found, once there is something."""
    while not (paths := found()):
        time.sleep(0.01)
    return paths


def file_in(cache: Path) -> Path:
    return cache / "hub" / "models--org--name" / "snapshots" / COMMIT / FILE


def test_a_connection_that_breaks_is_resumed(hub: FakeHub, tmp_path: Path) -> None:
    hub.breaks = [12 << 20]
    code, out, err = pulled(hub, tmp_path)
    assert code == 0, err
    assert out == f"org/name:Q4_K_M\t{file_in(tmp_path)}\n"
    assert file_in(tmp_path).read_bytes() == GGUF
    first, second = hub.ranges
    assert FILE in err  # the progress
    assert not hub.keys_seen
    assert 0 == first < second <= 12 << 20  # the library writes ten MiB at a time


def test_a_download_that_was_killed_is_resumed_by_the_next(hub: FakeHub, tmp_path: Path) -> None:
    hub.hangs = 20 << 20
    process = pulling(hub, tmp_path)
    assert hub.hung.wait(60)
    (partial,) = wait_for(lambda: [path for path in tmp_path.rglob("*.partial") if path.stat().st_size])
    process.kill()
    process.communicate()
    size = partial.stat().st_size
    hub.hangs = None
    code, _, err = pulled(hub, tmp_path)
    assert code == 0, err
    assert file_in(tmp_path).read_bytes() == GGUF
    assert hub.ranges == [0, size]


def test_a_damaged_file_is_refused_and_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.damaged[FILE] = GGUF[:-1] + bytes([GGUF[-1] ^ 1])
    code, out, err = pulled(hub, tmp_path)
    assert (code, out) == (2, "")
    assert f"{FILE} does not have the sha256 that its host states" in err
    hub.damaged.clear()
    code, _, err = pulled(hub, tmp_path)
    assert code == 0, err
    assert file_in(tmp_path).read_bytes() == GGUF
