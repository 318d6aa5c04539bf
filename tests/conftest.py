"""What all tests need of the process they run in."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

# A shell that starts a job in the background tells it, and all its children, to ignore Ctrl-C. The tests that send one
# mean a process that a person started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Triton decides while it is imported whether kernels are compiled for a GPU or interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def without_triton() -> Callable[[str], NoReturn]:
    """What a test does that needs Triton where it is not installed: skip, and in CI (CI=true) fail."""
    return lambda why: _give_up(f"CI must have Triton, and this test needs it: {why}", why)


@pytest.fixture(scope="session")
def without_native() -> Callable[[str], NoReturn]:
    """What a test does that needs the compiled kernels where they cannot be had: skip, and in CI (CI=true) fail."""

    return lambda why: _give_up(f"CI must have a C++ compiler, and this test needs it: {why}", why)


def _give_up(in_ci: str, why: str) -> NoReturn:
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(in_ci, pytrace=False)
    pytest.skip(why)
