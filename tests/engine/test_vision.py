"""Models that see, as tiny random checkpoints in an engine: transformers' answers, the same bits in any schedule."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from pagoda.assembly.assemble import build_engine_core, resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.core.request import LoraRef, Request
from pagoda.engine.engine_core import EngineCore
from pagoda.loading.adapters.files import digest_of
from tests.engine.driver import Answers, drive, request
from tests.engine.random_schedules import Watched, alone, differences, make_engine, play, random_options, random_script
from tests.models.adapters import LINEAR, add_adapter, save_adapters
from tests.models.tiny import VOCAB, save
from tests.models.tiny_vision import (
    CONFIGS,
    IMAGE,
    NEEDS_SEPARATORS,
    QWEN,
    item,
    make_vision,
    picture_inputs,
    tokens_of_picture,
)

MAX_MODEL_LEN = 96
NUM_TOKENS = 12
BASE: dict[str, object] = {
    "dtype": "float32",
    "kernels": "native",
    "threads": 1,
    "device": "cpu",
    "block_size": 8,
    "num_blocks": 80,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "check_invariants": True,
}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

SAMPLED = SamplingParams(temperature=0.9, max_tokens=10, n=3, ignore_eos=True)

Part = int | str
PROMPTS: list[list[Part]] = [
    [5, "0", 7],
    [20, "1", 1, "2", 6],
    ["3", "0", "0", 9],
    [11],
    [2, "1", 30, "1", 3],
    [5, "0", 7, "1", 2],
]
"""Lengths of texts, and numbers of pictures. Some are there twice, at an end or right after another."""


def parts_of(name: str, number: int) -> list[Part]:
    """Return PROMPTS[number], with a token between pictures where transformers needs one."""
    parts: list[Part] = []
    for part in PROMPTS[number]:
        if name in NEEDS_SEPARATORS and isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts.append(1)
        parts.append(part)
    return parts


@cache
def watched(name: str, number: int) -> Watched:
    """PROMPTS[number] as a request."""
    rng = np.random.default_rng(7 + number % 5)  # the last one begins as the first
    ids: list[int] = []
    media = []
    for part in parts_of(name, number):
        if isinstance(part, int):
            ids += rng.integers(8, VOCAB, part).tolist()
            continue
        media.append(item(name, int(part), len(ids)))
        ids += tokens_of_picture(name, int(part))
    return Watched(ids, GREEDY, 100 * number, media=tuple(media))


def as_request(number: int, of: Watched) -> Request:
    assert isinstance(of.params, SamplingParams)
    return replace(request(number, of.prompt, of.params, of.seed), media=of.media)


@pytest.fixture(scope="module", params=[name for name in CONFIGS if name != "qwen3-vl-moe"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_vision(name), tmp_path_factory.mktemp(name))


def generate(theirs: PreTrainedModel | PeftModel, name: str, number: int) -> list[int]:
    """transformers' answer to PROMPTS[number], greedily."""
    of = watched(name, number)
    pictures = [int(part) for part in parts_of(name, number) if isinstance(part, str)]
    ids = torch.tensor([of.prompt])
    more = picture_inputs(name, pictures) if pictures else {}
    if pictures and name in QWEN:
        more["mm_token_type_ids"] = (ids == IMAGE).int()
    if name == "gemma3":
        more["token_type_ids"] = (ids == IMAGE).long()
    with torch.inference_mode():
        got = theirs.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            **more,
        )
    return got[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def expected(name: str) -> list[list[int]]:
    """transformers' answer to each of PROMPTS, greedily."""
    theirs = make_vision(name)
    answers = [generate(theirs, name, number) for number in range(len(PROMPTS))]
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    return answers


def engine(model: Path, **options: object) -> EngineCore:
    """Pools are given as for one KV group; those of Gemma 3 and Qwen3.5 get more."""
    given = {**BASE, **options}
    if "qwen3.5" in model.name and "speculative_config" in options:
        pytest.skip("states do not go back to a rejected draft")
    if any(name in model.name for name in ("gemma3", "qwen3.5")):
        given["num_blocks"] = int(str(given["num_blocks"])) * 2
    return build_engine_core(resolve_engine(EngineConfig.from_options(model=str(model), **given)))


def tokens_of(answers: Answers, count: int) -> list[list[int]]:
    return [answers.tokens[f"r{number}", 0] for number in range(count)]


FEW_BLOCKS: dict[str, object] = {"num_blocks": 14, "prefill": {"admit_whole_prompt": False}}
SCHEDULES: dict[str, dict[str, object]] = {
    "plain": {},
    "torch": {"kernels": "torch"},
    "borders in images": {"max_num_batched_tokens": 10},
    "one by one": {"max_num_batched_tokens": 10, "max_num_seqs": 1, "enable_prefix_caching": False},
    "recompute": {**FEW_BLOCKS, "preemption_mode": "recompute", "max_num_batched_tokens": 10},
    "swap": {**FEW_BLOCKS, "preemption_mode": "swap", "num_host_blocks": 60, "max_num_batched_tokens": 10},
    "ahead": {**FEW_BLOCKS, "pipeline_depth": 3, "async_scheduling": True, "max_num_batched_tokens": 16},
    "phased": {"scheduling_mode": "phased", "max_num_batched_tokens": 96},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "skipped layers": {"speculative_config": {"method": "layer_skip", "num_draft_layers": 1, "adaptive": False}},
}


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_greedy_tokens_are_those_of_transformers(
    model: Path, name: str, expected: list[list[int]], options: Mapping[str, object]
) -> None:
    core = engine(model, **options)
    answers = drive(core, [as_request(number, watched(name, number)) for number in range(len(PROMPTS))])
    stats = core.make_stats()
    core.shutdown()
    assert tokens_of(answers, len(PROMPTS)) == expected
    if "num_blocks" in options:
        assert stats.preemptions + stats.swap_outs > 0


def test_a_prefix_is_found_with_its_pictures_only(model: Path, name: str, expected: list[list[int]]) -> None:
    core = engine(model)

    def run(of: Watched) -> tuple[list[int], int]:
        before = core.make_stats().prefix_hits
        answers = drive(core, [as_request(0, of)])
        return answers.tokens["r0", 0], core.make_stats().prefix_hits - before

    first, longer = watched(name, 0), watched(name, 5)
    assert run(first) == (expected[0], 0)
    assert run(longer)[0] == expected[5]
    tokens, hits = run(longer)
    assert tokens == expected[5]
    assert hits >= (len(longer.prompt) - 1) // 8 * 8
    other = replace(longer, media=tuple(replace(one, content_hash=f"not {one.content_hash}") for one in longer.media))
    assert run(other) == (expected[5], 0)  # its first block is of text and of the picture's beginning
    core.shutdown()


def test_features_are_sent_once_for_siblings_other_requests_and_after_a_preemption(model: Path, name: str) -> None:
    """Each output is kept: the cache has room for all."""
    counts: Counter[str] = Counter()
    several = [replace(watched(name, number), params=SAMPLED) for number in (0, 2, 4)]
    blocks = 28 if name == "gemma3" else 14
    options = {**BASE, **FEW_BLOCKS, "num_blocks": blocks, "preemption_mode": "recompute"}
    core, _ = make_engine(model, counts, {**options, "enable_prefix_caching": False}, logits=False)
    drive(core, [as_request(number, of) for number, of in enumerate(several)])
    preemptions = core.make_stats().preemptions
    core.shutdown()
    assert preemptions > 0
    assert counts["features sent"] == len({item.content_hash for of in several for item in of.media})


@pytest.mark.parametrize("place", ["before", "within", "after"])
def test_a_restarted_request_goes_on_as_it_would_have(
    model: Path, name: str, expected: list[list[int]], place: str
) -> None:
    """Of an engine that died while the prompt was computed, before an image, within it, and while it answered."""
    core = engine(model, max_num_batched_tokens=10, enable_prefix_caching=False)
    of = watched(name, 1)
    steps = {"before": 1, "within": 3, "after": 30}[place]
    core.add_request(as_request(0, of))
    told = Answers()
    for _ in range(steps):
        for outputs in core.step().values():
            told.take(outputs, ["r0"])
    core.shutdown()
    before = told.tokens.get(("r0", 0), [])
    again = replace(as_request(0, of), prior_output=(tuple(before),) if before else ())
    if len(before) == NUM_TOKENS:
        assert before == expected[1]
        return
    core = engine(model, max_num_batched_tokens=10)
    rest = drive(core, [again]).tokens["r0", 0]
    core.shutdown()
    assert before + rest == expected[1]


KINDS = [
    GREEDY,
    SAMPLED,
    SamplingParams(n=2, max_tokens=8, ignore_eos=True, beam_search=BeamSearchOptions()),
    SamplingParams(temperature=0.7, max_tokens=6, prompt_logprobs=2, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0.8, max_tokens=9, n=2, ignore_eos=True),
]


def test_random_schedules_change_no_bit(model: Path, name: str) -> None:
    """Branches, beams, chunks, preemption, hits and strangers who share a beginning, with the pictures or without."""
    several = [replace(watched(name, number), params=params) for number, params in enumerate(KINDS)]
    options = {"dtype": "bfloat16", "kernels": "native", "device": "cpu", "max_model_len": 128}
    want = alone(model, several, {**options, "num_blocks": 100})
    counts: Counter[str] = Counter()
    for seed in range(5):
        rng = np.random.default_rng(seed)
        drawn = random_options(rng, 128)
        if name == "gemma3":  # whose pictures are not cut
            drawn["max_num_batched_tokens"] = max(10, int(str(drawn["max_num_batched_tokens"])))
            drawn |= {"prefill": {"long_prefill_token_threshold": 5}, "num_blocks": 3 * int(str(drawn["num_blocks"]))}
        script = random_script(rng, several, VOCAB, len(several), 12)
        core, trace = make_engine(model, counts, {**options, **drawn})
        play(core, trace, script)
        stats = core.make_stats()
        core.shutdown()
        counts.update({"hits": stats.prefix_hits, "preempted": stats.preemptions + stats.swap_outs})
        assert not differences(want, trace, script.requests), f"schedule {seed}: {drawn}"
    assert not {"chunks", "forks", "hits", "preempted"} - set(+counts), counts


@pytest.mark.parametrize(
    "layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["ranks", "stages"]
)
def test_ranks_and_stages_agree(model: Path, name: str, expected: list[list[int]], layout: dict[str, object]) -> None:
    if name == "smolvlm" and "tensor_parallel_size" in layout:
        pytest.skip("its text model has three heads")
    options = {**BASE, **layout, "max_num_batched_tokens": 10, "ranks_on_threads": True}
    refused = {
        ("qwen3.5", "tensor_parallel_size"): "does not go with layers of the gated delta rule",
        ("qwen3-vl", "pipeline_parallel_size"): "read outputs of the vision tower, so they must be in the first stage",
    }
    for (of, setting), why in refused.items():
        if name == of and setting in layout:
            with pytest.raises(ConfigError, match=why):
                make_engine(model, Counter(), options, logits=False)
            return
    if name == "gemma3" and "pipeline_parallel_size" in layout:
        with pytest.raises(ConfigError, match="does not go with images whose tokens attend to each other"):
            make_engine(model, Counter(), options, logits=False)
        return
    core, _ = make_engine(model, Counter(), options, logits=False)
    answers = drive(core, [as_request(number, watched(name, number)) for number in range(len(PROMPTS))])
    core.shutdown()
    assert tokens_of(answers, len(PROMPTS)) == expected


def test_an_adapter_changes_the_answer_about_a_picture_and_no_others(
    model: Path, name: str, expected: list[list[int]], tmp_path: Path
) -> None:
    """It adapts the text model; the picture's output is shared with requests that have none. PEFT's answer."""
    part = "text_model" if name in ("smolvlm", "idefics3") else "language_model"
    adapted = add_adapter(make_vision(name), "a", seed=1, r=8, target_modules=rf".*{part}.*({'|'.join(LINEAR)})")
    folder = save_adapters(adapted, tmp_path)["a"]
    adapter = LoraRef("a", str(folder), digest_of(folder))
    core = engine(model, enable_lora=True, max_lora_rank=8, max_num_batched_tokens=10)
    asked = replace(watched(name, 0), params=replace(GREEDY, logprobs=0))
    with_it, plain = replace(as_request(0, asked), lora=adapter), as_request(1, asked)
    together = drive(core, [with_it, plain])
    by_itself = drive(core, [with_it])
    core.shutdown()
    assert together.tokens["r1", 0] == expected[0]
    assert together.tokens["r0", 0] == generate(adapted, name, 0)
    assert together.logprobs["r1", 0] != together.logprobs["r0", 0]  # Gemma's tokens repeat the last one in any case
    assert by_itself.tokens["r0", 0] == together.tokens["r0", 0]
    assert by_itself.logprobs["r0", 0] == together.logprobs["r0", 0]
