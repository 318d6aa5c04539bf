"""A tiny random model end to end: whatever the schedule, each request gets the tokens it gets alone.

docs/reference/scheduler-contract.md, section 10, rule 7.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagoda.assembly.assemble import build_engine_core
from pagoda.assembly.engine_setup import resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.engine.engine_core import EngineCore
from tests.device_under_test import DeviceUnderTest
from tests.engine.driver import Answers, drive, request, write_tiny_llama
from tests.worker.recalls import recall_steps

BASE = {
    "dtype": "float32",
    "kernels": "auto",
    "threads": 1,
    "device": "cpu",
    "block_size": 8,
    "num_blocks": 120,
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "async_scheduling": False,
    "check_invariants": True,
}
SCHEDULES: list[dict[str, object]] = [
    {"max_num_seqs": 3},
    {"max_num_batched_tokens": 16},
    {"max_num_batched_tokens": 128, "prefill": {"long_prefill_token_threshold": 7}},
    {"enable_prefix_caching": False},
    {"block_size": 16, "num_blocks": 60},
    {"scheduling_mode": "phased", "max_num_batched_tokens": 128},
    {"scheduling_mode": "phased", "num_blocks": 24, "max_num_batched_tokens": 128},
    {"num_blocks": 22, "preemption_mode": "recompute"},
    {"num_blocks": 22, "preemption_mode": "recompute", "enable_prefix_caching": False},
    {"num_blocks": 22, "preemption_mode": "swap", "num_host_blocks": 50},
    {"num_blocks": 22, "preemption_mode": "swap", "num_host_blocks": 9},
    {"num_blocks": 22, "preemption_mode": "auto", "num_host_blocks": 50, "scheduling_mode": "phased"},
    {"pipeline_depth": 2},
    {"pipeline_depth": 2, "async_scheduling": True},
    {"pipeline_depth": 2, "async_scheduling": True, "num_blocks": 22, "num_host_blocks": 50},
    {"pipeline_depth": 3, "async_scheduling": True, "num_blocks": 22, "preemption_mode": "recompute"},
    {"scheduling_policy": "priority", "num_blocks": 22},
]

Engines = Callable[..., EngineCore]
"""A model's folder and options give an engine."""


MODELS = ["full", "window", "mixed"]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_llama(folder, 3, window=0 if request.param == "full" else 12, mixed=request.param == "mixed")


@pytest.fixture(scope="module")
def engine(on: DeviceUnderTest) -> Engines:
    """Pools are given as for one KV group; a model with three gets a little more than twice that."""

    def build(model: Path, **options: object) -> EngineCore:
        setup = resolve_engine(EngineConfig.from_options(model=str(model), **on.engine({**BASE, **options})))
        if len(setup.groups) > 1:
            debug = setup.config.debug
            num_host_blocks = (debug.num_host_blocks or 0) * 3
            scaled = replace(debug, num_blocks=debug.num_blocks * 9 // 4, num_host_blocks=num_host_blocks)
            setup = replace(setup, config=replace(setup.config, debug=scaled))
        return build_engine_core(setup)

    return build


def traffic() -> list[tuple[list[int], SamplingParams, int]]:
    """Prompts (some share a beginning), parameters, seeds."""
    rng = np.random.default_rng(5)
    head = rng.integers(3, 160, 18).tolist()
    kinds = [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=0.8, max_tokens=24, n=3),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, max_tokens=16),
        SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=25, min_tokens=25),
        SamplingParams(temperature=0.7, min_p=0.05, max_tokens=12, n=2, logit_bias=((7, 2.0),)),
        SamplingParams(n=3, max_tokens=14, beam_search=BeamSearchOptions(early_stopping="never")),
    ]
    requests = []
    for i in range(10):
        own = rng.integers(3, 160, rng.integers(1, 34)).tolist()
        requests.append((head + own if i % 2 else own, kinds[i % len(kinds)], 100 * i))
    return requests


def run(core: EngineCore) -> Answers:
    answers = drive(core, [request(i, *each, eos=(2,)) for i, each in enumerate(traffic())])
    core.shutdown()
    return answers


