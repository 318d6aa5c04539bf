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
