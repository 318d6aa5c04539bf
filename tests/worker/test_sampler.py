"""Each sampling feature against its definition by loops, and rows against their neighbours."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pagoda.base.config import LogprobsMode
from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.core.scheduler_output import RowFork, RowInit
from pagoda.kernels.sampling.batch import DrawParams
from pagoda.kernels.sampling.reference import process_logits, uniforms
from pagoda.kernels.sampling.reference import sample as sample_by_definition
from pagoda.worker.sampler import Sampled, Sampler
from pagoda.worker.staging import draw_params
from pagoda.worker.table_mirror import TableMirror
from tests.device_under_test import DeviceUnderTest
from tests.worker.hand_made import i32, row_init, step

VOCAB = 50
EOS = (2, 3)


def make_table(
    params: list[SamplingParams],
    histories: list[list[int]],
    num_prompt: int = 3,
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
) -> TableMirror:
    """Row i holds histories[i], the first num_prompt tokens of it a prompt; its seed is 100 + i."""
    table = TableMirror(len(params), 64, 16, 1, logprobs_mode=logprobs_mode)
    admitted = tuple(
        row_init(i, history, [1, 2], of, num_prompt=num_prompt, seed=100 + i, eos=EOS)
        for i, (of, history) in enumerate(zip(params, histories, strict=True))
    )
    table.apply(step(1, [], admitted=admitted))
    return table


def draw(table: TableMirror, logits: torch.Tensor, on: DeviceUnderTest, rows: list[int] | None = None) -> Sampled:
    """Sample on a device from logits that are on the CPU, and stay as they are."""
    picked = i32(*(rows if rows is not None else range(len(logits))))
    return sample(Sampler(on.ops()), logits.to(on.device, copy=True), table, picked, table.num_tokens[picked])


def sample(
    sampler: Sampler, logits: torch.Tensor, table: TableMirror, rows: np.ndarray, positions: np.ndarray
) -> Sampled:
    """Draw, and wait for the tokens."""
    drawn = sampler.draw(logits, table, rows, positions, None, draw_params(table, rows, positions))
    return drawn.on_host([tensor.cpu().numpy() for tensor in drawn.tensors])


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
def test_features_together_in_one_batch(seed: int, on: DeviceUnderTest) -> None:
    rng = np.random.default_rng(seed)
    histories = [[*rng.integers(0, VOCAB, 3).tolist(), *rng.integers(0, 12, 3).tolist(), 1, 8] for _ in FEATURES]
    logits = torch.from_numpy(rng.normal(0, 3, (len(FEATURES), VOCAB)).astype(np.float32))
    got = draw(make_table(FEATURES, histories), logits, on)
    for i, params in enumerate(FEATURES):
        expected = edited_by_loops(logits[i].numpy(), params, histories[i][:3], histories[i][3:])
        assert got.tokens[i] == int(expected.argmax()), params
    assert got.finite.all()


def test_bad_words_look_at_the_output_only(on: DeviceUnderTest) -> None:
    params = [SamplingParams(temperature=0, bad_words_token_ids=((8, 9),))] * 2
    logits = torch.zeros(2, VOCAB)
    logits[:, 9] = 1.0
    table = make_table(params, [[1, 1, 8], [1, 1, 1, 8]])
    assert draw(table, logits, on).tokens.tolist() == [9, 0]


def test_repeated_sequences_do_not_count_embeddings(on: DeviceUnderTest) -> None:
    """The ids of positions that are given as embeddings are placeholders (0), not tokens that a sequence may repeat."""
    table = make_table([SamplingParams(temperature=0, no_repeat_ngram_size=1)] * 2, [[0, 0, 6]] * 2)
    table.without_token[1] = np.arange(2)
    logits = torch.zeros(2, VOCAB)
    logits[:, [6, 0, 4]] = torch.tensor([9.0, 8.0, 7.0])
    assert draw(table, logits, on).tokens.tolist() == [4, 0]


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


def test_a_row_alone_in_a_batch_and_after_preemption_gives_the_same(on: DeviceUnderTest) -> None:
    rng = np.random.default_rng(11)
    params = [random_params(rng) for _ in range(40)]
    histories = [rng.integers(0, VOCAB, rng.integers(4, 20)).tolist() for _ in params]
    logits = torch.from_numpy(rng.normal(0, 2, (40, VOCAB)).astype(np.float32))
    together = draw(make_table(params, histories), logits, on)
    shuffled = rng.permutation(40).tolist()
    again = draw(make_table(params, histories), logits[shuffled], on, shuffled)
    assert again.tokens.tolist() == together.tokens[shuffled].tolist()
    for i in range(40):
        # After a preemption the row may be another one, and everything comes from its RowInit.
        table = TableMirror(3, 64, 16, 1)
        init = row_init(2, histories[i], [1], params[i], num_prompt=3, seed=100 + i, eos=EOS)
        table.apply(step(9, [], admitted=(init,)))
        alone = draw(table, logits[i : i + 1], on, [2])
        assert alone.tokens[0] == together.tokens[i]


def any_params(rng: np.random.Generator) -> SamplingParams:
    """A random combination of everything that chooses a token."""
    few = tuple(rng.choice(VOCAB, 6, replace=False).tolist())
    maybe = rng.random(6) < 0.4
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.0, 0.8])),
        top_k=int(rng.choice([0, 4])),
        top_p=float(rng.choice([1.0, 0.7])),
        min_p=float(rng.choice([0.0, 0.1])),
        presence_penalty=float(rng.choice([0.0, 1.5])),
        frequency_penalty=float(rng.choice([0.0, 0.6, -0.6])),
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
        logit_bias=((few[0], 3.0), (few[1], -50.0)) if maybe[0] else (),
        allowed_token_ids=tuple(rng.choice(VOCAB, 20, replace=False).tolist()) if maybe[1] else None,
        bad_words_token_ids=((few[2],), (few[3], few[4])) if maybe[2] else (),
        min_tokens=7 if maybe[3] else 0,
        stop_token_ids=few[4:] if maybe[4] else (),
        logprobs=2 if maybe[5] else None,
        max_tokens=None,
    )


@pytest.mark.parametrize("kernels", ["reference", "torch", "native"])
@pytest.mark.parametrize("seed", range(4))
def test_random_combinations_over_steps(kernels: str, seed: int, on: DeviceUnderTest) -> None:
    """Drafts accepted and rejected, forks, and rows that another request takes over: each draw is as by loops."""
    rng = np.random.default_rng(seed)
    sampler = Sampler(on.ops(kernels, threads=2))
    num_rows, num_steps = 10, 12
    params = [any_params(rng) for _ in range(num_rows)]
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 12)).tolist() for _ in params]
    tokens = [list(prompt) for prompt in prompts]
    table = TableMirror(num_rows, 128, 16, 1)
    table.apply(step(1, [], admitted=tuple(admission(i, tokens[i], prompts[i], params[i]) for i in range(num_rows))))
    for number in range(2, 2 + num_steps):
        src, dst = rng.choice(num_rows, 2, replace=False).tolist()
        if rng.random() < 0.3:
            params[dst], prompts[dst], tokens[dst] = params[src], prompts[src], list(tokens[src])
            table.apply(step(number, [], released=i32(dst), forks=(RowFork(src, dst, 1, 100 + dst),)))
        elif rng.random() < 0.5:  # preempted or swapped out; its request comes back in another request's row
            params[dst], prompts[dst], tokens[dst] = params[src], prompts[src], list(tokens[src])
            resumed = admission(dst, tokens[dst], prompts[dst], params[dst])
            table.apply(step(number, [], released=i32(dst), admitted=(resumed,)))
        drafts = [rng.integers(0, VOCAB, rng.choice([0, 0, 2])).tolist() for _ in params]
        spans = [(i, len(tokens[i]), 1 + len(drafts[i])) for i in range(num_rows)]
        proposed = {i: i32(*draft) for i, draft in enumerate(drafts) if draft}
        spans = [(row, begin - 1, count) for row, begin, count in spans]
        table.apply(step(number, spans, drafts=proposed))
        rows = i32(*(i for i in range(num_rows) for _ in range(1 + len(drafts[i]))))
        positions = i32(*(len(tokens[i]) + j for i in range(num_rows) for j in range(1 + len(drafts[i]))))
        logits = torch.from_numpy(rng.normal(0, 3, (len(rows), VOCAB)).astype(np.float32))
        got = sample(sampler, logits.to(on.device, copy=True), table, rows, positions)
        assert got.finite.all()
        assert_logprobs_of(logits, got, table.num_logprobs[rows])
        for draw_index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            known = [*tokens[row], *drafts[row]][:position]
            prompt_len = len(prompts[row])
            edited = edited_by_loops(logits[draw_index].numpy(), params[row], known[:prompt_len], known[prompt_len:])
            assert got.tokens[draw_index] == sampled_by_definition(edited, params[row], 100 + row, position)
        accepted = [int(rng.integers(0, len(draft) + 1)) for draft in drafts]
        for row, draft in enumerate(drafts):
            mine = np.flatnonzero(rows == row)
            last = int(got.tokens[mine[accepted[row]]])
            new = [*draft[: accepted[row]], last]
            at = np.arange(len(tokens[row]), len(tokens[row]) + len(new), dtype=np.int32)
            table.record_tokens(np.full(len(new), row, np.int32), at, np.array(new))
            tokens[row] += new


def admission(row: int, tokens: list[int], prompt: list[int], params: SamplingParams) -> RowInit:
    return row_init(row, tokens, [1, 2], params, num_prompt=len(prompt), seed=100 + row, eos=EOS)


def sampled_by_definition(edited: np.ndarray, params: SamplingParams, seed: int, position: int) -> int:
    """reference.sample of one row."""
    columns = [params.temperature], [params.top_k], [params.top_p], [params.min_p]
    types = (np.float32, np.int32, np.float32, np.float32)
    uniform = uniforms(np.array([seed], np.uint64), np.array([position]))
    logits = torch.from_numpy(edited.astype(np.float32)).unsqueeze(0)
    temperature, top_k, top_p, min_p = (np.array(column, dtype) for column, dtype in zip(columns, types, strict=True))
    return int(sample_by_definition(logits, DrawParams(temperature, top_k, top_p, min_p, uniform))[0])


def assert_logprobs_of(logits: torch.Tensor, got: Sampled, wanted: np.ndarray) -> None:
    """Those of the draws that want any are the model's, before any constraint."""
    assert (got.logprobs is not None) == bool((wanted >= 0).any())
    expected = torch.log_softmax(logits.double(), -1).numpy()
    for draw_index in np.flatnonzero(wanted >= 0):
        assert got.logprobs is not None
        ids, values = got.logprobs.token_ids[draw_index], got.logprobs.logprobs[draw_index]
        assert ids[0] == got.tokens[draw_index]
        assert np.allclose(values, expected[draw_index][ids], atol=1e-5)
        assert np.allclose(np.sort(expected[draw_index])[::-1][:2], values[1:], atol=1e-5)


