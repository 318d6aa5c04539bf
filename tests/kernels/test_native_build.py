"""Building and loading: cached by content, safe to race, a way out without a compiler; and the thread pool."""

import ctypes
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pagoda.base.errors import ConfigError
from pagoda.kernels import select
from pagoda.kernels.native import build
from pagoda.kernels.native.huge_pages import huge_zeros
from pagoda.kernels.native.library import load
from pagoda.kernels.native.threads import available_cpus, cores_to_pin
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.torch_ops import TorchOps
from pagoda.worker.devices.cpu import CpuDevice
from pagoda.worker.devices.cuda import CudaDevice

CPU = torch.device("cpu")


@pytest.fixture
def tiny_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A kernels folder of one small source, so that building takes no time."""
    kernels = tmp_path / "kernels"
    (kernels / "native").mkdir(parents=True)
    real = build.KERNELS / "native"
    for name in ("info.cpp", "pool.cpp", "parallel.h", "lanes.h"):
        (kernels / "native" / name).write_bytes((real / name).read_bytes())
    monkeypatch.setattr(build, "KERNELS", kernels)
    return kernels


def test_built_once_and_again_when_a_source_changes(
    tiny_kernels: Path, compiler: build.Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = build.build(tmp_path / "cache", compiler)
    assert "compiling the native kernels" in caplog.text
    caplog.clear()
    assert build.build(tmp_path / "cache", compiler) == first
    assert not caplog.text
    header = tiny_kernels / "native" / "parallel.h"
    header.write_text(header.read_text() + "\n// changed\n")
    assert build.build(tmp_path / "cache", compiler) != first
    assert len(litter_free(tmp_path / "cache")) == 2


def litter_free(cache: Path) -> list[Path]:
    """Return what is in the cache, which is libraries only, but for the lock."""
    found = [path for path in cache.iterdir() if path.suffix != ".lock"]
    assert all(path.suffix == ".so" for path in found), found
    return found


def test_of_several_builds_one_compiles_and_the_others_wait(
    tiny_kernels: Path, compiler: build.Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(4) as pool:
        builds = [pool.submit(build.build, tmp_path / "cache", compiler) for _ in range(4)]
    assert len({done.result() for done in builds}) == 1
    assert len(litter_free(tmp_path / "cache")) == 1
    assert caplog.text.count("compiling the native kernels, once") == 1


def test_processes_share_one_compile(tiny_kernels: Path, compiler: build.Compiler, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from pagoda.kernels.native import build;"
        "build.KERNELS = Path(sys.argv[1]); print(build.build(Path(sys.argv[2]), build.find_compiler()))"
    )
    command = [sys.executable, "-c", program, str(tiny_kernels), str(tmp_path / "cache")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ended = [process.communicate() for process in started]
    assert len({out for out, _ in ended}) == 1, ended
    assert sum("compiling the native kernels, once" in err for _, err in ended) == 1, ended


def test_what_a_killed_build_left_is_removed(tiny_kernels: Path, compiler: build.Compiler, tmp_path: Path) -> None:
    (tmp_path / "cache" / "build-dead").mkdir(parents=True)
    (tmp_path / "cache" / "build-dead" / "half.o").write_bytes(b"...")
    build.build(tmp_path / "cache", compiler)
    assert len(litter_free(tmp_path / "cache")) == 1


def test_another_checkout_of_the_same_sources_compiles_nothing(
    tiny_kernels: Path,
    compiler: build.Compiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = build.build(tmp_path / "cache", compiler)
    monkeypatch.setattr(build, "KERNELS", tiny_kernels.rename(tmp_path / "elsewhere"))
    caplog.clear()
    assert build.build(tmp_path / "cache", compiler) == first
    assert not caplog.text


def test_a_source_that_does_not_compile_shows_the_compilers_error(
    tiny_kernels: Path, compiler: build.Compiler, tmp_path: Path
) -> None:
    (tiny_kernels / "native" / "broken.cpp").write_text("int main( {")
    with pytest.raises(build.NativeUnavailable, match=r"broken\.cpp"):
        build.build(tmp_path / "cache", compiler)
    assert not litter_free(tmp_path / "cache")


def test_a_library_that_cannot_be_written_is_an_error(
    tiny_kernels: Path, compiler: build.Compiler, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(build.NativeUnavailable, match="cannot write compiled kernels"):
        build.build(tmp_path / "file" / "cache", compiler)


def test_a_folder_without_locks_is_like_one_that_cannot_be_written(
    tiny_kernels: Path, compiler: build.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def acquire(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("no flock")  # filelock 3.16

    monkeypatch.setattr("filelock.FileLock.acquire", acquire)
    with pytest.raises(build.CacheNotWritable, match="no flock"):
        build.build(tmp_path / "cache", compiler)


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_folder(
    tiny_kernels: Path,
    compiler: build.Compiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = build.build_for_user(compiler)
    assert library.parent == tmp_path / f"pagoda-{os.getuid()}"
    assert "cannot write compiled kernels" in caplog.text
    assert build.build_for_user(compiler) == library
    library.parent.chmod(0o777)  # another user could put a library there
    with pytest.raises(build.NativeUnavailable, match="cannot write compiled kernels"):
        build.build_for_user(compiler)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    load.cache_clear()
    with caplog.at_level(logging.WARNING, logger="pagoda"):
        ops = select.select_ops("auto", CpuDevice(1))
    assert isinstance(ops, TorchOps)
    assert len(caplog.records) == 1
    assert "apt install g++" in caplog.text
    with pytest.raises(ConfigError, match="apt install g"):
        select.select_ops("native", CpuDevice(1))


def test_names() -> None:
    assert select.select_ops("torch", CpuDevice(1)).name == "torch"
    assert select.select_ops("reference", CpuDevice(1)).name == "reference"
    with pytest.raises(ConfigError, match="did you mean 'native'"):
        select.select_ops("nativ", CpuDevice(1))
    with pytest.raises(ConfigError, match="do not run on device 'cuda'"):
        select.select_ops("native", CudaDevice())
    on_gpu = "torch" if find_spec("triton") is None else "triton"
    assert select.select_ops("auto", CudaDevice()).name == on_gpu


def test_no_second_openmp_runtime(native: NativeOps) -> None:
    """In a fresh process, with torch's threads and ours at work: torch's runtime is the only one mapped."""
    program = (
        "import re, torch; from pathlib import Path; from pagoda.kernels.native.library import load;"
        "functions = load().functions; torch.set_num_threads(2); torch.ones(1000000).sum();"
        "maps = Path('/proc/self/maps').read_text();"
        "print(functions.pagoda_shares_done(2), len(set(re.findall(r'/\\S*lib(?:gomp|omp|iomp5)\\S*', maps))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "1"]


def test_every_share_is_done_once(native: NativeOps) -> None:
    shares_done = native.library.functions.pagoda_shares_done
    shares_done.restype = ctypes.c_uint64
    for threads in [1, 2, 3, 7] * 200:
        assert shares_done(threads) == 2**threads - 1


def test_regions_of_several_callers_and_of_a_forked_child(native: NativeOps) -> None:
    """Python threads call kernels at once (ctypes lets go of the GIL); a fork has a pool of its own."""
    shares_done = native.library.functions.pagoda_shares_done
    shares_done.restype = ctypes.c_uint64
    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(lambda _: shares_done(3), range(300))) == {7}
    child = os.fork()
    if child == 0:
        os._exit(0 if shares_done(3) == 7 else 1)
    assert os.waitpid(child, 0)[1] == 0


def fake_machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v1_quota(controllers: str, mount: str, cpus: int) -> dict[str, str]:
    folder = f"sys/fs/cgroup/{mount}/x"
    return {
        "proc/self/cgroup": f"3:{controllers}:/x\n2:cpuset:/\n",
        f"{folder}/cpu.cfs_quota_us": f"{cpus}00000\n",
        f"{folder}/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpuset/cpuset.cpus": "0-3\n",
    }


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 4),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/../pod/a\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        (v1_quota("cpu,cpuacct", "cpu,cpuacct", 3), 3),
        (v1_quota("cpuacct,cpu", "cpu,cpuacct", 3), 3),
        (v1_quota("cpuacct,cpu", "cpu", 3), 3),
        (v1_quota("cpu", "cpu", 3), 3),
        (v1_quota("cpu", "cpuacct,cpu", 3), 3),
        (v1_quota("cpuacct", "cpuacct", 3), 4),
        ({f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 2},{i % 2 + 2}" for i in range(4)}, 2),
    ],
    ids=[
        "free",
        "v2 of a parent",
        "v2 unlimited",
        "less than one",
        "of a container",
        *(f"v1-{i}" for i in range(6)),
        "hyper-threads",
    ],
)
def test_available_cpus(files: dict[str, str], cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert available_cpus(fake_machine(tmp_path, files)) == cpus


def test_threads_get_cores_of_their_own_only_when_they_take_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 2},{i % 2 + 2}" for i in range(4)}
    machine = fake_machine(tmp_path, {**pairs, "proc/self/cgroup": "0::/a\n"})
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert cores_to_pin(2, machine) == [(0, 2), (1, 3)]
    assert cores_to_pin(1, machine) == cores_to_pin(3, machine) == []
    fake_machine(tmp_path, {"sys/fs/cgroup/a/cpu.max": "150000 100000\n"})
    assert cores_to_pin(2, machine) == []
    fake_machine(tmp_path, {"sys/fs/cgroup/a/cpu.max": "200000 100000\n"})
    assert cores_to_pin(2, machine) == [(0, 2), (1, 3)]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 3})
    assert cores_to_pin(1, machine) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: nowhere else to be")
def test_pinned_threads_stay_where_they_were_put(native: NativeOps) -> None:
    """The caller on one CPU, the pool's thread on another, and threads that are not of the pool wherever they like."""
    program = """
import os, threading
from pathlib import Path
from pagoda.kernels.native.library import load
from pagoda.kernels.native_ops import NativeOps
first, second, *_ = sorted(os.sched_getaffinity(0))
idle = threading.Event()
bystander = threading.Thread(target=idle.wait)
bystander.start()
known = set(os.listdir("/proc/self/task"))
assert not NativeOps(load(), 2).pin_threads([(first,), (10**6,)])
assert {first, second} <= os.sched_getaffinity(0)
assert {first, second} <= os.sched_getaffinity(max(int(task) for task in set(os.listdir("/proc/self/task")) - known))
assert NativeOps(load(), 2).pin_threads([(first,), (second,)])
(worker,) = set(os.listdir("/proc/self/task")) - known
allowed = os.sched_getaffinity
assert allowed(0) == {first} and allowed(int(worker)) == {second}, (allowed(0), allowed(int(worker)))
assert {first, second} <= allowed(bystander.native_id)
assert load().functions.pagoda_shares_done(2) == 3
idle.set()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_scratch_of_a_thread_is_freed_when_it_ends(native: NativeOps) -> None:
    """Each LLM has a thread of its own: five in a row end where one does."""
    program = """
