"""Models with an encoder, and what may be combined with them: the tokens of a plain run, or a refusal by name.

test_vision.py, test_whisper.py and test_text_encoders.py compare some of it with transformers and PEFT.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch

from pagoda.assembly.assemble import build_engine_core
from pagoda.assembly.engine_setup import resolve_engine
from pagoda.assembly.input_setup import build_input_processor
from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.core.request import MediaItem, PromptEmbeds, Request
from pagoda.engine.engine_core import EngineCore
from pagoda.engine.inputs.pooling_inputs import check_pooling
from tests.engine.driver import drive, request
from tests.engine.random_schedules import make_engine
from tests.engine.test_text_encoders import PROMPTS as TEXTS
from tests.engine.test_text_encoders import START, write_model
from tests.engine.test_vision import PROMPTS, as_request, watched
from tests.engine.test_whisper import requests as sounds
from tests.engine.transcription.speech_model import write_tokenizer
from tests.models.tiny import save
from tests.models.tiny_vision import make_vision
from tests.models.tiny_whisper import write_whisper

Tokens = dict[tuple[str, int], list[int]]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


BASE: dict[str, object] = {
    "kernels": "native",
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "block_size": 8,
    "num_blocks": 240,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,
    "check_invariants": True,
}


def texts(params: SamplingParams) -> list[Request]:
    """TEXTS for an encoder."""
    items = [np.array(ids, np.float32)[:, None] for ids in TEXTS]
    return [
        replace(request(i, [START], params), media=(MediaItem(f"text-{i}", 0, len(ids), ids),), encoder_len=len(ids))
        for i, ids in enumerate(items)
    ]


def pictures(name: str) -> Callable[[SamplingParams], list[Request]]:
    return lambda params: [
        as_request(number, replace(watched(name, number), params=params)) for number in range(len(PROMPTS))
    ]


@dataclass
class Family:
    """A tiny random checkpoint with a tokenizer.   requests: of it, with given parameters."""

    name: str
    folder: Path
    requests: Callable[[SamplingParams], list[Request]]

    def config(self, **options: object) -> EngineConfig:
        return EngineConfig.from_options(model=str(self.folder), **{**BASE, **options})

    def engine(self, **options: object) -> EngineCore:
        return build_engine_core(self.config(**options))

    def tokens(self, params: SamplingParams, **options: object) -> Tokens:
        core = self.engine(**options)
        answers = drive(core, self.requests(params))
        core.shutdown()
        return answers.tokens

    @cached_property
    def plain(self) -> Tokens:
        return self.tokens(GREEDY)


FAMILIES = ("whisper", "t5", "smolvlm", "qwen2.5-vl", "gemma3")
OF_VISION = FAMILIES[2:]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    made: dict[str, Family] = {}

    def make(name: str) -> Family:
        folder = tmp_path_factory.mktemp(name)
        if name == "t5":
            write_model("t5-even", folder)
            return Family(name, folder, texts)
        if name == "whisper":
            write_whisper(folder, encoder_attention_heads=6)
        else:
            save(make_vision(name), folder)
        write_tokenizer(folder)
        return Family(name, folder, sounds if name == "whisper" else pictures(name))

    def of(name: str) -> Family:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return of


FEATURES: dict[str, dict[str, object]] = {
    "small chunks": {"max_num_batched_tokens": 16},
    "reference kernels": {"kernels": "torch"},
    "phases": {"scheduling_mode": "phased"},
    "steps ahead": {"pipeline_depth": 2, "async_scheduling": True},
    "swapping": {"num_host_blocks": 60, "preemption_mode": "swap", "enable_prefix_caching": False},
    "recomputing": {"preemption_mode": "recompute", "enable_prefix_caching": False},
    "ranks": {"tensor_parallel_size": 2, "ranks_on_threads": True},
    "stages": {"pipeline_parallel_size": 2, "ranks_on_threads": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "skipped layers": {"speculative_config": {"method": "layer_skip", "num_draft_layers": 1, "adaptive": False}},
    "adapters": {"enable_lora": True, "max_lora_rank": 8},
    "prompt embeddings": {"enable_prompt_embeds": True},
    "a fake executor": {"distributed_executor_backend": "fake"},
}
CROSS_REFUSED = {
    "stages": "pipeline_parallel_size=2: .* or take tensor_parallel_size=2 instead",
    "drafts": "speculative_config does not go with an encoder-decoder model; leave it out",
    "skipped layers": "speculative_config does not go with an encoder-decoder model; leave it out",
    "adapters": "enable_lora does not go with an encoder-decoder model yet; leave it out",
    "prompt embeddings": "enable_prompt_embeds: .* does not take prompts as embeddings; leave it out",
    "a fake executor": "distributed_executor_backend='fake' does not go with an encoder-decoder model; leave it out",
}
REFUSED: dict[tuple[str, str], str] = {
    **{(name, feature): said for name in ("whisper", "t5") for feature, said in CROSS_REFUSED.items()},
    ("smolvlm", "ranks"): "tensor_parallel_size=2",  # it has three heads
    ("gemma3", "stages"): "pipeline_parallel_size=2 does not go with images .*; take tensor_parallel_size",
}
"""(family, feature) -> what a start says. All others have the tokens of a plain run."""


FEW_BLOCKS = {"whisper": 26, "t5": 12, "smolvlm": 26, "qwen2.5-vl": 26, "gemma3": 30}
"""Too few for all requests at once."""


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_setting_changes_no_token_or_is_refused(
    families: Callable[[str], Family], name: str, feature: str
) -> None:
    family, options = families(name), {**BASE, **FEATURES[feature]}
    preempts = "preemption_mode" in options
    if preempts:
        options["num_blocks"] = FEW_BLOCKS[name]
    said = REFUSED.get((name, feature))
    if said is not None:
        options.pop("ranks_on_threads", None)
        with pytest.raises(ConfigError, match=said):
            resolve_engine(family.config(**options))
        return
    if feature == "a fake executor":  # which makes tokens up, and plans as for a model
        assert resolve_engine(family.config(**options)).encoder is not None
        return
    core, _ = make_engine(family.folder, Counter(), options, logits=False)
    tokens, stats = drive(core, family.requests(GREEDY)).tokens, core.make_stats()
    core.shutdown()
    assert tokens == family.plain
    if preempts:
        assert (stats.swap_outs if feature == "swapping" else stats.preemptions) > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_goes_on_from_its_journal(families: Callable[[str], Family], name: str) -> None:
    family = families(name)
    core = family.engine()
    again = [
        replace(one, prior_output=(tuple(family.plain[one.request_id, 0][:4]),)) for one in family.requests(GREEDY)
    ]
    rest = drive(core, again).tokens
    core.shutdown()
    assert rest == {key: tokens[4:] for key, tokens in family.plain.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_beams_are_the_same_in_any_chunks(families: Callable[[str], Family], name: str) -> None:
    family = families(name)
    beams = SamplingParams(n=2, max_tokens=8, ignore_eos=True, beam_search=BeamSearchOptions())
    found = family.tokens(beams)
    assert found == family.tokens(beams, max_num_batched_tokens=16, max_num_seqs=4)
    assert any(found["r0", at] != family.plain["r0", 0][:8] for at in range(2))


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_are_the_same_in_any_chunks_or_refused(families: Callable[[str], Family], name: str) -> None:
    family = families(name)
    tasks = resolve_engine(family.config()).tasks
    if name not in OF_VISION:
        with pytest.raises(RequestError, match="this model does not support embed; it supports generate"):
            check_pooling(PoolingParams(task="embed"), tasks)
        return
    params = check_pooling(PoolingParams(task="embed"), tasks)
    found = []
    for chunk in (96, 16):
        core = family.engine(max_num_batched_tokens=chunk)
        found.append(
            drive(core, [replace(one, sampling=None, pooling=params) for one in family.requests(GREEDY)]).pooled
        )
        core.shutdown()
    whole, cut = found
    assert whole.keys() == {one.request_id for one in family.requests(GREEDY)}
    assert len({vector.tobytes() for vector in whole.values()}) == len(whole)
    for key, vector in whole.items():
        np.testing.assert_allclose(cut[key], vector, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_grammar_allows_what_a_list_of_tokens_does(families: Callable[[str], Family], name: str) -> None:
    family = families(name)
    inputs = build_input_processor(resolve_engine(family.config()))
    letters = tuple(inputs.tokenizer.encode(letter, False)[0] for letter in "abcd")
    prepared = inputs.params.prepare(replace(GREEDY, structured_outputs={"regex": "[abcd]{10,}"})).params
    assert isinstance(prepared, SamplingParams)
    allowed = family.tokens(replace(GREEDY, allowed_token_ids=letters))
    assert len({token for tokens in allowed.values() for token in tokens}) > 1
    assert family.tokens(prepared) == allowed


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "whisper"])
def test_a_cache_of_8_bits_gives_the_same_tokens_in_any_chunks(families: Callable[[str], Family], name: str) -> None:
    family = families(name)
    whole = family.tokens(GREEDY, kv_cache_dtype="int8", max_num_seqs=1)
    assert family.tokens(GREEDY, kv_cache_dtype="int8", max_num_batched_tokens=16) == whole


@pytest.mark.parametrize("name", ["whisper", "t5"])
def test_equal_prompts_of_encoder_decoder_models_share_no_blocks(families: Callable[[str], Family], name: str) -> None:
    """Their KV depends on what the encoder has read."""
    family = families(name)
    core = family.engine(enable_prefix_caching=True, block_size=8)
    prompt = list(range(20, 45))
    asked = [replace(one, prompt_token_ids=np.array(prompt, np.int32)) for one in family.requests(GREEDY)]
    first, second = drive(core, asked), drive(core, asked)
    assert first.tokens == second.tokens
    assert len({tuple(tokens) for tokens in first.tokens.values()}) > 1
    assert core.make_stats().prefix_hits == 0
    core.shutdown()


@pytest.mark.parametrize("name", OF_VISION)
def test_embeddings_in_front_of_a_picture_are_as_their_tokens(families: Callable[[str], Family], name: str) -> None:
    family = families(name)
    table = make_vision(name).get_input_embeddings()
    plain = family.requests(GREEDY)
    given = []
    for one in plain:
        num_embeds = one.media[0].offset if one.media else len(one.prompt_token_ids)
        ids = one.prompt_token_ids.copy()
        with torch.inference_mode():
            embeds = table(torch.from_numpy(ids[:num_embeds].astype(np.int64))).numpy()
        ids[:num_embeds] = 0
        of_first = PromptEmbeds.of_first(embeds) if num_embeds else None
        given.append(replace(one, prompt_token_ids=ids, prompt_embeds=of_first))
    core = family.engine(enable_prompt_embeds=True, max_num_batched_tokens=16)
    found = drive(core, given).tokens
    core.shutdown()
    assert found == family.plain