def test_seed_and_position_make_the_token(on: DeviceUnderTest) -> None:
    table = make_table([SamplingParams(temperature=1.0)] * 2, [[1, 2, 3]] * 2)
    flat = torch.zeros(1, VOCAB, device=on.device)
    sampler = Sampler(on.ops())
    by_position = [int(sample(sampler, flat, table, i32(0), i32(p)).tokens[0]) for p in range(40)]
    other_seed = [int(sample(sampler, flat, table, i32(1), i32(p)).tokens[0]) for p in range(40)]
    expected = (uniforms(np.full(40, 100, np.uint64), np.arange(40)) * VOCAB).astype(int).tolist()
    assert by_position == expected
    assert by_position != other_seed


def test_sampled_frequencies_follow_temperature_and_top_k(on: DeviceUnderTest) -> None:
    params = SamplingParams(temperature=0.5, top_k=3)
    table = make_table([params], [[1, 2, 3]])
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, [10, 20, 30, 40]] = torch.tensor([1.0, 0.5, 0.0, -0.5])
    n = 20000
    rows = np.zeros(n, np.int32)
    many = logits.expand(n, -1).to(on.device, copy=True)
    tokens = sample(Sampler(on.ops()), many, table, rows, np.arange(n, dtype=np.int32)).tokens
    weights = np.exp(np.array([2.0, 1.0, 0.0]))
    shares = np.array([(tokens == token).mean() for token in (10, 20, 30)])
    assert np.allclose(shares, weights / weights.sum(), atol=0.012)
    assert shares.sum() == pytest.approx(1.0)


