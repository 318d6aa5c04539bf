"""Packed weights that are kept in a file: the same bits as packed again, whatever happens to the file."""

import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from pagoda.base.cache_home import packed_cache_bytes
from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.packed import PackedExperts, PackedTable, PackedWeight
from pagoda.kernels.native_ops import NativeOps
from pagoda.layers.module import parameters
from pagoda.layers.rotary import RotaryTables
from pagoda.layers.sharding import ALONE, RankNumber
from pagoda.loading import packed_cache
from pagoda.loading.loader import load_model
from pagoda.loading.model_files import ModelFiles, identify
from pagoda.loading.packed_cache import PackedCache, packed_key
from pagoda.loading.packed_file import PackedFileWriter
from pagoda.models.base import Model
from pagoda.ops.tensor import RankGroup
from pagoda.worker.forward_runner import ForwardRunner
from tests.device_under_test import ON_CPU
from tests.models.gguf_writer import q4_k_m, write_gguf
from tests.models.packed_writer import Packing, write_packed
from tests.models.paged_runner import PagedRunner
from tests.models.tiny import VOCAB, WIDE, make_model, save

CPU = torch.device("cpu")


class Case(NamedTuple):
    """A checkpoint of a model, its matrices as `how` says, floats for None; and how it is loaded."""

    model: str
    how: object = None
    quantization: str | None = None
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "bf16": Case("llama"),
    "bf16, biases and a tied head": Case("llama-tied-biased"),
    "float32 experts": Case("qwen3-moe-renormalized", dtype=torch.float32),
    "int8": Case("llama-tied-biased", None, "int8"),
    **{kind.name: Case("llama-tied-biased", kind) for kind in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q8_0, Kind.F16)},
    "Q4_K_M": Case("llama", q4_k_m),
    "Q8_0 experts": Case("mixtral", Kind.Q8_0),
    "gptq, ordered": Case("qwen3", Packing("gptq", ordered=True)),
    "awq": Case("llama-tied-biased", Packing("awq")),
}


def checkpoint(case: Case, folder: Path) -> ModelFiles:
    in_blocks = callable(case.how) or (isinstance(case.how, Kind) and case.how.name.endswith("_K"))
    model = make_model(case.model, **(WIDE if in_blocks else {}))
    if case.how is None:
        return identify(save(model, folder / "model"))
    if isinstance(case.how, Packing):
        write_packed(save(model, folder / "floats"), case.how, folder / "model", folder / "values")
        return identify(folder / "model")
    write_gguf(model, folder / "model.gguf", case.how)  # type: ignore[arg-type]
    return identify(folder / "model.gguf")


@pytest.fixture
def ops() -> NativeOps:
    found = ON_CPU.ops("native")
    assert isinstance(found, NativeOps)
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackedCache]:
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    with ThreadPoolExecutor(2) as checks:
        yield PackedCache(tmp_path / "cache" / "packed", 1 << 30, checks)


def load(files: ModelFiles, ops: NativeOps, case: Case, cache: PackedCache | None, ranks: RankGroup = ALONE) -> Model:
    return load_model(files, ops, case.dtype, CPU, case.quantization, 64, ranks, cache=cache)


def packed(model: Model) -> dict[str, PackedWeight]:
    """All packed weights of a model, by path and number."""
    found: dict[str, PackedWeight] = {}
    for path, parameter in parameters(model):
        value = parameter.value
        weights = value.weights if isinstance(value, PackedExperts) else [value]
        for number, weight in enumerate(weights):
            one = weight.weight if isinstance(weight, PackedTable) else weight
            while isinstance(one, PackedWeight):
                found[f"{path} {number} {len(found)}"] = one
                one = one.next
    return found


def bits(tensor: torch.Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()


def assert_same(one: Model, other: Model) -> None:
    """All that two models hold is the same."""
    first, second = packed(one), packed(other)
    assert first.keys() == second.keys()
    assert first
    for name, weight in first.items():
        other_weight = second[name]
        for field in ("out_features", "in_features", "dtype", "table_dtype"):
            assert getattr(weight, field) == getattr(other_weight, field), name
        for field in ("out_features", "in_features", "kind", "group", "in_pairs"):
            assert getattr(weight.record, field) == getattr(other_weight.record, field), name
        for field in ("panels", "bias", "input_order"):
            assert bits(getattr(weight, field)) == bits(getattr(other_weight, field)), name
            address = getattr(weight.record, field)
            tensor = getattr(weight, field)
            assert (address or 0) == (0 if tensor is None else tensor.data_ptr())
        assert (weight.record.next or 0) == (0 if weight.next is None else weight.next.address)
    for (path, of_one), (_, of_other) in zip(parameters(one), parameters(other), strict=True):
        if isinstance(of_one.value, torch.Tensor):
            assert torch.equal(of_one.value, of_other.value), path  # type: ignore[arg-type]
        if isinstance(of_one.value, RotaryTables):
            assert torch.equal(of_one.value.cos, of_other.value.cos)  # type: ignore[union-attr]


def is_mapped(model: Model, file: Path) -> bool:
    """Whether all panels are in the pages of a file."""
    ranges = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(f" {file}")
    ]
    addresses = [weight.panels.data_ptr() for weight in packed(model).values()]
    return all(any(first <= address < last for first, last in ranges) for address in addresses)


