"""What speculative_config is refused for, once the model is known, and what a draft model takes of the memory."""

import json
from pathlib import Path

import pytest
from transformers import T5Config

from pagoda.assembly.engine_setup import resolve_engine
from pagoda.assembly.sizing import weights_in_memory
from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from tests.engine.driver import write_tiny_llama
from tests.models.tiny_vision import CONFIGS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def config(model: Path, speculative: dict[str, object], **options: object) -> EngineConfig:
    return EngineConfig.from_options(model=str(model), device="cpu", speculative_config=speculative, **options)


def test_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other")
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "vocab_size": 161}))
    with pytest.raises(ConfigError, match="161 token ids, the model 160"):
        resolve_engine(config(model, {"model": str(other)}))


_T5 = T5Config(vocab_size=160, d_model=48, d_ff=96, num_layers=1, num_heads=3)
WRONG: dict[str, tuple[dict[str, object], str]] = {
    "Qwen2_5_VLForConditionalGeneration": (CONFIGS["qwen2.5-vl"]().to_dict(), "has an encoder"),
    "T5ForConditionalGeneration": ({**_T5.to_dict(), "decoder_start_token_id": 5}, "has an encoder"),
    "LlamaForSequenceClassification": ({}, "does not generate text"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_model_that_cannot_draft_is_refused(model: Path, tmp_path: Path, kind: str) -> None:
    other = write_tiny_llama(tmp_path / "other")
    settings, message = WRONG[kind]
    own = settings or json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**own, "architectures": [kind]}))
    with pytest.raises(ConfigError, match=rf"speculative_config.model='.*other' \(.*\) {message}"):
        resolve_engine(config(model, {"model": str(other)}))


@pytest.mark.parametrize("speculative", [{"method": "layer_skip"}, {"method": "draft_model", "model": "x"}])
def test_an_executor_without_a_model_runs_no_model(model: Path, speculative: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="take ngram or suffix"):
        resolve_engine(config(model, speculative, distributed_executor_backend="fake"))


def test_all_layers_are_too_many(model: Path) -> None:
    with pytest.raises(ConfigError, match="num_draft_layers=2 must be less than the model's 2 layers"):
        resolve_engine(config(model, {"method": "layer_skip", "num_draft_layers": 2}))


@pytest.mark.parametrize(("options", "ahead"), [({}, 0), ({"async_scheduling": True}, 1), ({"pipeline_depth": 3}, 2)])
def test_how_many_steps_are_scheduled_ahead_of_drafts(model: Path, options: dict[str, object], ahead: int) -> None:
    setup = resolve_engine(config(model, {"method": "ngram"}, **options))
    assert setup.drafting is not None
    assert setup.drafting.num_steps_ahead == ahead


def test_a_draft_model_counts_as_memory(model: Path) -> None:
    plain = resolve_engine(config(model, {}))
    drafting = resolve_engine(config(model, {"model": str(model)}))
    # Its weights once more, the KV of two sequences of full length, and the activations of 256 tokens.
    kv_bytes = 2 * 512 * 2 * 2 * 2 * 16 * 4
    activation_bytes = 256 * (8 * 48 + 3 * 96 + 160) * 4
    assert weights_in_memory(drafting) > 2 * weights_in_memory(plain) + kv_bytes + activation_bytes