def test_rows_that_are_not_finite_fail_alone(on: DeviceUnderTest) -> None:
    params = [SamplingParams(temperature=t) for t in (0.0, 0.0, 1.0, 1.0, 1.0)]
    params.append(SamplingParams(temperature=0, allowed_token_ids=(5,), bad_words_token_ids=((5,),)))
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.normal(0, 2, (6, VOCAB)).astype(np.float32))
    healthy = draw(make_table(params, [[1, 2, 3]] * 6), logits, on)
    logits[1, 7] = torch.nan
    logits[3] = torch.nan
    logits[4, 9] = torch.inf
    got = draw(make_table(params, [[1, 2, 3]] * 6), logits, on)
    assert got.finite.tolist() == [True, False, True, False, False, False]
    assert got.forbidden.tolist() == [False] * 5 + [True]
    assert got.tokens[[0, 2]].tolist() == healthy.tokens[[0, 2]].tolist()


def test_logprobs_are_the_models_own(on: DeviceUnderTest) -> None:
    params = [
        SamplingParams(temperature=0, logprobs=3, logit_bias=((6, 100.0),)),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.9, logprobs=0),
    ]
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(0, 2, (3, VOCAB)).astype(np.float32))
    got = draw(make_table(params, [[1, 2, 3]] * 3), logits, on)
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