def kept(cache: PackedCache) -> list[Path]:
    return [] if not cache.folder.exists() else [file for file in cache.folder.iterdir() if file.suffix != ".lock"]


@pytest.mark.parametrize("name", CASES)
def test_a_file_has_the_bits_that_are_packed(
    name: str, tmp_path: Path, ops: NativeOps, cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    files = checkpoint(case, tmp_path)
    plain, made = load(files, ops, case, None), load(files, ops, case, cache)
    [file] = kept(cache)
    assert file.stat().st_mode & 0o777 == 0o400
    monkeypatch.setattr(packed_cache.PackedCache, "_write", None)  # the file is there
    mapped = load(files, ops, case, cache)
    for model in (made, mapped):
        assert_same(plain, model)
        assert is_mapped(model, file)
    assert not is_mapped(plain, file)
    prompt = [(0, 0, list(range(3, 20)))]
    with torch.inference_mode():
        first, second = (
            PagedRunner(ForwardRunner(model, ops), 1, 40, case.dtype, block_size=8).logits(prompt)
            for model in (plain, mapped)
        )
    assert torch.equal(first, second)


LLAMA = Case("llama-tied-biased", Kind.Q8_0)


def test_ranks_have_files_of_their_own(tmp_path: Path, ops: NativeOps, cache: PackedCache) -> None:
    case = Case("llama-mha-wide-heads")
    files = checkpoint(case._replace(model="mistral"), tmp_path)
    for rank in (RankNumber(0, 2), RankNumber(1, 2), ALONE):
        made = load(files, ops, case, cache, rank)
        assert_same(load(files, ops, case, None, rank), made)
        assert_same(load(files, ops, case, cache, rank), made)
    assert len(kept(cache)) == 3


def damage(file: Path, how: str) -> None:
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    middle = len(data) // 3
    match how:
        case "cut":
            data = data[: len(data) // 2]
        case "cut by a byte":
            data = data[:-1]
        case "empty":
            data = bytearray()
        case "a bit of a weight":
            data[middle] ^= 1
        case "a page of zeros":
            data[middle // 4096 * 4096 : middle // 4096 * 4096 + 4096] = bytes(4096)
        case "pages in another order":
            first, second = data[4096:8192], data[8192:12288]
            data[4096:12288] = second + first
        case "a byte of the index":
            data[-200] ^= 1
        case "a byte of the tail":
            data[-1] ^= 1
        case "another format":
            data = bytearray(np.random.default_rng(1).bytes(len(data)))
    file.write_bytes(data)


DAMAGES = (
    *("cut", "cut by a byte", "empty", "a bit of a weight", "a page of zeros", "pages in another order"),
    *("a byte of the index", "a byte of the tail", "another format"),
)


def test_a_damaged_file_is_made_again(
    tmp_path: Path, ops: NativeOps, cache: PackedCache, caplog: pytest.LogCaptureFixture
) -> None:
    case = LLAMA
    files = checkpoint(case, tmp_path)
    load(files, ops, case, cache)
    [file] = kept(cache)
    whole = file.read_bytes()
    plain = load(files, ops, case, None)
    for how in DAMAGES:
        damage(file, how)
        assert file.read_bytes() != whole
        caplog.clear()
        assert_same(plain, load(files, ops, case, cache))
        assert f"{file} is damaged" in caplog.text, how
        assert kept(cache) == [file]
        assert file.read_bytes() == whole


def test_a_process_that_is_killed_leaves_nothing_that_is_read(
    tmp_path: Path, ops: NativeOps, cache: PackedCache
) -> None:
    files = checkpoint(LLAMA, tmp_path)
    plain = load(files, ops, LLAMA, None)
    weights = list(packed(plain).values())
    child = os.fork()
    if child == 0:

        def write(writer: PackedFileWriter) -> None:
            writer.add("one", weights[0])
            os.kill(os.getpid(), signal.SIGKILL)

        cache.open_or_make("another", lambda: 0, write)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert [file.name for file in kept(cache)] == ["another.partial"]
    assert_same(plain, load(files, ops, LLAMA, cache))
    assert [file.suffix for file in kept(cache)] == [".packed"]  # what was left is gone


def test_starts_at_the_same_time_make_one_file(tmp_path: Path, ops: NativeOps, cache: PackedCache) -> None:
    weight = next(iter(packed(load(checkpoint(LLAMA, tmp_path), ops, LLAMA, None)).values()))
    written: list[int] = []
    together = threading.Barrier(4)

    def write(writer: PackedFileWriter) -> None:
        written.append(threading.get_ident())
        time.sleep(0.2)
        writer.add("weight", weight)

    def start() -> bytes:
        together.wait()
        found = cache.open_or_make("key", lambda: 1, write)
        assert found is not None
        return bits(found["weight"].panels)

    with ThreadPoolExecutor(4) as starts:
        assert {done.result() for done in [starts.submit(start) for _ in range(4)]} == {bits(weight.panels)}
    assert len(written) == 1


def test_a_damaged_file_that_two_processes_find_is_made_once(
    ops: NativeOps, cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that looks at it for longer does not remove what the other has made meanwhile."""
    weight, written = ops.linears.prepare(torch.zeros(64, 64)), list[str]()

    def start(name: str) -> None:
        def write(writer: PackedFileWriter) -> None:
            written.append(name)
            writer.add("weight", weight)

        assert cache.open_or_make("key", lambda: 1, write) is not None

    start("first")
    damage(cache.folder / "key.packed", "a byte of the tail")
    read, waits = packed_cache.read_packed, [lambda: start("meanwhile")]

    def read_slowly(*args: Any) -> object:
        try:
            return read(*args)
        finally:
            if waits:
                waits.pop()()

    monkeypatch.setattr(packed_cache, "read_packed", read_slowly)
    start("slow")
    assert written == ["first", "meanwhile"]
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1


def test_what_a_killed_process_has_left_takes_no_room_from_the_next(
    ops: NativeOps, cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start after another would find the disk half full, by what the first has left."""
    weight = ops.linears.prepare(torch.zeros(64, 64))
    cache.folder.mkdir(parents=True)
    (cache.folder / "key.partial").write_bytes(bytes(1000))

    def usage(folder: Path) -> _Usage:
        return _Usage(2500 - sum(file.stat().st_size for file in folder.glob("*.partial")))

    monkeypatch.setattr("shutil.disk_usage", usage)
    assert cache.open_or_make("key", lambda: 1000, lambda writer: writer.add("weight", weight)) is not None


def test_ranks_that_make_room_at_the_same_time_do_not_miss_each_others_files(
    ops: NativeOps, cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, stat = ops.linears.prepare(torch.zeros(64, 64)), Path.stat
    cache.folder.mkdir(parents=True)
    (cache.folder / "old.packed").write_bytes(b"1")

    def gone(path: Path, **how: Any) -> os.stat_result:
        if path.name == "old.packed":
            path.unlink(missing_ok=True)  # by another rank
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", gone)
    assert cache.open_or_make("key", lambda: 1, lambda writer: writer.add("weight", weight)) is not None


@pytest.mark.parametrize("case", ["full while written", "half full", "no folder", "over the limit"])
def test_without_room_weights_are_packed_in_memory(
    case: str,
    tmp_path: Path,
    ops: NativeOps,
    cache: PackedCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = checkpoint(LLAMA, tmp_path)
    plain = load(files, ops, LLAMA, None)
    says = {"over the limit": "PAGODA_PACKED_CACHE_SIZE", "half full": "more than half"}.get(case, "No space left")
    if case == "full while written":
        add = PackedFileWriter.add

        def full(writer: PackedFileWriter, name: str, weight: PackedWeight) -> None:
            add(writer, name, weight)
            if len(writer._weights) == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(PackedFileWriter, "add", full)
    elif case == "half full":
        monkeypatch.setattr("shutil.disk_usage", lambda folder: _Usage(1000))
    elif case == "no folder":
        (tmp_path / "file").touch()
        cache, says = PackedCache(tmp_path / "file" / "packed", 1 << 30, cache.checks), "Not a directory"
    else:
        cache = PackedCache(cache.folder, 1000, cache.checks)
    assert_same(plain, load(files, ops, LLAMA, cache))
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert says in record.getMessage()
    assert case == "no folder" or kept(cache) == []


class _Usage(NamedTuple):
    free: int


def test_a_folder_that_is_only_read_is_used(
    tmp_path: Path,
    ops: NativeOps,
    cache: PackedCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = checkpoint(LLAMA, tmp_path)
    plain = load(files, ops, LLAMA, cache)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("os.utime", "os.mkdir", "os.replace", "os.rename"):
        monkeypatch.setattr(name, refuse)
    assert_same(plain, load(files, ops, LLAMA, cache))
    assert caplog.text == ""
    [file] = kept(cache)
    file.unlink()
    monkeypatch.setattr(packed_cache, "one_process", refuse)
    assert_same(plain, load(files, ops, LLAMA, cache))
    assert "Read-only file system" in caplog.text


def test_what_was_not_used_for_longest_makes_room(ops: NativeOps, cache: PackedCache) -> None:
    weight = ops.linears.prepare(torch.zeros(64, 1 << 14))  # 4 MiB
    size = weight.panels.nbytes + 8192
    small = PackedCache(cache.folder, 3 * size, cache.checks)

    def use(key: str) -> None:
        assert small.open_or_make(key, lambda: size, lambda writer: writer.add("weight", weight)) is not None

    for at, key in enumerate("abc"):
        use(key)
        os.utime(cache.folder / f"{key}.packed", (at, at))
    use("a")  # which is now used last
    use("d")
    assert sorted(file.stem for file in kept(small)) == ["a", "c", "d"]


def test_the_name_follows_from_all_that_matters(tmp_path: Path, cache: PackedCache) -> None:
    library, file = tmp_path / "kernels.so", tmp_path / "model.gguf"
    library.write_bytes(b"kernels")
    file.write_bytes(b"GGUF" + bytes(4 << 20))
    files = identify(file)
    first = packed_key(files, library, "int8", 0)
    assert first == packed_key(files, library, "int8", 0)
    names = {first, packed_key(files, library, None, 0), packed_key(files, library, "int8", 1)}
    library.write_bytes(b"others")
    names.add(packed_key(files, library, "int8", 0))
    state = file.stat()
    with file.open("r+b") as stored:  # in place, and the time that it was changed at is put back
        stored.seek(3 << 20)
        stored.write(b"1")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    names.add(packed_key(files, library, "int8", 0))
    assert len(names) == 5


def test_what_is_written_beside_the_weights_changes_no_name(tmp_path: Path, cache: PackedCache) -> None:
    folder, library = save(make_model("llama"), tmp_path / "model"), tmp_path / "library"
    library.write_bytes(b"kernels")
    first = packed_key(identify(folder), library)
    assert first is not None
    (folder / "serve.log").write_text("ready\n")
    assert packed_key(identify(folder), library) == first
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert packed_key(identify(folder), library) != first


def test_a_file_that_cannot_be_read_is_no_reason_to_fail(
    tmp_path: Path, ops: NativeOps, cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(make_model("llama"), tmp_path / "model")
    (folder / "notes.json").touch()
    opened = Path.open

    def refuse(path: Path, *args: object, **kwargs: object) -> object:
        if path.name == "notes.json":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    load(identify(folder), ops, Case("llama"), cache)
    assert kept(cache) == []


def test_small_checkpoints_are_not_worth_a_file(
    tmp_path: Path, ops: NativeOps, cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    files = checkpoint(LLAMA, tmp_path)
    load(files, ops, LLAMA, cache)
    assert kept(cache) == []


def test_a_checkpoint_that_is_wrong_is_refused_as_without_a_file(
    tmp_path: Path, ops: NativeOps, cache: PackedCache
) -> None:
    model = make_model("llama")
    folder = save(model, tmp_path / "model")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace(f'"vocab_size": {VOCAB}', '"vocab_size": 140'))
    with pytest.raises(ConfigError, match="has the shape"):
        load(identify(folder), ops, Case("llama"), cache)
    assert kept(cache) == []


def test_the_environment_says_how_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGODA_PACKED_CACHE_SIZE", raising=False)
    assert packed_cache_bytes() == 32 << 30
    for given, expected in (("0", 0), ("20GiB", 20 << 30)):
        monkeypatch.setenv("PAGODA_PACKED_CACHE_SIZE", given)
        assert packed_cache_bytes() == expected
    monkeypatch.setenv("PAGODA_PACKED_CACHE_SIZE", "off")
    with pytest.raises(ConfigError, match="PAGODA_PACKED_CACHE_SIZE must be a size"):
        packed_cache_bytes()
