"""Each sampling feature against its definition by loops, and rows against their neighbours."""

import numpy as np
import pytest
import torch

from pagoda.base.sampling_params import SamplingParams
from pagoda.kernels.sampling.reference import uniforms
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.sampler import Sampled, Sampler
from tests.worker.hand_made import i32, row_init, step

VOCAB = 50
EOS = (2, 3)


def make_table(params: list[SamplingParams], histories: list[list[int]], num_prompt: int = 3) -> DeviceTable:
    """Row i holds histories[i], the first num_prompt tokens of it a prompt; its seed is 100 + i."""
    table = DeviceTable(len(params), 64, 16, 1)
    admitted = tuple(
        row_init(i, history, [1, 2], of, num_prompt=num_prompt, seed=100 + i, eos=EOS)
        for i, (of, history) in enumerate(zip(params, histories, strict=True))
    )
    table.apply(step(1, [], admitted=admitted))
    return table


def draw(table: DeviceTable, logits: torch.Tensor, rows: list[int] | None = None) -> Sampled:
    picked = i32(*(rows if rows is not None else range(len(logits))))
    return Sampler().sample(logits.clone(), table, picked, table.num_tokens[picked])


def edited_by_loops(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """The definition: bias, repetition, frequency and presence, then what may not come."""
    logits = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in set(prompt + output):
        r = params.repetition_penalty
        logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token in range(len(logits)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logits[token] = -np.inf
        if len(output) < params.min_tokens and token in (*EOS, *params.stop_token_ids):
            logits[token] = -np.inf
        for word in params.bad_words_token_ids:
            if [*output, token][-len(word) :] == list(word):
                logits[token] = -np.inf
    return logits


FEATURES = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logit_bias=((7, 6.0), (9, 6.5), (11, -20.0))),
    SamplingParams(temperature=0, presence_penalty=2.0),
    SamplingParams(temperature=0, frequency_penalty=-2.0),
    SamplingParams(temperature=0, repetition_penalty=1.9),
    SamplingParams(temperature=0, repetition_penalty=0.5, frequency_penalty=1.5, presence_penalty=-1.0),
    SamplingParams(temperature=0, allowed_token_ids=(4, 17, 30)),
    SamplingParams(temperature=0, min_tokens=6, stop_token_ids=(12, 13, 14)),
    SamplingParams(temperature=0, min_tokens=5, stop_token_ids=tuple(range(20, 45))),
    SamplingParams(temperature=0, bad_words_token_ids=((5,), (8, 9), (1, 8, 30), (40, 41, 42, 43, 44, 45, 46))),
    SamplingParams(temperature=0, allowed_token_ids=(5, 6), bad_words_token_ids=((5,),), logit_bias=((5, 50.0),)),
]


@pytest.mark.parametrize("seed", range(8))
def test_features_together_in_one_batch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    histories = [[*rng.integers(0, VOCAB, 3).tolist(), *rng.integers(0, 12, 3).tolist(), 1, 8] for _ in FEATURES]
    logits = torch.from_numpy(rng.normal(0, 3, (len(FEATURES), VOCAB)).astype(np.float32))
    got = draw(make_table(FEATURES, histories), logits)
    for i, params in enumerate(FEATURES):
        expected = edited_by_loops(logits[i].numpy(), params, histories[i][:3], histories[i][3:])
        assert got.tokens[i] == int(expected.argmax()), params
    assert got.finite.all()


def test_bad_words_look_at_the_output_only() -> None:
    params = [SamplingParams(temperature=0, bad_words_token_ids=((8, 9),))] * 2
    logits = torch.zeros(2, VOCAB)
    logits[:, 9] = 1.0
    table = make_table(params, [[1, 1, 8], [1, 1, 1, 8]])
    assert draw(table, logits).tokens.tolist() == [9, 0]


def random_params(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.7, 1.3])),
        top_k=int(rng.choice([0, 3, 20])),
        top_p=float(rng.choice([1.0, 0.8])),
        min_p=float(rng.choice([0.0, 0.05])),
        presence_penalty=float(rng.choice([0.0, 0.5])),
        repetition_penalty=float(rng.choice([1.0, 1.2])),
        min_tokens=int(rng.choice([0, 9])),
        logprobs=int(rng.choice([0, 2])) if rng.random() < 0.5 else None,
    )


