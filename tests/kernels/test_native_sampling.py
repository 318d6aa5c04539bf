"""The native sampler against its definition."""

import dataclasses

import numpy as np
import pytest
import torch

from pagoda.base.errors import InvariantBroken
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.sampling import library, reference
from pagoda.kernels.sampling.batch import DrawParams
from pagoda.kernels.sampling.native import NativeSampling
from tests.kernels.test_sampling import KINDS, columns, random_draws


@pytest.fixture
def sampling(native: NativeOps) -> NativeSampling:
    return NativeSampling(native.library, 1)


def below_one(params: DrawParams) -> DrawParams:
    """Keep u away from 1, where the token depends on the last bit of the total, and so on the order of summation."""
    return dataclasses.replace(params, uniform=np.minimum(params.uniform, 1 - 1e-9))


@pytest.mark.parametrize("vocab", [2, 7, 63, 64, 65, 129, 1000, 5003])
@pytest.mark.parametrize("kind", KINDS)
def test_native_equals_reference(sampling: NativeSampling, vocab: int, kind: str) -> None:
    logits, params = random_draws(kind, 64, vocab)
    params = below_one(params)
    got = sampling.sample(logits, params)
    assert got.tolist() == reference.sample(logits, params).tolist()
    last = sampling.sample(logits, dataclasses.replace(params, uniform=np.full(64, 1 - 2.0**-53)))
    assert logits.gather(1, last.unsqueeze(1)).isfinite().all()


def test_a_nucleus_holds_at_least_one_token(sampling: NativeSampling) -> None:
    """However small top_p; the settings refuse what float32 makes 0 of, and the kernels do not rely on it."""
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    for top_k in (0, 2):
        for top_p in (0.0, 1e-45, 1e-30):
            columns = np.ones(1, np.float32), np.array([top_k], np.int32), np.array([top_p], np.float32)
            params = DrawParams(*columns, np.zeros(1, np.float32), np.full(1, 0.99))
            assert sampling.sample(logits, params).tolist() == [1]


def test_a_large_vocabulary(sampling: NativeSampling) -> None:
    rng = np.random.default_rng(5)
    n, vocab = 12, 49_153
    logits = torch.from_numpy(rng.normal(0, 2, (n, vocab)).astype(np.float32))
    one = np.ones(n, np.float32)
    top_k = np.array([0, 0, 0, 3000, 50, 40_000] * 2, np.int32)
    top_p = np.array([0.1, 0.9, 0.999, 0.5, 1.0, 1.0] * 2, np.float32)
    params = DrawParams(one, top_k, top_p, 0.001 * one, rng.random(n))
    assert sampling.sample(logits, params).tolist() == reference.sample(logits, params).tolist()


def test_threads_and_neighbours_change_nothing(native: NativeOps, sampling: NativeSampling) -> None:
    rng = np.random.default_rng(3)
    n, vocab = 40, 3001
    logits = torch.from_numpy(rng.normal(0, 2, (n, vocab)).astype(np.float32))
    params = below_one(columns(rng, n, vocab))
    together = NativeSampling(native.library, 3).sample(logits, params)
    alone = [sampling.sample(logits[i : i + 1], params[i : i + 1]).item() for i in range(n)]
    assert together.tolist() == alone
    assert together.tolist() == library.sample(logits, params).tolist()


@pytest.mark.parametrize("vocab", [2, 31, 32, 33, 65, 1003, 49_153])
def test_mask_logits(native: NativeOps, sampling: NativeSampling, vocab: int) -> None:
    """All versions, some rows of a batch whose rows are apart, with whole words of ones and of zeros."""
    rng = np.random.default_rng(vocab)
    wide = torch.from_numpy(rng.normal(0, 3, (9, vocab + 3)).astype(np.float32))
    bits = rng.integers(-(2**31), 2**31, (4, -(-vocab // 32)), np.int64).astype(np.int32)
    bits[0], bits[1] = -1, 0
    bits[2, ::2] = -1
    draws = np.array([0, 3, 4, 8])
    results = []
    for mask in (reference.mask_logits, library.mask_logits, sampling.mask_logits):
        logits = wide.clone()
        mask(logits[:, :vocab], draws, bits)
        results.append(logits)
    threads = wide.clone()
    NativeSampling(native.library, 3).mask_logits(threads[:, :vocab], draws, bits)
    assert all(one.equal(results[0]) for one in (*results, threads))
    assert results[0][[0, 1, 2, 5, 6, 7]].equal(wide[[0, 1, 2, 5, 6, 7]])
    assert results[0][3, :vocab].isneginf().all()
    assert results[0][3, vocab:].equal(wide[3, vocab:])


def test_mask_logits_refuses_rows_outside_its_memory(sampling: NativeSampling) -> None:
    logits, bits = torch.zeros(3, 70), np.zeros((2, 3), np.int32)
    for draws, wrong in (([0, 3], bits), ([-1, 0], bits), ([0], bits), ([0, 1], bits[:, :2])):
        with pytest.raises(InvariantBroken, match="mask_logits"):
            sampling.mask_logits(logits, np.array(draws), wrong)


def test_best_tokens(sampling: NativeSampling) -> None:
    logits = torch.randn(7, 1003, generator=torch.Generator().manual_seed(0)).round()
    logits[3, 500] = torch.nan
    logits[4] = -torch.inf
    logits[5, 1002] = 99.0
    values, ids = sampling.best_tokens(logits)
    want = logits.max(-1)
    assert values.isnan().tolist() == [False] * 3 + [True] + [False] * 3
    others = [0, 1, 2, 4, 5, 6]
    assert values[others].equal(want.values[others])
    assert ids[others].tolist() == [int(np.argmax(row)) for row in logits[others].numpy()]
    assert logits[:, 1:].stride(0) == 1003  # rows may be apart
    assert sampling.best_tokens(logits[5:6, 1:])[1].item() == 1001


@pytest.mark.parametrize(("vocab", "k"), [(5, 5), (5, 9), (70, 0), (1003, 20), (9000, 200)])
def test_top_logprobs(sampling: NativeSampling, vocab: int, k: int) -> None:
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(0)) * 5
    logits[1, 1:] = -torch.inf
    chosen = torch.arange(9) % vocab
    got, want = sampling.top_logprobs(logits, chosen, k), reference.top_logprobs(logits, chosen, k)
    assert got.ranks.equal(want.ranks)
    torch.testing.assert_close(got.logprobs, want.logprobs, atol=1e-5, rtol=1e-5)
    finite = want.logprobs.isfinite()
    assert got.token_ids[finite].equal(want.token_ids[finite])


def test_logprobs_of_rows_with_nan(sampling: NativeSampling) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    logits[1, 50] = torch.nan
    got = sampling.top_logprobs(logits, torch.tensor([50, 50, 50]), 3)
    assert got.logprobs.isnan().all(1).tolist() == [False, True, False]


def test_equal_logprobs_are_ordered_by_id(sampling: NativeSampling) -> None:
    got = sampling.top_logprobs(torch.zeros(1, 200), torch.tensor([7]), 4)
    assert got.token_ids.tolist() == [[7, 0, 1, 2, 3]]
    assert got.ranks.tolist() == [1]
