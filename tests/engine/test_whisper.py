"""A tiny Whisper in an engine: what transformers answers, and the same bits whatever the schedule."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

from pagoda.assembly.assemble import build_engine_core
from pagoda.base.config import EngineConfig
from pagoda.base.errors import RequestError
from pagoda.base.pooling import Alignment, PoolingParams
from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.cli.plan import make_plan
from pagoda.core.request import Request
from pagoda.engine.engine_core import EngineCore
from tests.engine.driver import drive, request
from tests.engine.random_schedules import (
    Trace,
    Watched,
    alone,
    differences,
    make_engine,
    play,
    random_options,
    random_script,
)
from tests.engine.transcription.speech_model import aligned as attention_of
from tests.models.tiny_whisper import EOS, MAX_LEN, POSITIONS, VOCAB, answer, beams, sound, write_whisper

PROMPTS = [[1, 5, 9], [1, 5, 9], [1], [1, 7, 7, 7, *range(30, 50)]]
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WhisperForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, write_whisper(folder)


def engine(folder: Path, **options: object) -> EngineCore:
    base = {"kernels": "native", "device": "cpu", "dtype": "float32", "threads": 1, "num_blocks": 200, "block_size": 8}
    return build_engine_core(EngineConfig.from_options(model=str(folder), **{**base, "max_num_seqs": 8, **options}))


def requests(params: SamplingParams, eos: tuple[int, ...] = ()) -> list[Request]:
    return [
        replace(request(i, prompt, params, eos=eos), media=(sound(i),), encoder_len=POSITIONS)
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"kernels": "torch"}, {"max_num_batched_tokens": 8}, {"pipeline_depth": 2, "async_scheduling": True}],
    ids=str,
)
def test_greedy_is_that_of_transformers(
    model: tuple[Path, WhisperForConditionalGeneration], options: dict[str, object]
) -> None:
    folder, theirs = model
    core = engine(folder, **options)
    answers = drive(core, requests(SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)))
    core.shutdown()
    expected = {(f"r{i}", 0): answer(theirs, sound(i), prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)}
    assert answers.tokens == expected
    assert expected["r0", 0] != expected["r1", 0], "equal prompts say what is heard"


def test_beams_are_those_of_transformers(model: tuple[Path, WhisperForConditionalGeneration]) -> None:
    folder, theirs = model
    core = engine(folder, max_num_seqs=16)
    search = SamplingParams(n=4, temperature=0, max_tokens=12, logprobs=0, beam_search=BeamSearchOptions())
    answers = drive(core, requests(search, eos=(EOS,)))
    core.shutdown()
    for i, prompt in enumerate(PROMPTS):
        assert [answers.tokens[f"r{i}", number] for number in range(4)] == beams(theirs, sound(i), prompt, 12, 4)


def watched() -> list[Watched]:
    kinds = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=1.1, top_k=20, max_tokens=20, n=2, ignore_eos=True),
        SamplingParams(temperature=0.8, max_tokens=16, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(n=2, max_tokens=16, ignore_eos=True, beam_search=BeamSearchOptions()),
    ]
    rng = np.random.default_rng(2)
    lengths = (1, 30, 3, 17, 4, 2, 25, 9)
    return [
        Watched(rng.integers(3, VOCAB, length).tolist(), kinds[i % 4], 10 * i, media=(sound(i % 3),), crosses=True)
        for i, length in enumerate(lengths)
    ]


HEADS = ((1, 0), (1, 5), (2, 3))


def aligned() -> list[Watched]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCAB, length).tolist() for length in (40, 7)]
    params = PoolingParams("token_embed", alignment=Alignment(HEADS, 2, POSITIONS - 3))
    return [
        Watched(prompt, params, 80 + 10 * i, skips_prefix=True, media=(sound(i),), crosses=True)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"kernels": "torch"}, {"max_num_batched_tokens": 8}, {"pipeline_depth": 2, "async_scheduling": True}],
    ids=str,
)
def test_tokens_look_where_those_of_transformers_do(
    model: tuple[Path, WhisperForConditionalGeneration], options: dict[str, object]
) -> None:
    folder, theirs = model
    core, each = engine(folder, **options), aligned()
    added = [replace(request(i, one.prompt, one.params), skip_prefix_read=True) for i, one in enumerate(each)]
    added.append(request(2, [1, 5], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)))
    found = drive(core, [replace(one, media=(sound(i),), encoder_len=POSITIONS) for i, one in enumerate(added)])
    core.shutdown()
    assert found.tokens["r2", 0] == answer(theirs, sound(2), [1, 5], 20)
    for i, one in enumerate(each):
        assert isinstance(one.params, PoolingParams)
        with torch.no_grad():
            encoded = theirs.get_encoder()(torch.from_numpy(sound(i).features)[None])
            expected = attention_of(theirs, encoded, one.prompt, one.params)
        np.testing.assert_allclose(found.pooled[f"r{i}"], expected, atol=2e-3)


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8", "quantization": "int8"}], ids=str)
def test_same_bits_in_any_schedule(
    model: tuple[Path, WhisperForConditionalGeneration], options: dict[str, object]
) -> None:
    """With chunks, preemption by recomputing and by swapping, branches, beams, and sounds that are kept or not."""
    folder, _ = model
    base: dict[str, object] = {"dtype": "bfloat16", **options}
    expected = alone(folder, [*watched(), *aligned()], base)
    counts: Counter[str] = Counter()
    for seed in range(14):
        agree(folder, expected, base, seed, counts, each=[*watched(), *aligned()])
    assert counts["preempted"] > 5
    assert min(counts["swapped in"], counts["forks"], counts["beams copied"]) > 0


def agree(
    folder: Path,
    expected: Trace,
    base: dict[str, object],
    seed: int,
    counts: Counter[str],
    fixed: Mapping[str, object] = MappingProxyType({}),
    each: Sequence[Watched] = (),
) -> None:
    rng = np.random.default_rng(seed)
    drawn = {**random_options(rng, MAX_LEN), **fixed}
    cross_blocks = -(-POSITIONS // int(drawn["block_size"]))  # type: ignore[call-overload]
    drawn["num_blocks"] = int(drawn["num_blocks"]) + 2 * cross_blocks  # type: ignore[call-overload]
    script = random_script(rng, each or watched(), VOCAB, 8, 12)
    core, trace = make_engine(folder, counts, {**base, **drawn, "check_invariants": True})
    play(core, trace, script)
    counts["preempted"] += core.make_stats().preemptions
    core.shutdown()
    assert not differences(expected, trace, script.requests), (seed, drawn)


def test_ranks_that_share_the_layers_have_the_same_bits_in_any_schedule(
    model: tuple[Path, WhisperForConditionalGeneration], tmp_path: Path
) -> None:
    write_whisper(tmp_path, encoder_attention_heads=6)
    base: dict[str, object] = {"dtype": "bfloat16", "tensor_parallel_size": 2, "ranks_on_threads": True}
    expected = alone(tmp_path, watched(), base)
    for seed in range(3):
        agree(tmp_path, expected, base, seed, Counter(), {"pipeline_depth": 1, "async_scheduling": False})


def test_a_request_goes_on_where_an_engine_has_died(model: tuple[Path, WhisperForConditionalGeneration]) -> None:
    folder, _ = model
    whole = [SamplingParams(temperature=temperature, max_tokens=16, ignore_eos=True) for temperature in (0.0, 0.9)]
    for params in whole:
        core = engine(folder)
        answers = drive(core, requests(params))
        again = [replace(one, prior_output=(tuple(answers.tokens[one.request_id, 0][:7]),)) for one in requests(params)]
        continued = drive(core, again)
        core.shutdown()
        assert {key: tokens[7:] for key, tokens in answers.tokens.items()} == continued.tokens


def test_a_sound_that_is_heard_again_is_computed_once(model: tuple[Path, WhisperForConditionalGeneration]) -> None:
    folder, _ = model
    core = engine(folder)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    same = [replace(one, media=(sound(0),)) for one in requests(params)]
    for each in (same, requests(params)):
        drive(core, each)
    encoders = core._executor.worker._runner._encoders  # type: ignore[attr-defined]
    assert encoders.num_computed == len(PROMPTS)
    core.shutdown()


def test_a_plan_counts_the_blocks_of_what_the_encoder_gives(
    model: tuple[Path, WhisperForConditionalGeneration],
) -> None:
    options = {"device": "cpu", "num_blocks": 100, "block_size": 8}
    made = make_plan(EngineConfig.from_options(model=str(model[0]), **options))
    own, cross = MAX_LEN // 8, -(-POSITIONS // 8)
    assert made.requests_by_length == {MAX_LEN: 100 // (own + cross)}


def test_a_request_needs_a_whole_window_of_sound(model: tuple[Path, WhisperForConditionalGeneration]) -> None:
    core = engine(model[0])
    good = requests(SamplingParams(max_tokens=2))[0]
    short = replace(good.media[0], features=np.zeros((10, 20), np.float32))
    bad: Sequence[tuple[Request, str]] = (
        (replace(good, media=(), encoder_len=0), "needs an encoder input"),
        (replace(good, media=(short,)), "features of shape"),
        (replace(good, encoder_len=5), "encoder_len=5"),
    )
    for one, said in bad:
        with pytest.raises(RequestError, match=said):
            core.add_request(one)
    assert not core.has_unfinished_requests()
    core.shutdown()