@pytest.mark.parametrize("mode", LogprobsMode)
@pytest.mark.parametrize("kernels", ["reference", "torch", "native"])
def test_logprobs_of_each_mode(mode: LogprobsMode, kernels: str, on: DeviceUnderTest) -> None:
    """Some draws of a batch ask for them, with all that changes logits; a beam search ranks by its own."""
    on.must_run(kernels)
    rng = np.random.default_rng(7)
    params = [replace(any_params(rng), logprobs=int(i % 4) if i % 3 else None) for i in range(24)]
    params.append(SamplingParams(n=2, logprobs=1, max_tokens=5, beam_search=BeamSearchOptions()))
    histories = [rng.integers(0, VOCAB, 8).tolist() for _ in params]
    logits = torch.from_numpy(rng.normal(0, 3, (25, VOCAB)).astype(np.float32))
    table, rows = make_table(params, histories, logprobs_mode=mode), np.arange(25, dtype=np.int32)
    moved = logits.to(on.device, copy=True)
    got = sample(Sampler(on.ops(kernels)), moved, table, rows, table.num_tokens[rows])
    plain = draw(make_table(params, histories), logits, on)
    assert got.tokens.tolist() == plain.tokens.tolist()
    for i, each in enumerate(params):
        if each.logprobs is None:
            continue
        expected, is_beam = logits[i : i + 1].clone(), each.beam_search is not None
        if mode.is_processed and not is_beam:
            edited = edited_by_loops(logits[i].numpy(), each, histories[i][:3], histories[i][3:])
            expected = torch.from_numpy(edited.astype(np.float32)).unsqueeze(0)
            if (drawn_by := draw_params(table, rows[i : i + 1], rows[i : i + 1])) is not None:
                process_logits(expected, drawn_by)
        if not mode.is_logits or is_beam:
            expected = expected.log_softmax(-1)
        reported = got.logprobs
        assert reported is not None
        ids, values = reported.token_ids[i], reported.logprobs[i]
        assert ids[0] == got.tokens[i]
        kept = expected[0].numpy()
        assert np.isfinite(kept[ids[0]])
        np.testing.assert_allclose(values, np.where(np.isneginf(kept[ids]), -9999.0, kept[ids]), atol=2e-5)
        assert reported.ranks[i] == 1 + (kept > kept[ids[0]]).sum()
        best = np.sort(kept)[::-1][: each.logprobs]
        np.testing.assert_allclose(kept[ids[1 : 1 + each.logprobs]], best, atol=2e-5)