import os, threading, torch
from pathlib import Path
from pagoda.kernels.linear.quantize import quantize
from pagoda.kernels.native.library import load
from pagoda.kernels.native_ops import NativeOps
ops = NativeOps(load(), 1)
weight = ops.prepare_quantized_linear(quantize(torch.ones(64, 8192)), torch.float32)
x = torch.ones(4096, 8192)
held = []
for _ in range(6):
    thread = threading.Thread(target=ops.linear, args=(x, weight))
    thread.start()
    thread.join()
    held.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20)
print(*held)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    held = [int(mib) for mib in done.stdout.split()]
    assert len(held) == 6, done.stderr
    # The allocator may keep what an early thread used, once; scratch that stayed would be 32 MiB or more per thread.
    assert held[-1] - max(held[:3]) < 32, held


def test_kernels_that_bring_an_openmp_runtime_are_not_loaded(
    native: NativeOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([["/x/libgomp.so.1"], ["/x/libgomp.so.1", "/y/libomp.so"]])
    monkeypatch.setattr("pagoda.kernels.native.library.openmp_runtimes", lambda: next(found))
    load.cache_clear()
    with pytest.raises(AssertionError, match="/y/libomp.so"):
        load()


def test_memory_uses_huge_pages_if_the_system_has_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system gives no huge pages")
    before = huge_bytes()
    memory = huge_zeros(64 << 20)
    assert memory.data_ptr() % (2 << 20) == 0
    assert not memory.any()
    memory.fill_(1)
    assert huge_bytes() - before >= 32 << 20, "a shared mapping, or one that was never asked for, has none"


def huge_bytes() -> int:
    """What this process has on huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.parametrize("threads", [2, 3, 4])
@pytest.mark.parametrize("test_delay", [0, 100, 300])
def test_no_region_ends_before_its_shares(threads: int, test_delay: int) -> None:
    """A thread that lost its core as it was about to report an end must not end the region that comes after."""
    regions = load().functions["pagoda_unfinished_regions"]
    regions.argtypes, regions.restype = (ctypes.c_int, ctypes.c_int64, ctypes.c_int), ctypes.c_int64
    assert regions(threads, 30_000, test_delay) == 0
