"""The fixtures that all tests share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 failed"), ("", "1 skipped")])
def test_in_ci_a_missing_compiler_is_a_failure(ci: str, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(without_native):\n    without_native('no compiler: g++')\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-rA", "test_one.py"]
    env = {**os.environ, "CI": ci, "PYTHONPATH": os.getcwd()}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert outcome in run.stdout
    assert "no compiler: g++" in run.stdout


def test_without_a_gpu_the_tests_of_numbers_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(
        "def test_numbers(device_under_test):\n    assert 0\n\n\ndef test_other():\n    assert 0\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-rs", "test_two.py"]
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([*command, "--device", "cuda"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "1 skipped, 1 deselected" in run.stdout
    assert "no CUDA device" in run.stdout
    on_cpu = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "2 failed" in on_cpu.stdout
