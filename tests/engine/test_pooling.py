"""Pooled prompts are what transformers' hidden states give, in fp32, whatever the chunks; heads and options apply."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pagoda.assembly.assemble import build_engine_core, resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from tests.device_under_test import DeviceUnderTest
from tests.engine.driver import Answers, drive, request
from tests.models.tiny import CONFIGS, VOCAB

PROMPTS = [np.random.default_rng(7).integers(3, VOCAB, length).tolist() for length in (5, 1, 23, 12, 40, 9)]
RAW = PoolingParams(task="embed", normalize=False)


def saved(name: str, folder: Path, kind: type = transformers.AutoModel, **changes: object) -> torch.nn.Module:
    """Save a tiny random model without its head for tokens, as transformers does, and return it."""
    torch.manual_seed(3)
    config = CONFIGS[name]()
    config.update(changes)
    model = kind.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def pooled(
    on: DeviceUnderTest, folder: Path, params: PoolingParams, beside: bool = False, **options: object
) -> list[np.ndarray]:
    """The vectors of all PROMPTS.   beside: requests for text run in the same batch, if the model can."""
    base = {"dtype": "float32", "device": "cpu", "block_size": 8, "num_blocks": 60, "max_num_seqs": 8, "threads": 1}
    config = EngineConfig.from_options(model=str(folder), **on.engine({**base, **options}))
    core = build_engine_core(resolve_engine(config))
    requests = [request(number, prompt, params) for number, prompt in enumerate(PROMPTS)]
    if beside:
        requests += [
            request(len(PROMPTS) + i, prompt, SamplingParams(max_tokens=5, temperature=0)) for i, prompt in
            enumerate(PROMPTS)
        ]  # fmt: skip
    answers: Answers = drive(core, requests)
    core.shutdown()
    assert len(answers.pooled) == len(PROMPTS)
    assert all(answers.finishes[f"r{number}", 0].status.finish_reason == "stop" for number in range(len(PROMPTS)))
    return [answers.pooled[f"r{number}"] for number in range(len(PROMPTS))]


def states(model: torch.nn.Module, prompt: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).last_hidden_state[0].numpy()


# Qwen3-Embedding's shape, and decoders with windows and several KV groups
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "llama", "mistral-window"])
def test_the_last_hidden_state(on: DeviceUnderTest, tmp_path: Path, name: str) -> None:
    model = saved(name, tmp_path)
    expected = [states(model, prompt)[-1] for prompt in PROMPTS]
    for got, want in zip(pooled(on, tmp_path, RAW), expected, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_mean_first_and_every_state(on: DeviceUnderTest, tmp_path: Path, kernels: str) -> None:
    on.must_run(kernels)
    model = saved("qwen3", tmp_path)
    each = [states(model, prompt) for prompt in PROMPTS]
    options = {"kernels": kernels, "max_num_batched_tokens": 8, "enable_prefix_caching": False}
    for got, want in zip(pooled(on, tmp_path, RAW, pooling_type="mean", **options), each, strict=True):
        np.testing.assert_allclose(got, want.mean(0), atol=1e-5, rtol=1e-5)
    for got, want in zip(pooled(on, tmp_path, RAW, pooling_type="cls", **options), each, strict=True):
        np.testing.assert_allclose(got, want[0], atol=1e-5, rtol=1e-5)
    tokens = PoolingParams(task="token_embed")
    for got, want in zip(pooled(on, tmp_path, tokens, **options), each, strict=True):
        np.testing.assert_allclose(got, want / np.linalg.norm(want, axis=1, keepdims=True), atol=1e-5)


def test_length_and_dimensions(on: DeviceUnderTest, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    raw = pooled(on, tmp_path, RAW)
    whole = pooled(on, tmp_path, PoolingParams(task="embed"))
    short = pooled(on, tmp_path, PoolingParams(task="embed", dimensions=7))
    for vector, unit, cut in zip(raw, whole, short, strict=True):
        np.testing.assert_allclose(unit, vector / np.linalg.norm(vector), atol=1e-6)
        np.testing.assert_allclose(cut, vector[:7] / np.linalg.norm(vector[:7]), atol=1e-6)


@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_chunks_and_neighbours_change_no_bit(on: DeviceUnderTest, tmp_path: Path, pooling_type: str) -> None:
    on.must_promise_bits()
    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).float().save_pretrained(tmp_path)
    options = {"pooling_type": pooling_type, "enable_prefix_caching": False}
    alone = pooled(on, tmp_path, RAW, max_num_seqs=1, **options)
    for changes in ({"max_num_batched_tokens": 8}, {"beside": True}, {"num_blocks": 9, "beside": True}):
        found = pooled(on, tmp_path, RAW, **{**options, **changes})  # type: ignore[arg-type]
        assert [vector.tobytes() for vector in found] == [vector.tobytes() for vector in alone], changes


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"num_labels": 3}, lambda logits: torch.softmax(logits, -1)),
        ({"num_labels": 1}, torch.sigmoid),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"num_labels": 1, "problem_type": "regression"}, lambda logits: logits),
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_classification_heads(
    on: DeviceUnderTest, tmp_path: Path, name: str, changes: dict[str, object], activation: object
) -> None:
    model = saved(name, tmp_path, transformers.AutoModelForSequenceClassification, **changes)
    setup = resolve_engine(EngineConfig.from_options(model=str(tmp_path)))
    assert setup.tasks.names == ("classify", *(("score",) if changes["num_labels"] == 1 else ()), "token_classify")
    assert len(setup.tasks.plan.labels) == changes["num_labels"]
    logits = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            logits.append(model(torch.tensor([prompt])).logits[0])
    found = pooled(on, tmp_path, PoolingParams(task="classify"), quantization=None)
    for got, want in zip(found, logits, strict=True):
        np.testing.assert_allclose(got, activation(want).numpy(), atol=1e-5, rtol=1e-5)  # type: ignore[operator]
    for got, want in zip(
        pooled(on, tmp_path, PoolingParams(task="classify", use_activation=False)), logits, strict=True
    ):
        np.testing.assert_allclose(got, want.numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", [8, 512])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_class_per_token(on: DeviceUnderTest, tmp_path: Path, name: str, budget: int) -> None:
    model = saved(name, tmp_path, transformers.AutoModelForTokenClassification, num_labels=5)
    setup = resolve_engine(EngineConfig.from_options(model=str(tmp_path)))
    assert setup.tasks.names == ("token_classify",)
    assert setup.tasks.plan.default_task == "token_classify"
    for params, activation in (
        (PoolingParams(task="token_classify"), lambda logits: torch.softmax(logits, -1)),
        (PoolingParams(task="token_classify", use_activation=False), lambda logits: logits),
    ):
        found = pooled(on, tmp_path, params, max_num_batched_tokens=budget, enable_prefix_caching=False)
        for got, prompt in zip(found, PROMPTS, strict=True):
            with torch.inference_mode():
                want = activation(model(torch.tensor([prompt])).logits[0])
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, want.numpy(), atol=1e-5, rtol=1e-5)


def test_the_head_of_a_prompt_takes_every_token(on: DeviceUnderTest, tmp_path: Path) -> None:
    """As in vLLM; the last token's classes are the prompt's."""
    on.must_promise_bits()
    saved("llama", tmp_path, transformers.AutoModelForSequenceClassification, num_labels=3)
    tokens = pooled(on, tmp_path, PoolingParams(task="token_classify"), enable_prefix_caching=False)
    assert [found.shape for found in tokens] == [(len(prompt), 3) for prompt in PROMPTS]
    for found, of_prompt in zip(tokens, pooled(on, tmp_path, PoolingParams(task="classify")), strict=True):
        assert found[-1].tobytes() == of_prompt.tobytes()


def test_hidden_states_that_are_not_finite_end_their_request_alone(on: DeviceUnderTest, tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    with torch.no_grad():
        model.embed_tokens.weight[PROMPTS[3][2]] = float("inf")
    model.save_pretrained(tmp_path)
    options = on.engine({"dtype": "float32", "num_blocks": 60, "block_size": 8})
    core = build_engine_core(resolve_engine(EngineConfig.from_options(model=str(tmp_path), **options)))
    answers = drive(core, [request(number, prompt, RAW) for number, prompt in enumerate(PROMPTS)])
    core.shutdown()
    broken = {f"r{n}" for n, prompt in enumerate(PROMPTS) if PROMPTS[3][2] in prompt}
    assert answers.pooled.keys() == {f"r{number}" for number in range(len(PROMPTS))} - broken
    for name in broken:
        assert answers.finishes[name, 0].message == "the model's hidden states are not finite"


def test_embedding_gemma(on: DeviceUnderTest, tmp_path: Path) -> None:
    """Its tokens attend to both sides, within a window in most layers; a prompt is one chunk, and has no KV."""
    model = saved("gemma3", tmp_path, use_bidirectional_attention=True, sliding_window=5)
    model = transformers.AutoModel.from_pretrained(tmp_path).float().eval()
    assert model.config.sliding_window == 5
    setup = resolve_engine(EngineConfig.from_options(model=str(tmp_path)))
    assert setup.groups == ()
    assert not setup.config.scheduler.enable_chunked_prefill
    assert setup.tasks.names == ("embed", "score", "token_embed")
    for kernels in ("native", "torch") if on.device.type == "cpu" else (on.kernels,):
        for got, prompt in zip(pooled(on, tmp_path, RAW, kernels=kernels), PROMPTS, strict=True):
            np.testing.assert_allclose(got, states(model, prompt).mean(0), atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="enable_prefix_caching: the tokens of this model attend to the whole prompt"):
        resolve_engine(EngineConfig.from_options(model=str(tmp_path), enable_prefix_caching=True))


def test_labels_come_from_the_files(tmp_path: Path) -> None:
    saved("llama", tmp_path, transformers.AutoModelForSequenceClassification, num_labels=2)
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"] = {"0": "bad", "1": "good"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve_engine(EngineConfig.from_options(model=str(tmp_path))).tasks.plan.labels == ("bad", "good")
