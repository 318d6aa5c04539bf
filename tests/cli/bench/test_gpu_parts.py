"""benchmarks/gpu.py: its parts have names, and it says what it cannot do here."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import IDLE_BATCHES
from benchmarks.gpu import SHAPES as MEASURED
from benchmarks.gpu import WORKLOADS as RUN
from benchmarks.gpu_tests import FILES
from benchmarks.make_random_model import SHAPES, config_of
from benchmarks.workload import WORKLOADS

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_its_parts() -> None:
    assert set(MEASURED) <= set(SHAPES)
    assert set(RUN) <= set(WORKLOADS)
    kinds = [config_of(SHAPES[shape])["model_type"] for shape in MEASURED]
    assert kinds == ["qwen3", "llama", "llama", "qwen3_moe"]
    listed = run("--list").stdout.split()
    assert listed[:3] == ["ceilings", "tests:kernels/test_triton", "qwen3-0.6b:nano256"]
    assert listed[-2:] == ["host", "compile"]
    num_variants = 3 * len(("invariant", "sampled", "eager")) + len(("transformers", "vllm"))
    num_parts = 3 + 2 * len(FILES) + len(MEASURED) * len(RUN) + len(IDLE_BATCHES) + num_variants
    assert len(listed) == len(set(listed)) == num_parts
    assert run("--list", "--only", "llama-3.1-8b:decode").stdout.split() == [
        f"llama-3.1-8b:decode{batch}" for batch in (1, 8, 64, 256)
    ]


def test_what_it_cannot_do(tmp_path: Path) -> None:
    assert "no part is called nothing" in run("--only", "nothing").stderr
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "without one only compile and host run" in run("--only", "ceilings", "--folder", str(tmp_path)).stderr
