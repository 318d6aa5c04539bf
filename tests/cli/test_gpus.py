"""`pagoda doctor` and `pagoda plan` on a machine with a GPU; the GPU is made up."""

import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from pagoda.base.config import EngineConfig
from pagoda.base.errors import CapacityError
from pagoda.cli.layouts import layouts_of, proposal
from pagoda.cli.main import main
from pagoda.cli.plan import Plan, _print, make_plan
from pagoda.worker.devices.cuda import describe_gpus, driver_version
from tests.engine.driver import write_tiny_llama
from tests.fake_cuda import FakeCuda

NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version:  gcc 12.3.0\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    path = tmp_path / "version"
    path.write_text(NVRM)
    return path


def test_doctor_knows_the_card(monkeypatch: pytest.MonkeyPatch, proc: Path) -> None:
    card = FakeCuda(monkeypatch)
    card.allocate(16 << 30)
    gpu, versions = describe_gpus(proc).splitlines()
    assert gpu == "NVIDIA Made-Up 80GB, 64.0 GiB of 80.0 GiB free, sm_90, 132 multiprocessors"
    assert versions.startswith(f"driver 570.86.15, torch {torch.__version__} for CUDA 13.0, ")
    assert "Triton" in versions


def test_doctor_says_what_an_old_card_lacks(monkeypatch: pytest.MonkeyPatch, proc: Path) -> None:
    FakeCuda(monkeypatch, capability=(7, 5))
    assert "sm_75" in describe_gpus(proc)
    assert "no bfloat16 arithmetic: float16 takes its place" in describe_gpus(proc)
    FakeCuda(monkeypatch, capability=(8, 0))
    said = describe_gpus(proc)
    assert "float16" not in said
    assert "below sm_89 there are no products of 8-bit floats: quantization='fp8' saves memory only" in said
    FakeCuda(monkeypatch, capability=(8, 9))
    assert "below" not in describe_gpus(proc)


