"""The implementations of Ops under test."""

from collections.abc import Callable
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


@pytest.fixture(params=["torch", "native"])
def fast(request: pytest.FixtureRequest) -> Ops:
    return TorchOps() if request.param == "torch" else request.getfixturevalue("native")


@pytest.fixture
def reference() -> ReferenceOps:
    return ReferenceOps()
