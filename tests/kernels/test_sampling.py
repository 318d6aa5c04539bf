"""The batched sampler against its definition, and the definition against brute force."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pagoda.kernels.sampling import library, reference
from pagoda.kernels.sampling.batch import DrawParams
from tests.device_under_test import DeviceUnderTest

torch.set_num_threads(1)

Sample = Callable[[torch.Tensor, DrawParams], torch.Tensor]


@pytest.fixture
def sample(on: DeviceUnderTest) -> Sample:
    """The batched sampler, for logits on the CPU; a GPU has its own."""
    if on.device.type == "cpu":
        return library.sample
    ops = on.ops()

    def sample_there(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
        moved = logits.to(on.device, copy=True)
        return ops.sample(moved, params, ops.best_tokens(moved)).cpu()

    return sample_there


def columns(rng: np.random.Generator, n: int, vocab: int) -> DrawParams:
    temperature = rng.choice([0.0, 0.3, 1.0, 1.0, 5.0, 1e-5, 3.4e38], n).astype(np.float32)
    top_k = rng.choice([0, 0, 1, 2, 5, vocab - 1, vocab + 7, 2**31 - 1], n).astype(np.int32)
    top_p = rng.choice([1.0, 1.0, 0.001, 0.5, 0.9, 0.999, 1e-45], n).astype(np.float32)
    min_p = rng.choice([0.0, 0.0, 0.05, 0.5, 1.0, 1e-45], n).astype(np.float32)
    uniform = np.where(rng.random(n) < 0.1, 1 - 2.0**-53, rng.random(n))
    return DrawParams(temperature, top_k, top_p, min_p, uniform)


KINDS = ("normal", "ties", "flat", "masked")


def random_draws(kind: str, n: int, vocab: int) -> tuple[torch.Tensor, DrawParams]:
    """Random logits [n, vocab] of a kind, and parameters for them."""
    rng = np.random.default_rng([vocab, len(kind)])
    logits = torch.from_numpy(rng.normal(0, 3, (n, vocab)).astype(np.float32))
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros_like(logits)
    elif kind == "masked":
        logits[torch.from_numpy(rng.random((n, vocab)) < 0.7)] = -torch.inf
        logits[:, vocab // 2] = 0.0
    return logits, columns(rng, n, vocab)


@pytest.mark.parametrize("vocab", [2, 7, 127, 128, 129, 1000, 5003])
@pytest.mark.parametrize("kind", KINDS)
def test_batched_equals_reference(vocab: int, kind: str, sample: Sample) -> None:
    logits, params = random_draws(kind, 48, vocab)
    assert sample(logits, params).tolist() == reference.sample(logits, params).tolist()


def test_wide_filters_are_widened_until_exact(sample: Sample) -> None:
    rng = np.random.default_rng(5)
    n, vocab = 6, 9000
    logits = torch.from_numpy(rng.normal(0, 0.2, (n, vocab)).astype(np.float32))
    one = np.ones(n, np.float32)
    top_k = np.array([0, 0, 0, 3000, 50, 4000], np.int32)
    top_p = np.array([0.1, 0.9, 0.999, 0.5, 1.0, 1.0], np.float32)
    uniform = rng.random(n)
    params = DrawParams(one, top_k, top_p, 0 * one, uniform)
    assert sample(logits, params).tolist() == reference.sample(logits, params).tolist()


def test_a_row_does_not_depend_on_its_neighbours(sample: Sample) -> None:
    rng = np.random.default_rng(3)
    n, vocab = 24, 3001
    logits = torch.from_numpy(rng.normal(0, 2, (n, vocab)).astype(np.float32))
    params = columns(rng, n, vocab)
    together = sample(logits, params)
    for i in range(n):
        alone = sample(logits[i : i + 1].clone(), params[i : i + 1])
        assert alone.item() == together[i].item()


def test_definition_of_each_filter_by_hand() -> None:
    # Weights 4 : 3 : 2 : 1, at ids 2, 0, 3, 1.
    logits = torch.log(torch.tensor([[3.0, 1.0, 4.0, 2.0]])).float()

    def kept(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
        points = (np.arange(400) + 0.5) / 400
        many = logits.expand(len(points), -1)
        one = np.ones(len(points), np.float32)
        params = DrawParams(one, (one * top_k).astype(np.int32), one * np.float32(top_p), one * min_p, points)
        out = reference.sample(many, params)
        return set(out.tolist())

    assert kept() == {0, 1, 2, 3}
    assert kept(top_k=2) == {0, 2}
    assert kept(top_p=0.39) == {2}
    assert kept(top_p=0.41) == {2, 0}
    assert kept(top_p=0.91) == {0, 1, 2, 3}
    assert kept(top_k=2, top_p=0.5) == {2}  # 4 of the 7 left is more than half
    assert kept(min_p=0.6) == {2, 0}
    assert kept(min_p=1.0) == {2}


def test_sampled_shares_follow_the_weights(sample: Sample) -> None:
    logits = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4])).expand(20000, -1)
    n = logits.shape[0]
    uniform = reference.uniforms(np.full(n, 7, np.uint64), np.arange(n))
    one = np.ones(n, np.float32)
    tokens = sample(logits, DrawParams(one, np.zeros(n, np.int32), one, 0 * one, uniform))
    shares = torch.bincount(tokens, minlength=4) / n
    assert torch.allclose(shares, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.012)


def test_uniforms_are_a_pure_function_and_look_uniform() -> None:
    seeds = np.arange(1000, dtype=np.uint64)
    at_five = reference.uniforms(seeds, np.full(1000, 5))
    assert (at_five == reference.uniforms(seeds, np.full(1000, 5))).all()
    assert reference.uniforms(seeds[17:18], np.array([5]))[0] == at_five[17]
    for sample in (at_five, reference.uniforms(np.full(1000, 3, np.uint64), np.arange(1000))):
        assert 0 <= sample.min() < sample.max() < 1
        assert abs(sample.mean() - 0.5) < 0.04
        assert abs(np.corrcoef(sample[1:], sample[:-1])[0, 1]) < 0.1
    assert len(np.unique(reference.uniforms(np.full(10**5, 2**64 - 1, np.uint64), np.arange(10**5)))) == 10**5


def test_greedy_takes_the_lowest_of_equals(sample: Sample) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 5.0]])
    zero = np.zeros(2, np.float32)
    greedy = DrawParams(zero, zero.astype(np.int32), zero + 1, zero, zero.astype(float))
    assert sample(logits, greedy).tolist() == [1, 0]


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("vocab", [2, 129, 1003])
@pytest.mark.parametrize("kind", KINDS)
def test_processed_logits_are_what_is_sampled_from(kind: str, vocab: int, kernels: str, on: DeviceUnderTest) -> None:
    on.must_run(kernels)
    logits, params = random_draws(kind, 32, vocab)
    params.temperature[[3, 4]] = 1.0
    logits[3], logits[4] = torch.nan, -torch.inf
    stay = (params.temperature == 0) | np.isin(np.arange(32), (3, 4))
    expected = logits.clone()
    reference.process_logits(expected, params)
    assert torch.equal(expected[stay].nan_to_num(), logits[stay].nan_to_num())
    ops, moved = on.ops(kernels), logits.to(on.device, copy=True)
    best = ops.best_tokens(moved)
    tokens = ops.sample(moved, params, best).cpu()
    ops.process_logits(moved, params, best)
    torch.testing.assert_close(moved.cpu(), expected, rtol=1e-6, atol=0, equal_nan=True)
    assert moved.cpu().gather(1, tokens.unsqueeze(1))[~stay].isfinite().all()
    for i in range(5, 12):
        alone = logits[i : i + 1].to(on.device, copy=True)
        ops.process_logits(alone, params[i : i + 1], ops.best_tokens(alone))
        assert alone.equal(moved[i : i + 1])
