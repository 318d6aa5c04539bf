"""Absurd values in the files that come with a model: the error names the file and the value, and stays short."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from pagoda.base.config import ModelConfig
from pagoda.base.errors import ConfigError, RequestError
from pagoda.engine.templates.chat_template import ChatTemplate
from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from pagoda.loading.fetch_hub import HubModel, is_complete
from pagoda.loading.gguf_file import GGUFFile
from pagoda.loading.model_config import read_architecture
from pagoda.loading.model_files import ModelFiles, identify
from pagoda.loading.resolve import resolve_model
from pagoda.loading.safetensors_header import shard_files
from tests.models.tiny import make_model, save

LONG = "x" * 5000
NESTED = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A model folder whose small files may be changed."""
    for path in saved.iterdir():
        if path.suffix == ".safetensors":
            (tmp_path / path.name).symlink_to(path)
        else:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def refusal(call: Any, *arguments: object, **named: object) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **named)
    message = str(caught.value)
    assert len(message) < 2000
    return message


def setting(folder: Path, literal: str, key: str) -> None:
    """Write `literal` as the value of `key`; JSON has no way to say 1e999 but by its text."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), key: "THE VALUE"}
    path.write_text(json.dumps(values).replace('"THE VALUE"', literal))


@pytest.mark.parametrize(
    ("key", "literal", "words"),
    [
        ("rope_theta", "1e999", "rope_theta = inf, expected a finite number"),
        ("rope_theta", "NaN", "rope_theta = nan, expected a finite number"),
        ("rope_theta", "1", "rope_theta = 1.0, expected a positive number above 1"),
        ("rope_theta", "1" + "0" * 4000, "rope_theta = <integer of 13288 bits>, expected a finite number"),
        ("rms_norm_eps", "-1", "rms_norm_eps = -1, expected a number of at least 0"),
        ("rms_norm_eps", "Infinity", "rms_norm_eps = inf"),
        ("hidden_size", "1" + "0" * 4000, "hidden_size = <integer of 13288 bits>, expected at most"),
        ("hidden_size", "1" + "0" * 5000, "config.json: corrupt JSON"),
        ("hidden_size", f'"{LONG}"', "hidden_size = 'xxx"),
        ("hidden_size", NESTED, "config.json: corrupt JSON: it is nested too deeply"),
        ("hidden_size", "[" * 500 + "]" * 500, "hidden_size = [[["),
        ("hidden_act", f'"{LONG}"', "hidden_act 'xxx"),
        ("architectures", f'["{LONG}"]', "unknown model architecture 'xxx"),
        ("architectures", f'"{LONG}"', "architectures = 'xxx"),
        ("eos_token_id", "1" + "0" * 30, "eos_token_id = 1000"),
        ("eos_token_id", json.dumps(list(range(5000))), "eos_token_id = [0, 1, 2"),
        ("max_position_embeddings", "67108865", "expected at most 67108864"),
        ("rope_scaling", '{"type": "linear", "factor": 1e300}', "factor"),
        ("rope_scaling", '{"type": "linear", "factor": 100000}', "positions; at most 67108864 are supported"),
        ("rope_scaling", '{"type": "yarn", "factor": 4, "beta_fast": 0}', "beta_fast = 0, expected a positive number"),
        ("rope_scaling", '{"type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": -7.2}', "mscale_all_dim = -7.2"),
        (
            "rope_scaling",
            '{"type": "llama3", "factor": 8, "original_max_position_embeddings": 64, "low_freq_factor": 4,'
            ' "high_freq_factor": 4}',
            "low_freq_factor = 4.0 must be less than high_freq_factor = 4.0",
        ),
        ("quantization_config", json.dumps({"quant_method": LONG}), "quant_method 'xxx"),
        ("quantization_config", json.dumps({"quant_method": "gptq", "bits": 10**30}), "bits = 1000"),
        (
            "quantization_config",
            json.dumps({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {LONG: 1}}),
            "settings of its own for 'xxx",
        ),
        (
            "quantization_config",
            json.dumps({"quant_method": "awq", "bits": 4, "group_size": 32, "version": LONG}),
            "version 'xxx",
        ),
        ("layer_types", json.dumps([LONG] * 3), "layer_types[0] 'xxx"),
    ],
    ids=lambda value: value[:30],
)
def test_config_json(folder: Path, key: str, literal: str, words: str) -> None:
    if key in ("rope_theta", "rope_scaling"):
        path = folder / "config.json"
        values = json.loads(path.read_text())
        values.pop("rope_parameters", None)
        path.write_text(json.dumps({**values, "max_position_embeddings": 2048}))
    if key == "layer_types":
        setting(folder, '["Qwen2ForCausalLM"]', "architectures")
    setting(folder, literal, key)
    message = refusal(read_architecture, identify(folder))
    assert words in message
    assert "config.json" in message


@pytest.mark.parametrize("value", [0, -3, 1e999], ids=str)
def test_gemma_scales(folder: Path, value: float) -> None:
    setting(folder, '["Gemma3ForCausalLM"]', "architectures")
    setting(folder, '"gelu_pytorch_tanh"', "hidden_activation")
    setting(folder, json.dumps(value), "query_pre_attn_scalar")
    assert "query_pre_attn_scalar = " in refusal(read_architecture, identify(folder))


@pytest.mark.parametrize("text", [NESTED, '{"eos_token_id": [[1]]}', '{"eos_token_id": -5}', "\xff"])
def test_generation_config(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_bytes(text.encode("latin-1"))
    assert "generation_config.json" in refusal(read_architecture, identify(folder))


@pytest.mark.parametrize(
    "text",
    [NESTED, '{"weight_map": ' + NESTED + "}", '{"weight_map": {"a": []}}', json.dumps({"weight_map": {"a": LONG}})],
    ids=["nested", "nested map", "list", "long name"],
)
def test_index_of_shards(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(shard_files, folder)
    assert not is_complete(folder, HubModel("some/model"))


@pytest.mark.parametrize(
    "name",
    [LONG, f"/{LONG}", f"./{LONG}", f"some/{LONG}", f"{LONG}.gguf", "~nobody-of-that-name/x", "\ud800/\ud800", "\0"],
    ids=["bare", "absolute", "relative", "hub id", "gguf", "user", "surrogates", "zero byte"],
)
def test_model_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "model" in refusal(resolve_model, ModelConfig(model=name, cache_dir=str(tmp_path)))


# ---- tokenizers


def tokenizer_json(pattern: str = r"\w+|\W") -> dict[str, Any]:
    vocab = {letter: index for index, letter in enumerate("abcdefgh !")}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()
    return json.loads(backend.to_str())


def load(folder: Path, tokenizer: object, **files: object) -> Any:
    """The tokenizer of a folder with this tokenizer.json and further JSON files (names without ".json")."""
    (folder / "tokenizer.json").write_text(tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return load_tokenizer(ModelFiles("m", folder, "safetensors"))


def test_a_healthy_tokenizer_is_taken(tmp_path: Path) -> None:
    assert load(tmp_path, tokenizer_json()).encode("abc") == [0, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": LONG}},
        {"model": {"type": "BPE", "vocab": {"a": 0, LONG: 1}, "merges": [[LONG + "y", "a"]]}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "nowhere", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ],
    ids=["type", "merge", "negative id", "panic in normalizer", "panic in post-processor"],
)
def test_tokenizer_json(tmp_path: Path, change: dict[str, Any]) -> None:
    message = refusal(load, tmp_path, {**tokenizer_json(), **change})
    assert "tokenizer.json: cannot be read as a tokenizer" in message


def test_nested_tokenizer_json(tmp_path: Path) -> None:
    assert "tokenizer.json: cannot be read" in refusal(load, tmp_path, '{"a":' * 5000 + "1" + "}" * 5000)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (NESTED, "nested too deeply"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder = [1], expected an object"),
        ({"added_tokens_decoder": {"one": {"content": "x"}}}, "has the key 'one', expected a token id"),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}, "expected a token id"),
        ({"added_tokens_decoder": {"10": 5}}, "added_tokens_decoder[10] = 5"),
        ({"added_tokens_decoder": {"10": {"content": "x", "lstrip": LONG}}}, "added_tokens_decoder[10]"),
        ({"added_tokens_decoder": {"99": {"content": LONG}}}, "with tokenizer.json it gets 10"),
        (
            {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": LONG},
            "is not in the vocabulary",
        ),
        ({"chat_template": 5}, "the chat template is 5, expected a string"),
        ({"chat_template": [{"name": "default"}]}, "expected objects with name and template"),
        ({"chat_template": [{"name": "default", "template": 5}]}, "expected a string or strings by name"),
        ({"chat_template": "{{ " + "(" * 20_000 + ")" * 20_000 + " }}"}, "the chat template"),
        ({"chat_template": "{{ " + "-" * 20_000 + "1 }}"}, "the chat template"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_tokenizer_config(tmp_path: Path, config: object, words: str) -> None:
    assert words in refusal(load, tmp_path, tokenizer_json(), tokenizer_config=config)


def test_a_chat_template_that_python_cannot_compile() -> None:
    """It is compiled where it is rendered; the error there names it too."""
    template = ChatTemplate("{% if x %}" * 200 + "{% endif %}" * 200)
    assert "the chat template is nested too deeply" in refusal(template.render, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("stated", ["</s>", [[1]], -1, {"id": 1}], ids=str)
def test_end_tokens_of_a_tokenizers_folder(tmp_path: Path, stated: object) -> None:
    message = refusal(load, tmp_path, tokenizer_json(), generation_config={"eos_token_id": stated})
    assert "generation_config.json: eos_token_id = " in message


def test_a_text_that_the_library_cannot_encode_is_a_refused_request(tmp_path: Path) -> None:
    """The library's regular expressions panic after some million steps, in short texts and in long ones."""
    tokenizer = load(tmp_path, tokenizer_json(r"!(?:a|b|ab)+c|."))
    for text in ("!" + "ab" * 40, "!" + "ab" * 4_000):
        with pytest.raises(RequestError, match="prompt: the tokenizer cannot split this text"):
            tokenizer.encode(text)
        with pytest.raises(RequestError, match="prompt: the tokenizer cannot split this text"):
            tokenizer.encode_batch(["abc", text])
        with pytest.raises(RequestError, match="messages: the tokenizer cannot split this text"):
            tokenizer.encode_marked(text)
    assert tokenizer.encode("abc") == [0, 1, 2]