def test_a_row_alone_in_a_batch_and_after_preemption_gives_the_same() -> None:
    rng = np.random.default_rng(11)
    params = [random_params(rng) for _ in range(40)]
    histories = [rng.integers(0, VOCAB, rng.integers(4, 20)).tolist() for _ in params]
    logits = torch.from_numpy(rng.normal(0, 2, (40, VOCAB)).astype(np.float32))
    together = draw(make_table(params, histories), logits)
    shuffled = rng.permutation(40).tolist()
    again = draw(make_table(params, histories), logits[shuffled], shuffled)
    assert again.tokens.tolist() == together.tokens[shuffled].tolist()
    for i in range(40):
        # After a preemption the row may be another one, and everything comes from its RowInit.
        table = DeviceTable(3, 64, 16, 1)
        init = row_init(2, histories[i], [1], params[i], num_prompt=3, seed=100 + i, eos=EOS)
        table.apply(step(9, [], admitted=(init,)))
        alone = Sampler().sample(logits[i : i + 1].clone(), table, i32(2), table.num_tokens[i32(2)])
        assert alone.tokens[0] == together.tokens[i]


def test_seed_and_position_make_the_token() -> None:
    table = make_table([SamplingParams(temperature=1.0)] * 2, [[1, 2, 3]] * 2)
    flat = torch.zeros(1, VOCAB)
    sampler = Sampler()
    by_position = [int(sampler.sample(flat, table, i32(0), i32(p)).tokens[0]) for p in range(40)]
    other_seed = [int(sampler.sample(flat, table, i32(1), i32(p)).tokens[0]) for p in range(40)]
    expected = (uniforms(np.full(40, 100, np.uint64), np.arange(40)) * VOCAB).astype(int).tolist()
    assert by_position == expected
    assert by_position != other_seed


def test_sampled_frequencies_follow_temperature_and_top_k() -> None:
    params = SamplingParams(temperature=0.5, top_k=3)
    table = make_table([params], [[1, 2, 3]])
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, [10, 20, 30, 40]] = torch.tensor([1.0, 0.5, 0.0, -0.5])
    n = 20000
    rows = np.zeros(n, np.int32)
    tokens = Sampler().sample(logits.expand(n, -1).clone(), table, rows, np.arange(n, dtype=np.int32)).tokens
    weights = np.exp(np.array([2.0, 1.0, 0.0]))
    shares = np.array([(tokens == token).mean() for token in (10, 20, 30)])
    assert np.allclose(shares, weights / weights.sum(), atol=0.012)
    assert shares.sum() == pytest.approx(1.0)


def test_rows_that_are_not_finite_fail_alone() -> None:
    params = [SamplingParams(temperature=t) for t in (0.0, 0.0, 1.0, 1.0, 1.0)]
    params.append(SamplingParams(temperature=0, allowed_token_ids=(5,), bad_words_token_ids=((5,),)))
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.normal(0, 2, (6, VOCAB)).astype(np.float32))
    healthy = draw(make_table(params, [[1, 2, 3]] * 6), logits)
    logits[1, 7] = torch.nan
    logits[3] = torch.nan
    logits[4, 9] = torch.inf
    got = draw(make_table(params, [[1, 2, 3]] * 6), logits)
    assert got.finite.tolist() == [True, False, True, False, False, False]
    assert got.tokens[[0, 2]].tolist() == healthy.tokens[[0, 2]].tolist()


def test_logprobs_are_the_models_own() -> None:
    params = [
        SamplingParams(temperature=0, logprobs=3, logit_bias=((6, 100.0),)),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.9, logprobs=0),
    ]
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(0, 2, (3, VOCAB)).astype(np.float32))
    got = draw(make_table(params, [[1, 2, 3]] * 3), logits)
    expected = torch.log_softmax(logits.double(), -1).numpy()
    columns = got.logprobs
    assert columns is not None
    assert columns.token_ids.shape == columns.logprobs.shape == (3, 4)
    assert got.tokens[0] == 6 == columns.token_ids[0, 0]
    order = np.argsort(-expected[0])
    assert columns.token_ids[0, 1:].tolist() == order[:3].tolist()
    assert columns.ranks[0] == 1 + order.tolist().index(6)
    for i in (0, 2):
        assert np.allclose(columns.logprobs[i], expected[i][columns.token_ids[i]], atol=1e-5)
    assert not columns.logprobs[1].any()