def test_doctor_says_what_triton_lacks(
    monkeypatch: pytest.MonkeyPatch, proc: Path, tmp_path: Path, without_triton: Callable[[str], NoReturn]
) -> None:
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    FakeCuda(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()
    assert "needs" not in describe_gpus(proc)
    monkeypatch.delenv("CC")
    assert describe_gpus(proc).endswith(", which needs a C compiler (gcc or clang)")
    (tmp_path / "Python.h").unlink()
    assert describe_gpus(proc).endswith("a C compiler (gcc or clang) and Python's header files (python3-dev)")


def test_doctor_says_which_of_several_cards_is_used(monkeypatch: pytest.MonkeyPatch, proc: Path) -> None:
    FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    first, second, used, _ = describe_gpus(proc).splitlines()
    assert (first[:10], second[:10]) == ("0: NVIDIA ", "1: NVIDIA ")
    assert used == "an engine uses GPU 0; CUDA_VISIBLE_DEVICES chooses another"


def test_doctor_says_why_a_card_cannot_be_used(monkeypatch: pytest.MonkeyPatch, proc: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert describe_gpus(tmp_path / "nothing") == "none that torch can use"
    monkeypatch.setattr(torch.version, "cuda", None)
    said = describe_gpus(proc)
    assert "there is driver 570.86.15" in said
    assert "built for CPUs only" in said
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    said = describe_gpus(proc)
    assert "built for CUDA 13.0: the driver may be too old for it, or CUDA_VISIBLE_DEVICES hides the GPU" in said


@pytest.mark.parametrize(
    ("text", "version"), [(NVRM, "570.86.15"), ("NVRM version: NVIDIA  535.104  x", "535.104"), ("?", None)]
)
def test_driver_versions(tmp_path: Path, text: str, version: str | None) -> None:
    path = tmp_path / "version"
    path.write_text(text)
    assert driver_version(path) == version


def test_plan_counts_the_cards_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_llama(tmp_path)
    plans = []
    for total in (1 << 30, 2 << 30):
        with monkeypatch.context() as patch:
            FakeCuda(patch, total)
            plans.append(make_plan(EngineConfig.from_options(model=folder, device="cuda", max_model_len=64)))
    small, large = plans
    assert (small.memory_available, large.memory_available) == (1 << 30, 2 << 30)
    assert large.kv_cache / small.kv_cache == pytest.approx(2, rel=0.01)
    left = large.memory_available - _margin(large) - large.weights_memory
    assert 0.94 < large.kv_cache / left <= 0.95
    _print(large)
    printed = " ".join(capsys.readouterr().out.split())
    assert "device NVIDIA Made-Up 80GB, 2.0 GiB of 2.0 GiB free, sm_90" in printed
    assert "tokens, less what the largest step takes, which is measured at the start" in printed
    assert " attention " not in printed


def _margin(plan: Plan) -> int:
    """Return what an engine leaves free of a GPU that nothing else uses."""
    return int(plan.memory_available * 0.02)


def test_plan_says_what_would_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, card = write_tiny_llama(tmp_path), FakeCuda(monkeypatch, 2 << 30)

    def plan(**options: object):
        return make_plan(EngineConfig.from_options(model=folder, device="cuda", max_model_len=64, **options))

    large = 3 << 30
    left = rf"kv_cache_memory={large} does not fit in the GPU's memory, of which the weights leave 2\.0 GiB"
    with pytest.raises(CapacityError, match=left):
        plan(kv_cache_memory=large)
    _print(plan(kv_cache_memory=1 << 20))
    assert "largest step" not in capsys.readouterr().out
    margin = int((2 << 30) * 0.02)
    card.allocate((2 << 30) - margin - 200 * 1024)  # of another process
    with pytest.raises(CapacityError, match=r" for them; quantization='fp8' or quantization='int8' would fit"):
        plan()
    assert plan(quantization="fp8").num_blocks
    card.allocate(190 * 1024)
    for options in ({}, {"quantization": "fp8"}):
        with pytest.raises(CapacityError, match=r" for them; take a smaller model"):
            plan(**options)


def test_plan_proposes_the_fewest_workers_that_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, card = write_tiny_llama(tmp_path), FakeCuda(monkeypatch, 2 << 30)

    def plan(**options: object) -> Plan:
        return make_plan(EngineConfig.from_options(model=folder, device="cuda", max_model_len=64, **options))

    made = plan()
    assert made.proposal == "one worker is enough"
    by_size = {(one.tensor_parallel_size, one.pipeline_parallel_size): one for one in made.layouts}
    assert by_size[4, 1].weights < by_size[2, 1].weights < by_size[1, 1].weights
    assert by_size[2, 1].kv_bytes == by_size[4, 1].kv_bytes == by_size[1, 1].kv_bytes // 2  # two KV heads
    assert set(by_size) == {(size, stages) for size in (1, 2, 4) for stages in (1, 2)}  # four heads, two layers
    _print(made)
    assert "tensor parallel" in capsys.readouterr().out
    needed = by_size[2, 1].weights + by_size[2, 1].kv_bytes
    card.allocate((2 << 30) - _margin(made) - needed - 1024)  # of another process
    layouts = layouts_of(EngineConfig.from_options(model=folder, device="cuda", max_model_len=64))
    proposed = proposal(layouts, is_host=False)
    assert proposed == "tensor_parallel_size=2 and pipeline_parallel_size=1 fit on GPUs like this one"
    card.allocate(needed)
    layouts = layouts_of(EngineConfig.from_options(model=folder, device="cuda", max_model_len=64))
    assert "no way to divide it fits" in proposal(layouts, is_host=False)


def test_plan_of_a_model_that_does_not_fit_proposes_how_to_divide_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, card = write_tiny_llama(tmp_path), FakeCuda(monkeypatch, 2 << 30)
    options = ["--model", str(folder), "--device", "cuda", "--max-model-len", "64"]
    two = min(layouts_of(EngineConfig.from_options(model=folder, device="cuda")), key=lambda one: one.weights)
    card.allocate((2 << 30) - int((2 << 30) * 0.02) - two.weights - two.kv_bytes - 1024)
    with pytest.raises(SystemExit):
        main(["plan", *options])
    printed = capsys.readouterr()
    assert "weights per worker" in printed.out
    assert "fit on GPUs like this one" in printed.err
