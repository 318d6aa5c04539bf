"""The implementations of Ops under test."""

import pytest

from pagoda.kernels.native.build import NativeUnavailable
from pagoda.kernels.native.library import load
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.kernels.torch_ops import TorchOps


@pytest.fixture(scope="session")
def native() -> NativeOps:
    try:
        return NativeOps(load(), threads=1)
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=["torch", "native"])
def fast(request: pytest.FixtureRequest) -> Ops:
    return TorchOps() if request.param == "torch" else request.getfixturevalue("native")


@pytest.fixture
def reference() -> ReferenceOps:
    return ReferenceOps()
