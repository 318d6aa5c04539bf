"""Tiny BARTs and T5s, whose encoders read the prompts: transformers' answers, and the same bits in any schedule."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from pagoda import LLM, RequestError, SamplingParams
from pagoda.assembly.assemble import build_engine_core
from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.base.sampling_params import BeamSearchOptions
from pagoda.cli.plan import make_plan
from pagoda.core.request import MediaItem
from pagoda.loading.model_config import read_model
from pagoda.loading.model_files import identify
from tests.engine.byte_llama import VOCAB, write_byte_llama
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

START, EOS, MAX_LEN = 5, 2, 64
PROMPTS = [[3, 20, 30, 40], [7], [9, 9, 200, 31, *range(60, 110)]]


_IDS = {"decoder_start_token_id": START, "eos_token_id": EOS, "pad_token_id": 0}


def make_bart() -> PreTrainedModel:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "d_model": 96, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
        "decoder_attention_heads": 6, "encoder_ffn_dim": 80, "decoder_ffn_dim": 112, "scale_embedding": True,
        "max_position_embeddings": MAX_LEN, "forced_bos_token_id": None, "forced_eos_token_id": None,
        "bos_token_id": 1, **_IDS,
    }  # fmt: skip
    return BartForConditionalGeneration(BartConfig(**shape))


_T5_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 96, "d_kv": 48, "d_ff": 112, "num_layers": 3, "num_decoder_layers": 2,
    "num_heads": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "n_positions": MAX_LEN, **_IDS,
}  # fmt: skip


def make_t5(**changes: Any) -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(**{**_T5_SHAPE, **changes}))


def with_own_head(theirs: Any) -> PreTrainedModel:
    theirs.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, theirs.config.d_model))
    return theirs


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "bart": make_bart,
    "t5": make_t5,
    "t5-gated": lambda: with_own_head(make_t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "mt5": lambda: with_own_head(MT5ForConditionalGeneration(MT5Config(**_T5_SHAPE))),
    "t5-even": lambda: make_t5(num_heads=4),
}


def write_model(name: str, folder: Path) -> Any:
    """Write a checkpoint and a tokenizer; return the model of transformers. Every parameter is random and matters."""
    write_byte_llama(folder)
    torch.manual_seed(0)
    theirs: Any = MODELS[name]().float().eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif parameter.dim() == 1:
                parameter.normal_(0, 0.3)
            elif "relative_attention_bias" in name:
                parameter.normal_(0, 2)
            else:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    theirs.save_pretrained(folder)
    return theirs


@pytest.fixture(scope="module", params=["bart", "t5", "t5-gated", "mt5"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("texts")
    return folder, write_model(request.param, folder)


def generate(theirs: Any, prompt: list[int], **how: Any) -> list[list[int]]:
    """What transformers answers, without what it begins with."""
    with torch.inference_mode():
        found = theirs.generate(torch.tensor([prompt]), do_sample=False, **how)
    answers = found[:, 1:].tolist()
    ends = EOS if how.get("eos_token_id") != [] else -1
    return [tokens[: tokens.index(ends) + 1] if ends in tokens else tokens for tokens in answers]


@pytest.fixture(scope="module", params=["native", "torch"])
def llm(model: tuple[Path, Any], request: pytest.FixtureRequest) -> Iterator[LLM]:
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_blocks": 200, "block_size": 8, "device": "cpu"}
    with LLM(str(model[0]), kernels=request.param, **options) as llm:
        yield llm


def test_greedy_is_that_of_transformers(llm: LLM, model: tuple[Path, Any]) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_token_ids == [START]
        expected = generate(model[1], prompt, max_new_tokens=20, min_new_tokens=20, eos_token_id=[])
        assert [output.outputs[0].token_ids] == expected
    ids = llm.get_tokenizer().encode("the name")
    by_text, by_ids = llm.generate(["the name", ids], SamplingParams(temperature=0, max_tokens=5))
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids


def test_beams_are_those_of_transformers(llm: LLM, model: tuple[Path, Any]) -> None:
    search = SamplingParams(n=4, temperature=0, max_tokens=12, beam_search=BeamSearchOptions())
    for prompt in PROMPTS:
        found = llm.generate(prompt, search)[0].outputs
        expected = generate(model[1], prompt, num_beams=4, num_return_sequences=4, max_new_tokens=12)
        assert [one.token_ids for one in found] == expected


def test_a_prompt_must_fit_the_encoder(llm: LLM) -> None:
    with pytest.raises(RequestError, match="encoder reads 1 to 64"):
        llm.generate([[3] * 65], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="out of vocabulary"):
        llm.generate([[3, VOCAB]], SamplingParams(max_tokens=2))


def test_a_source_has_a_limit_of_its_own_and_may_be_cut(model: tuple[Path, Any]) -> None:
    """Longer than the answers may be; cut from its end, whose special token remains."""
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_blocks": 200, "block_size": 8, "device": "cpu"}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(model[0]), max_model_len=16, **options) as llm:
        text = "x" * 50
        ids = llm.get_tokenizer().encode(text)
        assert 16 < len(ids) <= MAX_LEN

        def answer(prompt: Any, keep: int | None = None) -> list[int]:
            asked = replace(params, truncate_prompt_tokens=keep)
            return llm.generate(prompt, asked)[0].outputs[0].token_ids

        assert answer(text) == answer(ids)
        assert answer([*ids, *ids], -1) == answer(([*ids, *ids])[:MAX_LEN])
        assert answer("xyz" * 100, 9) == answer(llm.get_tokenizer().encode("xyz" * 100)[:9])
        with pytest.raises(RequestError, match="at least 65 tokens.*encoder reads 1 to 64"):
            answer("x" * 3000)


def test_an_answer_begins_and_ends_as_generation_config_says(model: tuple[Path, Any], tmp_path: Path) -> None:
    for file in model[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    start = {"decoder_start_token_id": 9, "forced_bos_token_id": 11}
    settings = {**start, "forced_eos_token_id": EOS, "min_length": 9, "max_length": 14, "no_repeat_ngram_size": 2}
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({**settings, "num_beams": 4}))
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_blocks": 200, "block_size": 8, "device": "cpu"}
    with LLM(str(tmp_path), **options) as llm:
        output = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
        own = replace(llm.get_default_sampling_params(), temperature=0)
        answers = [[11, *one.outputs[0].token_ids] for one in llm.generate(PROMPTS, own)]
    assert output.prompt_token_ids == [9, 11]
    expected = generate(model[1], PROMPTS[0], **start, max_new_tokens=13, min_new_tokens=13, eos_token_id=[])
    assert [[11, *output.outputs[0].token_ids]] == expected
    assert (own.max_tokens, own.min_tokens) == (12, 7)
    assert answers == [generate(model[1], prompt, **settings, eos_token_id=EOS)[0] for prompt in PROMPTS]
    assert {answer[-1] for answer in answers if len(answer) == 13} <= {EOS}
    assert min(map(len, answers)) >= 8


def test_an_answer_goes_on_where_an_engine_has_died(model: tuple[Path, Any]) -> None:
    ids = np.array(PROMPTS[2], np.float32)[:, None]
    media = (MediaItem("text", 0, len(ids), ids),)
    params = SamplingParams(temperature=0.9, max_tokens=16, ignore_eos=True)
    asked = replace(request(0, [START], params), media=media, encoder_len=len(ids))
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "num_blocks": 100, "block_size": 8}
    found = []
    for prior in ((), None):
        core = build_engine_core(EngineConfig.from_options(model=str(model[0]), **options))
        begun = (tuple(found[0][:7]),) if prior is None else prior
        found.append(drive(core, [replace(asked, prior_output=begun)]).tokens["r0", 0])
        core.shutdown()
    whole, rest = found
    assert whole[7:] == rest


def test_a_plan_counts_texts(model: tuple[Path, Any]) -> None:
    plan = make_plan(EngineConfig.from_options(model=str(model[0]), device="cpu"))
    assert (plan.media, plan.largest_item) == ("texts", MAX_LEN)


def watched() -> list[Watched]:
    kinds = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(
            temperature=1.1,
            top_k=5,
            max_tokens=20,
            n=2,
            no_repeat_ngram_size=1,
            forced_eos_token_id=EOS,
            ignore_eos=True,
        ),
        SamplingParams(n=2, max_tokens=16, ignore_eos=True, beam_search=BeamSearchOptions()),
    ]
    rng = np.random.default_rng(4)
    found = []
    for i, length in enumerate((1, 30, 3, 17, 64, 2)):
        ids = rng.integers(3, VOCAB, (length, 1)).astype(np.float32)
        media = (MediaItem(f"text-{i}", 0, length, ids),)
        found.append(Watched(rng.integers(3, VOCAB, i + 1).tolist(), kinds[i % 3], 10 * i, media=media, crosses=True))
    return found


def agree(
    folder: Path,
    expected: Trace,
    base: dict[str, object],
    seed: int,
    counts: Counter[str],
    fixed: Mapping[str, object] = MappingProxyType({}),
) -> None:
    rng = np.random.default_rng(seed)
    drawn = {**random_options(rng, MAX_LEN), **fixed}
    drawn["num_blocks"] = 2 * int(drawn["num_blocks"])  # type: ignore[call-overload]
    script = random_script(rng, watched(), VOCAB, 6, 12)
    core, trace = make_engine(folder, counts, {**base, **drawn, "check_invariants": True})
    play(core, trace, script)
    counts["preempted"] += core.make_stats().preemptions
    core.shutdown()
    assert not differences(expected, trace, script.requests), (seed, drawn)


def test_same_bits_in_any_schedule(model: tuple[Path, Any]) -> None:
    """With chunks, preemptions, and branches and beams that share the blocks of cross attention."""
    base: dict[str, object] = {"dtype": "bfloat16"}
    expected = alone(model[0], watched(), base)
    counts: Counter[str] = Counter()
    for seed in range(6):
        agree(model[0], expected, base, seed, counts)
    assert min(counts["forks"], counts["beams copied"], counts["preempted"]) > 0


def test_ranks_that_share_the_heads_have_the_same_bits_in_any_schedule(tmp_path: Path) -> None:
    """Each adds the bias of its own heads; and they answer as transformers does."""
    theirs = write_model("t5-even", tmp_path)
    base: dict[str, object] = {"dtype": "float32", "tensor_parallel_size": 2, "ranks_on_threads": True}
    expected = alone(tmp_path, watched(), base)
    fixed: dict[str, object] = {"pipeline_depth": 1, "async_scheduling": False}
    for seed in range(2):
        agree(tmp_path, expected, base, seed, Counter(), fixed)
    source = watched()[0].media[0].features
    assert source is not None
    source_ids, ids = torch.from_numpy(source.T.astype(np.int64)), torch.tensor([watched()[0].prompt])
    with torch.inference_mode():
        for _ in expected.tokens[0]:
            logits = theirs(input_ids=source_ids, decoder_input_ids=ids).logits
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
    assert expected.tokens[0] == ids[0, len(watched()[0].prompt) :].tolist()


SETTINGS: dict[str, tuple[str, object]] = {
    "bart": ("normalize_before", True),
    "t5": ("feed_forward_proj", "gated-relu"),
    "t5-gated": ("relative_attention_num_buckets", 41),
    "mt5": ("is_encoder_decoder", "no"),
}


def test_a_setting_that_differs_is_refused(model: tuple[Path, Any], tmp_path: Path) -> None:
    config = json.loads((model[0] / "config.json").read_text())
    name, value = SETTINGS["t5-gated" if config.get("scale_decoder_outputs") is False else config["model_type"]]
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    (tmp_path / "model.safetensors").symlink_to(model[0] / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name} .*{value}"):
        read_model(identify(tmp_path, str(tmp_path)))


def test_a_bias_of_logits_that_is_not_zeros_is_refused(tmp_path: Path) -> None:
    theirs: Any = make_bart()
    theirs.final_logits_bias[0, 3] = 1
    theirs.save_pretrained(write_byte_llama(tmp_path))
    with pytest.raises(ConfigError, match="final_logits_bias' is not zeros"):
        LLM(str(tmp_path), num_blocks=50, device="cpu")
