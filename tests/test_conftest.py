"""The fixtures that all tests share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.getcwd(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Without plugins, which take longer to import than these tests to run."""


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 failed"), ("", "1 skipped")])
def test_in_ci_a_missing_compiler_is_a_failure(ci: str, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(without_native):\n    without_native('no compiler: g++')\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-rA", "test_one.py"]
    env = {**ENVIRONMENT, "CI": ci}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert outcome in run.stdout
    assert "no compiler: g++" in run.stdout


def test_without_a_gpu_the_device_cuda_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(
        "def test_numbers(device_under_test):\n    assert 0\n\n\ndef test_other():\n    assert 0\n\n\n"
        "import pytest\n\n\n"
        "@pytest.mark.parametrize('kernels', ['triton_ops', 'native'])\ndef test_by_name(kernels):\n    assert 0\n\n\n"
        "@pytest.mark.gpu\ndef test_of_a_card():\n    assert 0\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-rs", "test_two.py"]
    env = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([*command, "--device", "cuda"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--device cuda: torch sees no CUDA GPU here; leave it out to run on the CPU" in run.stderr
    (tmp_path / "conftest.py").write_text("import torch\n\ntorch.cuda.is_available = lambda: True\n")
    on_gpu = [*command, "--device", "cuda", "--collect-only"]
    collected = subprocess.run(on_gpu, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "3/5 tests collected (2 deselected)" in collected.stdout
