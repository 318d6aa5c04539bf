from pathlib import Path

import pytest

from pagoda.cli import doctor
from pagoda.cli.main import main


def test_says_what_there_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "wheels" / "some-model-1.0").mkdir(parents=True)
    (tmp_path / "wheels" / "some-model-1.0" / "x.gguf").write_bytes(b"x" * 2048)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--cache-dir", str(tmp_path)])
    assert not ended.value.code
    out = capsys.readouterr().out
    for name in ("pagoda", "cpu", "threads", "memory", "compiler", "packages", "gpu", "kernels", "cache"):
        assert f"\n{name} " in "\n" + out
    assert "some-model-1.0: 2.0 KiB" in out


def test_what_is_broken_is_shown_and_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise RuntimeError("no [such] thing")

    monkeypatch.setattr(doctor, "gpu_line", broken)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    assert "broken: RuntimeError: no [such] thing" in capsys.readouterr().out


def test_cpu_line_names_what_matters(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: A CPU\nflags\t\t: fpu avx2 fma avx512f\n\nmodel name\t: second\n")
    assert doctor.cpu_line(cpuinfo) == "A CPU; avx2, fma, avx512f"
    cpuinfo.write_text("model name\t: Old\nflags\t\t: fpu\n")
    assert doctor.cpu_line(cpuinfo).startswith("Old; none of avx2")


def test_an_empty_cache_is_said(tmp_path: Path) -> None:
    assert doctor.cache_lines(str(tmp_path)) == f"{tmp_path}\nnothing fetched yet"
