"""What all tests need of the process they run in."""

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn

import pytest
from hypothesis import settings

from pagoda.worker.devices import is_available

if TYPE_CHECKING:
    from tests.device_under_test import DeviceUnderTest

# A shell that starts a job in the background tells it, and all its children, to ignore Ctrl-C. The tests that send one
# mean a process that a person started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# How long an example takes is the machine's affair.
settings.register_profile("pagoda", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=1000)  # of `make test-slow`: --hypothesis-profile
settings.load_profile("pagoda")

# Triton decides while it is imported whether kernels are compiled for a GPU or interpreted.
if not is_available("cuda"):
    os.environ.setdefault("TRITON_INTERPRET", "1")


_OF_NUMBERS = {"device_under_test", "fast", "make_triton_ops", "triton_ops"}
"""Fixtures of tests that run on any device."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "cuda", "simulated"),
        default="cpu",
        help="cuda: run the tests of numbers and those marked gpu, and no others; without a GPU this is an error. "
        "simulated: run the tests of numbers on a GPU that the CPU simulates",
    )
    parser.addoption(
        "--kernels",
        choices=("auto", "native", "torch", "triton"),
        default="auto",
        help="of the engines under test. auto: Triton's on a GPU (in its interpreter where that is simulated). torch: "
        "much faster than an interpreter, to see on a simulated GPU that tensors are where they belong",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "simulated":
        from tests.simulated_gpu import simulated_gpu

        simulation = ExitStack()
        simulation.enter_context(simulated_gpu())
        config.add_cleanup(simulation.close)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA GPU here; leave it out to run on the CPU")
    is_real = config.getoption("--device") == "cuda"
    kept = [
        item
        for item in items
        if _OF_NUMBERS & _fixtures_of(item) or (is_real and item.get_closest_marker("gpu") is not None)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _fixtures_of(item: pytest.Item) -> set[object]:
    """Return the names of the fixtures that a test uses, and its parameters: it may ask for a fixture by one."""
    call = getattr(item, "callspec", None)
    named = [] if call is None else [value for value in call.params.values() if isinstance(value, str)]
    return {*getattr(item, "fixturenames", ()), *named}


@pytest.fixture(scope="session")
def device_under_test(pytestconfig: pytest.Config) -> "DeviceUnderTest":
    """The device of `--device`, with what an engine is started with on it."""
    import torch

    from tests.device_under_test import DeviceUnderTest

    kernels = pytestconfig.getoption("--kernels")
    if pytestconfig.getoption("--device") == "cpu":
        return DeviceUnderTest(torch.device("cpu"), "CPU", "float32", kernels)
    name = torch.cuda.get_device_name()
    return DeviceUnderTest(torch.device("cuda"), name, "float32", "triton" if kernels == "auto" else kernels)


@pytest.fixture(scope="session")
def on(device_under_test: "DeviceUnderTest") -> "DeviceUnderTest":
    """The device under test, for tests that hand it on to most of what they call."""
    return device_under_test


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
