"""Default sampling parameters: where they come from, and which come first."""

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter

from pagoda.base.config import ModelConfig
from pagoda.base.errors import ConfigError
from pagoda.loading.generation_config import default_sampling
from pagoda.loading.model_files import ModelFiles


def folder_with(folder: Path, **values: object) -> ModelFiles:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return ModelFiles("m", folder, "safetensors")


def test_a_model_s_file_gives_the_defaults_and_options_replace_them(tmp_path: Path) -> None:
    files = folder_with(
        tmp_path, temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=7, num_beams=1, min_p=None, eos_token_id=3
    )
    own = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 7}
    assert default_sampling(ModelConfig(), files) == own
    assert default_sampling(ModelConfig(generation_config="vllm"), files) == {}
    replaced = ModelConfig(override_generation_config={"temperature": 0.1, "max_new_tokens": 9})
    assert default_sampling(replaced, files) == {**own, "temperature": 0.1, "max_tokens": 9}
    elsewhere = ModelFiles("m", tmp_path / "none", "safetensors")
    assert default_sampling(ModelConfig(generation_config=str(tmp_path)), elsewhere) == own


def test_a_gguf_file_s_defaults_come_before_the_catalog_s(tmp_path: Path) -> None:
    files = ModelFiles("smollm2-135m", tmp_path / "m.gguf", "gguf")
    for keys, expected in (
        ({}, {"temperature": 0.2, "top_p": 0.9}),
        ({"temp": 0.5, "penalty_repeat": 1.5}, {"temperature": 0.5, "repetition_penalty": 1.5}),
    ):
        writer = GGUFWriter(files.path, "llama")
        for key, value in keys.items():
            writer.add_float32(f"general.sampling.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert default_sampling(ModelConfig(model="smollm2-135m"), files) == expected


def test_what_a_gguf_file_says_and_nothing_uses_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_float32("general.sampling.xtc_probability", 0.5)
    writer.add_int32("general.sampling.mirostat", 0)
    writer.add_array("tokenizer.ggml.suppress_tokens", [3, 4])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert default_sampling(ModelConfig(model="mine"), ModelFiles("mine", tmp_path / "m.gguf", "gguf")) == {}
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / 'm.gguf'}: not used: xtc_probability=0.5, suppress_tokens=[3, 4]; ")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(), "generation_config.json: temperature=-1 is not allowed: .*--generation-config vllm"),
        (ModelConfig(generation_config="/no/folder"), "generation_config=/no/folder: there is no /no/folder"),
        (
            ModelConfig(generation_config="vllm", override_generation_config={"temprature": 1}),
            "override_generation_config: .*temprature.*did you mean 'temperature'",
        ),
        (
            ModelConfig(generation_config="vllm", override_generation_config={"ignore_eos": True}),
            "override_generation_config: 'ignore_eos' cannot have another default; take one of temperature, .*request",
        ),
    ],
    ids=str,
)
def test_unusable_defaults_name_where_they_stand(tmp_path: Path, config: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        default_sampling(config, folder_with(tmp_path, temperature=-1))


def test_lengths_of_an_answer_count_what_it_begins_with(tmp_path: Path) -> None:
    """As transformers counts them: max_length whole answers, max_new_tokens all but the first token."""
    files = folder_with(tmp_path, max_length=142, min_length=56, no_repeat_ngram_size=3, forced_eos_token_id=2)
    rules = {"no_repeat_ngram_size": 3, "forced_eos_token_id": 2}
    assert default_sampling(ModelConfig(), files, 2) == {"max_tokens": 140, "min_tokens": 54, **rules}
    assert default_sampling(ModelConfig(), files) == rules
    files = folder_with(tmp_path, max_new_tokens=20, max_length=142, min_new_tokens=1, min_length=56)
    assert default_sampling(ModelConfig(), files, 2) == {"max_tokens": 19, "min_tokens": 0}
    with pytest.raises(ConfigError, match=r"generation_config.json: max_tokens=-1 is not allowed"):
        default_sampling(ModelConfig(), folder_with(tmp_path, max_length=1), 2)


def test_what_transformers_would_use_and_is_not_used_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "pagoda"):
        default_sampling(ModelConfig(), folder_with(tmp_path, num_beams=4, length_penalty=2.0, early_stopping=False))
        assert "num_beams=4, length_penalty=2.0;" in caplog.text
        caplog.clear()
        default_sampling(ModelConfig(), folder_with(tmp_path, num_beams=1, early_stopping=None))
    assert not caplog.text
