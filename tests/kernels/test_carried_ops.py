"""Kernel tests on a GPU carry their tensors to it and back: here to other memory of the CPU."""

from typing import Any

import numpy as np
import pytest
import torch

from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.kernels.sampling.batch import DrawParams
from tests.device_under_test import CarriedOps
from tests.kernels.paged import Geometry, PagedRows, Sequence
from tests.kernels.test_ops import close

CPU = torch.device("cpu")


class Addresses:
    """Ops that note where the tensors are that they are given."""

    def __init__(self, ops: ReferenceOps) -> None:
        self._ops = ops
        self.seen: set[int] = set()

    def __getattr__(self, name: str):
        def call(*args: object, **kwargs: object) -> object:
            self.seen |= {arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            return getattr(self._ops, name)(*args, **kwargs)

        return call


def test_results_are_those_of_the_ops_and_arguments_are_elsewhere(reference: Any) -> None:
    addresses = Addresses(reference)
    ops = CarriedOps(addresses, CPU)
    x, weight = torch.randn(3, 64), torch.randn(64)
    close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    linear = ops.prepare_linear(torch.randn(8, 64))
    close(ops.linear(x, linear), reference.linear(x, linear))
    assert addresses.seen
    assert not addresses.seen & {x.data_ptr(), weight.data_ptr()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_what_changes_in_place_comes_back(reference: ReferenceOps, dtype: torch.dtype) -> None:
    geometry = Geometry(4, 2, 16, 8, int8_cache=dtype == torch.int8)
    generator = torch.Generator().manual_seed(0)
    rows = [Sequence(*(torch.randn(9, heads, 16, generator=generator) for heads in (4, 2, 2)))]
    found = []
    for ops in (reference, CarriedOps(reference, CPU)):
        paged = PagedRows(ops, geometry, rows, 0)  # type: ignore[arg-type]
        found.append([paged.step([(0, 5)], 0.25), paged.step([(0, 4)], 0.25), paged.cache.k])
    for here, there in zip(*found, strict=True):
        assert torch.equal(here.nan_to_num(), there.nan_to_num())
    logits = torch.randn(2, 40, generator=generator)
    masked = logits.clone()
    CarriedOps(reference, CPU).mask_logits(masked, np.array([1]), np.array([[5, 0]], np.int32))
    assert masked[1].isfinite().sum() == 2
    assert torch.equal(masked[0], logits[0])
    one, none, half = np.array([1.0]), np.array([0]), np.array([0.5])
    params = DrawParams(one, none, one, none, half)
    ops = CarriedOps(reference, CPU)
    best = ops.best_tokens(logits[:1])
    assert ops.sample(logits[:1], params, best).equal(reference.sample(logits[:1], params, best))
