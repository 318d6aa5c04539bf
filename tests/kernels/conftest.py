"""The implementations of Ops under test."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NoReturn

import pytest

from pagoda.kernels.native.build import Compiler, NativeUnavailable, find_compiler
from pagoda.kernels.native.library import load
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.kernels.torch_ops import TorchOps


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
    """TritonOps, the class: on a GPU, or in the interpreter (see tests/conftest.py)."""
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    from pagoda.kernels.triton_ops import TritonOps

    return TritonOps


@pytest.fixture(scope="session")
def triton_ops(make_triton_ops: Callable[..., Ops]) -> Ops:
    return make_triton_ops()


@pytest.fixture(params=["torch", "native", pytest.param("triton", marks=pytest.mark.slow)])
def fast(request: pytest.FixtureRequest) -> Ops:
    if request.param == "torch":
        return TorchOps()
    return request.getfixturevalue("native" if request.param == "native" else "triton_ops")


@pytest.fixture
def reference() -> ReferenceOps:
    return ReferenceOps()