@pytest.fixture(scope="module")
def alone(model: Path, engine: Engines) -> dict[tuple[str, int], list[int]]:
    """Each sequence as a request of its own, with the seed of the sequence, nothing else running, nothing cached.

    The beams of a search are one request.
    """
    core = engine(model, max_num_seqs=3, enable_prefix_caching=False, max_num_batched_tokens=128)
    expected = {}
    for i, (prompt, params, seed) in enumerate(traffic()):
        if params.beam_search is not None:
            answers = drive(core, [request(0, prompt, params, seed, eos=(2,))])
            expected |= {(f"r{i}", sequence): answers.tokens["r0", sequence] for sequence in range(params.n)}
            continue
        for sequence in range(params.n):
            one = SamplingParams(
                **{name: getattr(params, name) for name in params.__dataclass_fields__ if name != "n"}  # type: ignore[arg-type]
            )
            answers = drive(core, [request(0, prompt, one, seed + sequence, eos=(2,))])
            expected[f"r{i}", sequence] = answers.tokens["r0", 0]
    core.shutdown()
    assert len({tuple(tokens) for tokens in expected.values()}) > 10  # the model says something
    return expected


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()))
def test_schedules_agree(
    model: Path, alone: dict[tuple[str, int], list[int]], options: dict[str, object], engine: Engines
) -> None:
    answers = run(engine(model, **options))
    assert answers.tokens == alone


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline_depth": 2, "async_scheduling": True},
        {"pipeline_depth": 3, "async_scheduling": True, "num_blocks": 22, "num_host_blocks": 50},
        {"num_blocks": 22, "preemption_mode": "recompute", "speculative_config": {"method": "ngram"}},
    ],
    ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()) or "roomy",
)
def test_steps_padded_for_graphs_agree(
    model: Path,
    alone: dict[tuple[str, int], list[int]],
    options: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    on: DeviceUnderTest,
    engine: Engines,
) -> None:
    on.must_be_a_cpu("a GPU has graphs, in all other tests")
    recalls = recall_steps(monkeypatch)
    assert run(engine(model, **options)).tokens == alone
    assert recalls.replays > 5


def test_pools_so_small_that_they_preempt(model: Path, engine: Engines) -> None:
    """The settings above do what they are there for."""
    core = engine(model, num_blocks=22, preemption_mode="recompute")
    run(core)
    assert core.make_stats().preemptions > 0  # type: ignore[attr-defined]
    core = engine(model, num_blocks=22, preemption_mode="swap", num_host_blocks=50)
    run(core)
    assert core.make_stats().swap_outs > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_logprobs_do_not_depend_on_the_schedule(
    model: Path, max_tokens: int, on: DeviceUnderTest, engine: Engines
) -> None:
    on.must_promise_bits()
    prompt = traffic()[1][0]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=3, prompt_logprobs=2)

    def columns(core: EngineCore) -> tuple[list[list[int]], list[float], list[float]]:
        core.add_request(request(0, prompt, params))
        tokens: list[list[int]] = []
        prompt_values: list[float] = []
        values: list[float] = []
        while core.has_unfinished_requests():
            for outputs in core.step().values():
                for told in outputs.prompt_logprobs.values():
                    prompt_values += told.logprobs[:, 0].tolist()
                if outputs.logprobs is not None:
                    tokens += outputs.logprobs.token_ids.tolist()
                    values += outputs.logprobs.logprobs.ravel().tolist()
        core.shutdown()
        return tokens, prompt_values, values

    whole = columns(engine(model, max_num_batched_tokens=128))
    chunked = columns(engine(model, max_num_batched_tokens=16))
    assert len(whole[1]) == len(prompt) - 1
    assert len(whole[2]) == max_tokens * 4
    assert whole == chunked


def test_an_int8_cache_gives_the_same_under_every_schedule(model: Path, engine: Engines, on: DeviceUnderTest) -> None:
    on.must_promise_bits()  # a last bit may be the next code, which is much
    whole = run(engine(model, kv_cache_dtype="int8"))
    for options in (
        {"max_num_batched_tokens": 17},
        {"num_blocks": 22, "preemption_mode": "swap", "num_host_blocks": 50},
    ):
        assert run(engine(model, kv_cache_dtype="int8", **options)).tokens == whole.tokens


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 22, "preemption_mode": "recompute"}], ids=["roomy", "preempting"]
)
def test_neither_right_nor_wrong_drafts_change_the_output(
    model: Path, alone: dict[tuple[str, int], list[int]], options: dict[str, object], engine: Engines
) -> None:
    drafts = {"method": "forced", "num_speculative_tokens": 3}  # nothing is forced here: those below are the only ones
    core = engine(model, speculative_config=drafts, **options)
    scheduler = core._scheduler
    rng = np.random.default_rng(1)

    def draft(num_steps: int, answers: Answers) -> None:
        drafts = {}
        for (name, sequence), tokens in answers.tokens.items():
            if (name, sequence) not in answers.finishes and rng.random() < 0.6:
                guess = alone[name, sequence][len(tokens) : len(tokens) + 3]
                if guess and rng.random() < 0.5:
                    guess[rng.integers(len(guess))] ^= 1
                drafts[(0, int(name[1:])), sequence] = guess
        scheduler.update_draft_token_ids(drafts)

    answers = drive(core, [request(i, *each, eos=(2,)) for i, each in enumerate(traffic())], draft)
    core.shutdown()
    assert answers.tokens == alone
    stats = scheduler.make_stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


METHODS: dict[str, dict[str, object]] = {
    "ngram": {"prompt_lookup_min": 1},
    "suffix": {"suffix_decoding_max_spec_factor": 3.0},
    "layer_skip": {"num_draft_layers": 1},
    "draft_model": {},
}


def speculative(model: Path, method: str, tmp_path: Path, **more: object) -> dict[str, object]:
    config = {"method": method, "num_speculative_tokens": 3, "adaptive": False, **METHODS[method], **more}
    if method == "draft_model":
        # With the target's own first weights, so that some of its drafts are right.
        config["model"] = str(write_tiny_llama(tmp_path / "draft", 3))
    return {"speculative_config": config}


