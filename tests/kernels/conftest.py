"""The implementations of Ops under test."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NoReturn, cast

import pytest

from pagoda.kernels.native.build import Compiler, NativeUnavailable, find_compiler
from pagoda.kernels.native.library import load
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.kernels.torch_ops import TorchOps
from tests.device_under_test import CarriedOps, DeviceUnderTest

_FIXTURES = {"native": "native", "triton": "triton_ops"}


@pytest.fixture(scope="session")
def native(without_native: Callable[[str], NoReturn]) -> NativeOps:
    try:
        return NativeOps(load(), threads=1)
    except NativeUnavailable as error:
        without_native(str(error))


@pytest.fixture(scope="session")
def compiler(without_native: Callable[[str], NoReturn]) -> Compiler:
    try:
        return find_compiler()
    except NativeUnavailable as error:
        without_native(str(error))


@pytest.fixture(scope="session")
def make_triton_ops(without_triton: Callable[[str], NoReturn]) -> Callable[..., Ops]:
    """TritonOps, the class: on a GPU where there is one, or in the interpreter (see tests/conftest.py)."""
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    from pagoda.kernels.triton_ops import TritonOps, is_interpreted

    if is_interpreted():
        from tests.kernels.checked_memory import check_memory

        check_memory()
    return cast(Callable[..., Ops], TritonOps)


@pytest.fixture(scope="session")
def triton_ops(make_triton_ops: Callable[..., Ops]) -> Ops:
    return make_triton_ops()


@pytest.fixture(params=["torch", "native", pytest.param("triton", marks=pytest.mark.slow)])
def fast(request: pytest.FixtureRequest, device_under_test: DeviceUnderTest) -> Ops:
    """Each implementation; on a GPU (--device cuda), where the tests' tensors are carried to it and back."""
    device = device_under_test.device
    if device.type != "cpu" and request.param == "native":
        pytest.skip("the native kernels run on a CPU")
    ops = TorchOps() if request.param == "torch" else request.getfixturevalue(_FIXTURES[request.param])
    return cast(Ops, ops if device.type == "cpu" else CarriedOps(ops, device))


@pytest.fixture
def reference() -> ReferenceOps:
    return ReferenceOps()
