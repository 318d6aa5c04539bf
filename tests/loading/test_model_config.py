"""Facts of models, read without torch and without weights, from settings as they are found in the wild."""

import json
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from pagoda.base.errors import ConfigError
from pagoda.loading.gguf_file import GGUFFile, StringArray
from pagoda.loading.model_config import read_architecture
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.token_ids import end_token_ids
from pagoda.models.decoder_config import DecoderConfig
from pagoda.models.gemma3 import Gemma3VisionConfig


def read(tmp_path: Path, **values: object) -> DecoderConfig:
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_architecture(ModelFiles("test", tmp_path, "safetensors"))[1]


def test_gemma3_4b_leaves_out_what_equals_the_first_release(tmp_path: Path):
    found = read(
        tmp_path,
        architectures=["Gemma3ForConditionalGeneration"],
        eos_token_id=[1, 106],
        torch_dtype="bfloat16",
        text_config={
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        vision_config={
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
        },
    )
    assert isinstance(found, Gemma3VisionConfig)
    assert (found.vision.side, found.vision.num_layers, found.factor) == (64, 27, 4)
    facts = found.text
    spec = facts.spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert (spec.max_position, spec.eos_token_ids, spec.tie_embeddings) == (131_072, (1, 106), True)
    assert spec.layer_windows == tuple(0 if (layer + 1) % 6 == 0 else 1024 for layer in range(34))
    assert (facts.rope_full.factor, facts.rope_full.theta) == (8.0, 1e6)
    assert (facts.rope_window.factor, facts.rope_window.theta) == (1.0, 1e4)
    assert facts.attention_scale == 256**-0.5


def test_gemma3_270m_is_read_from_its_config(tmp_path: Path):
    facts = read(
        tmp_path,
        architectures=["Gemma3ForCausalLM"],
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        vocab_size=262144,
        sliding_window=512,
        _sliding_window_pattern=6,
        rope_local_base_freq=10000.0,
        rope_theta=1e6,
        query_pre_attn_scalar=256,
        rope_scaling=None,
        attn_logit_softcapping=None,
    )
    assert facts.spec.layer_windows.count(0) == 3
    assert (facts.attention_softcap, facts.logit_softcap) == (0.0, 0.0)


def test_a_window_as_long_as_the_context_is_dropped(tmp_path: Path):
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    values = {**shape, "vocab_size": 9, "max_position_embeddings": 4096, "architectures": ["MistralForCausalLM"]}
    assert read(tmp_path, **values, sliding_window=4096).spec.layer_windows == (0, 0)
    assert read(tmp_path, **values, sliding_window=4095).spec.layer_windows == (4095, 4095)
    assert read(tmp_path, **values, sliding_window=None).spec.layer_windows == (0, 0)


def write(path: Path, tokens: list[str], types: list[int], **ids: int) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    writer.add_array("test.halves", [0.5, 1.5])
    writer.add_bool("test.flag", True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def test_end_tokens_are_named_or_plain_from_their_text(tmp_path: Path):
    words = ["<unk>", "<eos>", "hi", "<end_of_turn>", "<|im_end|>"]
    control = [3, 3, 1, 3, 1]
    assert end_token_ids(write(tmp_path / "a.gguf", words, control, eos_token_id=1)) == (1, 3)  # 4 is ordinary text
    assert end_token_ids(write(tmp_path / "b.gguf", words, control, eos_token_id=3, eot_token_id=1)) == (3, 1)
    with pytest.raises(ConfigError, match="5 tokens but 2 token types"):
        end_token_ids(write(tmp_path / "c.gguf", words, [3, 3]))


def test_strings_of_any_length_and_content_are_found(tmp_path: Path):
    """Those that are found together (short, without zeros), and what interrupts them."""
    generator = np.random.default_rng(5)
    words = ["x" * int(length) for length in generator.integers(0, 9, 20_000)]
    awkward = (
        "",
        "\0",
        "\0" * 9,
        "a\0\0\0\0\0\0\0b",
        "y" * 255,
        "y" * 256,
        "z" * 70_000,
        "日本" * 40,
        "\x01\0\0\0\0\0\0\0c",
    )
    for word in awkward:
        for at in generator.integers(0, len(words), 5):
            words.insert(int(at), word)
    file = write(tmp_path / "a.gguf", [*words, ""], [1] * (len(words) + 1))
    assert file.strings("tokenizer.ggml.tokens") == [*words, ""]
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray)
    assert [tokens[index] for index in range(len(words))] == words
    plain = [word for word in words if "\0" not in word]
    assert write(tmp_path / "b.gguf", plain, [1] * len(plain)).strings("tokenizer.ggml.tokens") == plain


def test_a_million_empty_strings_are_found_in_time(tmp_path: Path):
    """A window of the file at a time, not one string: 290 s otherwise."""
    path = tmp_path / "a.gguf"
    head = struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 1_000_000)
    path.write_bytes(b"GGUF" + head + bytes(8 * 1_000_000))
    begin = time.process_time()
    assert GGUFFile(path).strings("k") == [""] * 1_000_000
    assert time.process_time() - begin < 20


def test_gguf_values_by_kind(tmp_path: Path):
    words = ["grüße", "", "日本"]
    file = write(tmp_path / "a.gguf", words, [1, 1, 1], eos_token_id=2)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray)
    assert (len(tokens), tokens[2], file.strings("tokenizer.ggml.tokens")) == (3, words[2], words)
    halves = file.numbers("test.halves")
    assert halves is not None
    assert np.array_equal(halves, [0.5, 1.5])
    assert (file.get("test.flag", bool), file.get("nothing", int)) == (True, None)
    assert (file.strings("nothing"), file.numbers("nothing")) == (None, None)
    assert file.require("tokenizer.ggml.eos_token_id", float) == 2.0
    for key, kind, message in (
        ("test.flag", int, "test.flag is bool, expected int"),
        ("general.architecture", int, "general.architecture is str, expected int"),
        ("nothing", str, "the metadata has no 'nothing'"),
    ):
        with pytest.raises(ConfigError, match=message):
            file.require(key, kind)
    with pytest.raises(ConfigError, match="general.architecture is not an array of strings"):
        file.strings("general.architecture")
    with pytest.raises(ConfigError, match="tokens is not an array of numbers"):
        file.numbers("tokenizer.ggml.tokens")


def test_no_torch_is_needed(tmp_path: Path):
    """`pagoda plan` and the command line start without it."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    values = {**shape, "vocab_size": 9, "max_position_embeddings": 32, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    code = (
        "import sys, pathlib\n"
        "from pagoda.loading.model_config import read_model\n"
        "from pagoda.loading.model_files import ModelFiles\n"
        "model = read_model(ModelFiles('m', pathlib.Path(sys.argv[1]), 'safetensors'))\n"
        "print(model.spec.head_dim, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["32", "False"]
    assert read_architecture(ModelFiles("m", tmp_path, "safetensors"))[1].spec.head_dim == 32
