"""Every Triton kernel compiles for the GPUs it is meant for, hardly spilling registers, in the memory they have."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from pagoda.kernels.linear.triton_forms import prepare

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 99 * 1024  # what a program may have on the smallest GPUs since Ampere
SPILLED_BYTES = 96  # per thread: attention of prompts spills 84 on compute capability 8.0, the others little


def test_packed_checkpoints_are_reported_as_the_loader_makes_them(without_triton: Callable[[str], NoReturn]) -> None:
    """With zero points as integers, or with none; scales are all that is in float16."""
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    from benchmarks.kernel_report import symmetric_gptq, with_zero_points

    for group in (32, 64, 128):
        found = prepare(with_zero_points(16, 256, group), None)
        assert found.minima is not None
        assert (found.form, found.group, found.minima.dtype) == ("int4", group, torch.uint8)
        assert found.minima.shape == (256 // group, 16)
    symmetric = prepare(symmetric_gptq(16, 256, 128), None)
    assert (symmetric.form, symmetric.group, symmetric.minima) == ("int4", 128, None)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90"])
def test_kernels_compile_without_a_gpu(tmp_path: Path, arch: str, without_triton: Callable[[str], NoReturn]) -> None:
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.kernel_report", "--arch", arch]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    rows = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| ") and "`" in line]
    kernels = {row[1] for row in rows}
    assert {"`attend_splits`", "`attend_tiles`", "`merge_splits`", "`rms_norm`", "`rotary_write_kv`"} <= kernels
    assert {"`move_blocks`", "`sample`", "`expert_linear`", "`linear`", "`shrink`", "`expand`", "`gated`"} <= kernels
    titles = {row[0] for row in rows}
    assert {f"{what}, {form}" for what in ("linear", "experts") for form in ("AWQ", "GPTQ, symmetric")} <= titles
    for title, kernel, sm, _, registers, spilled, shared, ptx in rows:
        assert sm == arch
        assert int(registers) <= 255, (title, kernel)
        assert int(spilled) <= SPILLED_BYTES, (title, kernel)
        assert int(shared) <= SHARED_BYTES, (title, kernel)
        assert int(ptx) > 0
