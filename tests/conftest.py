"""What all tests need of the process they run in."""

import os
import signal
from collections.abc import Callable
from typing import NoReturn

import pytest

# A shell that starts a job in the background tells it, and all its children, to ignore Ctrl-C. The tests that send one
# mean a process that a person started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def without_native() -> Callable[[str], NoReturn]:
    """What a test does that needs the compiled kernels where they cannot be had: skip, and in CI (CI=true) fail."""

    def give_up(why: str) -> NoReturn:
        if os.environ.get("CI", "").lower() in ("true", "1"):
            pytest.fail(f"CI must have a C++ compiler, and this test needs it: {why}", pytrace=False)
        pytest.skip(why)

    return give_up