# ---- GGUF


def test_gguf_alignment_and_long_names(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_int32("general.alignment", -8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "general.alignment = -8, expected 1 .. " in refusal(GGUFFile, path)
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    path.write_bytes(head + (5000).to_bytes(8, "little") + b"k" * 5000 + (77).to_bytes(4, "little"))
    assert "has the unknown type 77" in refusal(GGUFFile, path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("unknown_token_id", 99, "unknown_token_id 99 is outside the vocabulary of 3 tokens"),
        ("bos_token_id", 99, "bos_token_id 99 is outside the vocabulary"),
    ],
)
def test_gguf_token_ids(tmp_path: Path, key: str, value: int, words: str) -> None:
    path = sentencepiece_gguf(tmp_path / "t.gguf", ["a", "b", "ab"], **{key: value})
    assert words in refusal(load_tokenizer, ModelFiles("m", path, "gguf"))


def test_gguf_tokens_of_absurd_length(tmp_path: Path) -> None:
    """Finding the merges of a token takes time in proportion to its length, however long it is."""
    path = sentencepiece_gguf(tmp_path / "t.gguf", ["a", "b", "a" * 1_000_000])
    assert load_tokenizer(ModelFiles("m", path, "gguf")).facts.vocab_size == 3


def sentencepiece_gguf(path: Path, tokens: list[str], **ids: int) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    for key, value in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
