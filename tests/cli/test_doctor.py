import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.cli import doctor
from pagoda.cli.main import main
from pagoda.kernels.native import threads, variants


def doctor_in_a_fresh_process(*arguments: str) -> str:
    """Return what it prints. Other tests may have loaded packages with OpenMP runtimes of their own."""
    command = [sys.executable, "-m", "pagoda", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def test_doctor_reports_the_hardware(tmp_path: Path) -> None:
    (tmp_path / "wheels" / "some-model-1.0").mkdir(parents=True)
    (tmp_path / "wheels" / "some-model-1.0" / "x.gguf").write_bytes(b"x" * 2048)
    out = doctor_in_a_fresh_process("--cache-dir", str(tmp_path))
    for name in ("pagoda", "cpu", "threads", "memory", "compiler", "packages", "gpu", "kernels", "openmp", "cache"):
        assert f"\n{name} " in "\n" + out
    assert "some-model-1.0: 2.0 KiB" in out


def test_problems_are_shown_and_set_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise RuntimeError("no [such] thing")

    monkeypatch.setattr(doctor, "gpu_line", broken)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    assert "broken: RuntimeError: no [such] thing" in capsys.readouterr().out


def test_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(doctor_in_a_fresh_process("--json"))
    assert (found["healthy"], found["broken"]) == (True, [])
    assert {"cpu", "threads", "memory", "compiler", "packages", "gpu", "kernels", "openmp", "cache"} <= found.keys()

    def broken() -> str:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "gpu_line", broken)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json"])
    assert ended.value.code == 1
    assert "gpu" in json.loads(capsys.readouterr().out)["broken"]


def test_cpu_line_names_what_matters(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: A CPU\nflags\t\t: fpu avx2 fma avx512f\n\nmodel name\t: second\n")
    assert doctor.cpu_line(cpuinfo) == "A CPU; avx2, fma, avx512f"
    cpuinfo.write_text("model name\t: Old\nflags\t\t: fpu\n")
    assert doctor.cpu_line(cpuinfo).startswith("Old; none of avx2")


def test_an_empty_cache_is_reported(tmp_path: Path) -> None:
    assert doctor.cache_lines(str(tmp_path)) == f"{tmp_path}\nnothing fetched yet"


def test_two_openmp_runtimes_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "openmp_runtimes", lambda: ["/a/libgomp.so.1", "/b/libiomp5.so"])
    with pytest.raises(RuntimeError, match="2 runtimes in one process.*libiomp5"):
        doctor.openmp_line()


def test_runtimes_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    lines = [
        "/x/libgomp-24e2ab19.so.1.0.0",
        "/x/libgomp-24e2ab19.so.1.0.0",
        "/y/libomp.so",
        "/y/libcomputer.so",
        "[heap]",
    ]
    (tmp_path / "proc/self/maps").write_text("\n".join(f"7f00-7f10 r-xp 0 00:00 1 {line}" for line in lines))
    assert threads.openmp_runtimes(tmp_path) == ["/x/libgomp-24e2ab19.so.1.0.0", "/y/libomp.so"]


def test_the_threads_line_names_the_limit() -> None:
    assert "by affinity" in doctor.threads_line()
    assert "quota" in doctor.threads_line()


def test_without_a_compiler_prebuilt_kernels_need_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt install g++" in doctor.compiler_line()
    monkeypatch.setattr(variants, "prebuilt", lambda: tmp_path / "kernels-avx2.so")
    assert doctor.compiler_line() == "none, and none is needed: the kernels are prebuilt"