DRAFTED: list[dict[str, object]] = [
    {},
    {"max_num_batched_tokens": 16, "max_num_seqs": 7},
    {"enable_prefix_caching": False, "prefill": {"prefill_beside_decodes": 2}},
    {"num_blocks": 24, "preemption_mode": "recompute"},
    {"num_blocks": 24, "preemption_mode": "swap", "num_host_blocks": 50},
    {"scheduling_mode": "phased", "num_blocks": 26, "max_num_batched_tokens": 128},
    {"pipeline_depth": 2},
    {"async_scheduling": True},
    {"async_scheduling": True, "pipeline_depth": 3, "num_blocks": 24, "num_host_blocks": 50},
]


def on_models(schedules: list[dict[str, object]]) -> list[Any]:
    """On the model with both kinds of layers, one method with each schedule, in turns; on the others, so two
    schedules. The rest is slow.
    """
    quick = (schedules[0], schedules[-2])
    return [
        pytest.param(
            model,
            each,
            method,
            marks=[] if (i + j) % 4 == 0 and (model == "mixed" or each in quick) else pytest.mark.slow,
        )
        for model in MODELS
        for i, each in enumerate(schedules)
        for j, method in enumerate(METHODS)
    ]


@pytest.mark.parametrize(
    ("model", "options", "method"),
    on_models(DRAFTED),
    indirect=["model"],
    ids=lambda value: value if isinstance(value, str) else " ".join(f"{k}={v}" for k, v in value.items()) or "roomy",
)
def test_drafters_change_no_token(
    model: Path,
    alone: dict[tuple[str, int], list[int]],
    tmp_path: Path,
    method: str,
    options: dict[str, object],
    engine: Engines,
) -> None:
    core = engine(model, **options, **speculative(model, method, tmp_path))
    answers = drive(core, [request(i, *each, eos=(2,)) for i, each in enumerate(traffic())])
    stats = core.make_stats()
    core.shutdown()
    assert answers.tokens == alone
    assert stats.drafted_tokens > 50
    if method in ("layer_skip", "draft_model"):
        assert stats.accepted_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_the_controller_changes_no_token(
    model: Path, alone: dict[tuple[str, int], list[int]], tmp_path: Path, method: str, engine: Engines
) -> None:
    """Its decisions depend on how fast this machine is just now; the tokens do not."""
    answers = run(engine(model, **speculative(model, method, tmp_path, adaptive=True)))
    assert answers.tokens == alone


def test_all_drafts_of_an_equal_model_are_accepted(
    model: Path, alone: dict[tuple[str, int], list[int]], engine: Engines
) -> None:
    """It draws with the same random numbers: sampled tokens agree too, not only greedy ones."""
    config = {"model": str(model), "num_speculative_tokens": 4, "adaptive": False}
    core = engine(model, speculative_config=config)
    answers = drive(core, [request(i, *each, eos=(2,)) for i, each in enumerate(traffic())])
    stats = core.make_stats()
    core.shutdown()
    assert answers.tokens == alone
    # What is drafted after the token that ends a sequence is not accepted.
    assert stats.accepted_tokens > 0.85 * stats.drafted_tokens


@pytest.mark.parametrize("method", METHODS)
def test_drafts_of_an_aborted_request_do_not_reach_the_next_one(
    model: Path, alone: dict[tuple[str, int], list[int]], tmp_path: Path, method: str, engine: Engines
) -> None:
    """Rows are given to other requests while drafts for them are on their way."""
    core = engine(model, max_num_seqs=4, **speculative(model, method, tmp_path))
    requests = [request(i, *each, eos=(2,)) for i, each in enumerate(traffic())]

    def abort(step: int, answers: Answers) -> None:
        if step in (3, 9):
            core.abort([(0, step // 3)])

    answers = drive(core, requests, abort)
    core.shutdown()
    for key, tokens in answers.tokens.items():
        if key[0] in ("r1", "r3"):
            assert tokens == alone[key][: len(tokens)]
        else:
            assert tokens == alone[key]


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_those_of_verified_tokens(
    model: Path, tmp_path: Path, method: str, on: DeviceUnderTest, engine: Engines
) -> None:
    on.must_promise_bits()
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2, min_tokens=24, bad_words_token_ids=((9, 11),))
    prompt = traffic()[1][0]

    def columns(core: EngineCore) -> tuple[list[list[int]], list[list[float]], list[int]]:
        core.add_request(request(0, prompt, params))
        told: tuple[list[list[int]], list[list[float]], list[int]] = ([], [], [])
        while core.has_unfinished_requests():
            for outputs in core.step().values():
                if outputs.logprobs is not None:
                    assert len(outputs.logprobs.ranks) == len(outputs.token_ids)
                    told[0].extend(outputs.logprobs.token_ids.tolist())
                    told[1].extend(outputs.logprobs.logprobs.tolist())
                    told[2].extend(outputs.logprobs.ranks.tolist())
        core.shutdown()
        return told

    drafted = engine(model, **speculative(model, method, tmp_path))
    assert columns(drafted) == columns(engine(model))
    assert drafted.make_stats().drafted_tokens > 0
