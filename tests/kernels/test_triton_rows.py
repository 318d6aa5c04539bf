"""Triton kernels with a row per program: equal to the reference, and the same bits whatever other rows there are."""

from typing import Any

import pytest
import torch

from pagoda.kernels.moe.reference import route
from pagoda.kernels.sampling import reference
from tests.device_under_test import CarriedOps, DeviceUnderTest
from tests.kernels.test_bidirectional import BF16, attend, rows_of

F32, F16 = torch.float32, torch.float16


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("vocab", "k"), [(5, 5), (5, 9), (70, 0), (2053, 20), (5000, 1)])
def test_top_logprobs(triton_ops: Any, device_under_test: DeviceUnderTest, vocab: int, k: int) -> None:
    logits = draw(9, vocab) * 5
    logits[1, 1:] = -torch.inf
    logits[2] -= 1000
    chosen = torch.arange(9) % vocab
    want = reference.top_logprobs(logits, chosen, k)
    logits, chosen = logits.to(device_under_test.device), chosen.to(device_under_test.device)
    got = triton_ops.top_logprobs(logits, chosen, k)
    assert got.ranks.cpu().equal(want.ranks)
    torch.testing.assert_close(got.logprobs.cpu(), want.logprobs, atol=1e-5, rtol=1e-5)
    finite = want.logprobs.isfinite()
    assert got.token_ids.cpu()[finite].equal(want.token_ids[finite])
    alone = triton_ops.top_logprobs(logits[3:4], chosen[3:4], k)
    assert got.logprobs[3:4].equal(alone.logprobs)


def test_equal_logprobs_are_ordered_by_id(triton_ops: Any, device_under_test: DeviceUnderTest) -> None:
    logits = torch.zeros(2, 3000)
    logits[1, 2500:] = 1.0
    logits[1, 7] = 2.0
    got = triton_ops.top_logprobs(*(x.to(device_under_test.device) for x in (logits, torch.tensor([7, 2600]))), 4)
    assert got.token_ids.tolist() == [[7, 0, 1, 2, 3], [2600, 7, 2500, 2501, 2502]]
    assert got.ranks.tolist() == [1, 2]


def test_logprobs_of_rows_with_nan(triton_ops: Any, device_under_test: DeviceUnderTest) -> None:
    logits = draw(3, 100)
    logits[1, 50] = torch.nan
    got = triton_ops.top_logprobs(*(x.to(device_under_test.device) for x in (logits, torch.tensor([50, 50, 50]))), 3)
    assert got.logprobs.isnan().all(1).tolist() == [False, True, False]
    assert ((got.token_ids >= 0) & (got.token_ids < 100)).all()
    empty = triton_ops.top_logprobs(logits[:0].to(device_under_test.device), got.ranks[:0].long(), 3)
    assert empty.logprobs.shape[0] == 0


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("experts", "top_k", "dtype"), [(128, 8, F32), (6, 2, F16), (3, 3, F32), (1, 1, BF16)], ids=str
)
def test_routing(
    make_triton_ops: Any,
    device_under_test: DeviceUnderTest,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
    renormalize: bool,
) -> None:
    make_triton_ops()
    from pagoda.kernels.moe import triton_moe

    logits = (draw(5, experts) * 4).round().to(dtype)  # rounded: some are equal
    ids, weights = triton_moe.route(logits.to(device_under_test.device), top_k, renormalize)
    want_ids, want_weights = route(logits, top_k, renormalize)
    assert ids.cpu().equal(want_ids)
    torch.testing.assert_close(weights.cpu(), want_weights, atol=1e-6, rtol=1e-5)
    alone = triton_moe.route(logits[2:3].to(device_under_test.device), top_k, renormalize)
    assert weights[2:3].equal(alone[1])
    logits[1, 0] = torch.nan
    ids, weights = triton_moe.route(logits.to(device_under_test.device), top_k, renormalize)
    assert ((ids >= 0) & (ids < experts)).all()
    assert weights[1].isnan().all()


def test_bidirectional_attention_in_any_batch(triton_ops: Any, device_under_test: DeviceUnderTest) -> None:
    """Rows of several tiles and of one token, in a window and without one."""
    ops = CarriedOps(triton_ops, device_under_test.device)
    for window in (5, 0):
        shape = (6, 2, 48, window, 0.0)
        rows = rows_of(shape, (40, 7, 40, 90, 1), BF16)
        together = attend(ops, shape, rows)
        assert together.equal(torch.cat([attend(ops, shape, [row]) for row in rows]))
