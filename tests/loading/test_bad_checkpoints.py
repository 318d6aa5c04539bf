"""Whatever is wrong with a checkpoint, the answer is a ConfigError that names the file and the trouble."""

import json
import random
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from pagoda.base.errors import ConfigError
from pagoda.kernels.select import select_ops
from pagoda.loading.gguf_file import GGUFFile
from pagoda.loading.loader import load_model
from pagoda.loading.model_config import read_architecture, summarize_weights
from pagoda.loading.model_files import ModelFiles, identify
from pagoda.loading.weights import open_weights
from pagoda.worker.devices.cpu import CpuDevice
from tests.models.gguf_writer import write_gguf
from tests.models.tiny import make_model, save

CPU = torch.device("cpu")


def load(path: Path) -> None:
    load_model(identify(path), select_ops("torch", CpuDevice(1)), torch.float32, CPU)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(make_model("llama"), tmp_path / "model")


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(make_model("llama"), path, Kind.Q8_0)
    return path.read_bytes()


def edit(folder: Path, **changes: Any) -> None:
    """Change settings in config.json; None removes one."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "unknown model architecture 'BloomForCausalLM'"),
        ({"architectures": ["LlamaForCasualLM"]}, "did you mean 'LlamaForCausalLM'"),
        ({"architectures": None}, "'architectures' is missing"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported; supported: gelu"),
        ({"hidden_size": "96"}, "hidden_size = '96', expected a positive integer"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0, expected a positive integer"),
        ({"num_hidden_layers": 1 << 30}, "num_hidden_layers = 1073741824, expected at most 4096"),
        ({"vocab_size": 1 << 40}, "vocab_size = 1099511627776, expected at most"),
        ({"hidden_size": 1 << 26, "head_dim": 32}, "the model's settings ask for (131, 67108864)"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True, expected a positive integer"),
        ({"num_key_value_heads": 2}, "3 attention heads do not divide by 2 KV heads"),
        ({"head_dim": 33}, "head_dim 33 is odd"),
        ({"head_dim": None, "hidden_size": 97}, "hidden_size 97 does not divide by 3"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small', expected a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes', expected true or false"),
        ({"rope_parameters": {"rope_type": "made-up"}}, "rope_type 'made-up' is not supported; supported: default"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'factor' is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor = 0.5, expected 1 or more"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta = -1.0, expected a positive number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not supported"),
        ({"rope_parameters": None, "rope_scaling": {"type": "su"}}, "type 'su' is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>', expected a token id or a list"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: 'bits' is missing"),
        (
            {"quantization_config": {"quant_method": "bitnet"}},
            "quant_method 'bitnet' is not supported; supported: awq, gptq, compressed-tensors, fp8, mxfp4",
        ),
        ({"quantization_config": "gptq"}, "quantization_config = 'gptq', expected an object"),
        ({"vocab_size": 132}, "has the shape (131, 96), the model's settings ask for (132, 96)"),
        ({"intermediate_size": 161}, "has the shape (160, 96), the model's settings ask for (161, 96)"),
        ({"num_hidden_layers": 4}, "tensor 'model.layers.3."),
        ({"attention_bias": True}, "tensor 'model.layers.0.self_attn.q_proj.bias' is missing"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"]}, "layer_types"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"] * 2 + ["linear_attention"]},
            "layer_types[2] 'linear_attention' is not supported; supported: full_attention, sliding_attention",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"] * 2},
            "layer_types has 2 entries for 3 layers",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "mish"}, "hidden_activation 'mish' is not"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention = True is not supported",
        ),
        ({"architectures": ["Olmo2ForCausalLM"], "sliding_window": 8}, "sliding_window = 8 is not supported"),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]},
            "no_rope_layers = [1, 0], expected a number for each of the 3 layers",
        ),
        (
            {"architectures": ["Exaone4ForCausalLM"], "sliding_window": 8, "sliding_window_pattern": "LLLG"},
            "sliding_window_pattern = 'LLLG', expected a positive integer",
        ),
        (
            {"architectures": ["Qwen2MoeForCausalLM"], "use_sliding_window": True},
            "use_sliding_window = True is not supported",
        ),
        (
            {"architectures": ["Ministral3ForCausalLM"], "rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta = 0.1 is not supported",
        ),
        (
            {"architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 1.5},
            "partial_rotary_factor = 1.5, expected at most 1",
        ),
        ({"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0.0}, "expected a positive number"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_bad_settings(folder: Path, changes: dict[str, Any], message: str):
    edit(folder, **changes)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 6}, "tensor 'model.layers.0.block_sparse_moe.gate.weight' has the shape (5, 96)"),
        ({"num_local_experts": 4}, "tensor 'model.layers.0.block_sparse_moe.gate.weight' has the shape (5, 96)"),
        ({"num_local_experts": None}, "'num_experts' is missing"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok = 6 is more than num_local_experts = 5"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0, expected a positive integer"),
        ({"intermediate_size": 161}, "experts.0.w1.weight' has the shape (160, 96), the model's settings ask for (161"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh' is not supported; supported: silu"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "'moe_intermediate_size' is missing"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        (
            {"architectures": ["Qwen2MoeForCausalLM"], "moe_intermediate_size": 160},
            "'shared_expert_intermediate_size' is missing",
        ),
        (
            {"architectures": ["GptOssForCausalLM"], "swiglu_limit": 0.0},
            "swiglu_limit = 0.0, expected a positive number",
        ),
        ({"architectures": ["GptOssForCausalLM"], "rope_parameters": None}, "'rope_scaling' is missing"),
        (
            {"architectures": ["GraniteMoeForCausalLM"], "num_experts_per_tok": 9},
            "num_experts_per_tok = 9 is more than",
        ),
        (
            {"architectures": ["GPT2LMHeadModel"], "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx = True is not supported",
        ),
        ({"architectures": ["StableLmForCausalLM"], "qk_layernorm": True}, "qk_layernorm = True is not supported"),
        ({"architectures": ["PhiForCausalLM"], "qk_layernorm": True}, "qk_layernorm = True is not supported"),
        ({"architectures": ["PhiForCausalLM"], "tie_word_embeddings": True}, "tie_word_embeddings = True is not"),
        ({"architectures": ["Phi3ForCausalLM"], "attention_bias": True}, "attention_bias = True is not supported"),
        ({"architectures": ["CohereForCausalLM"], "use_qk_norm": True}, "use_qk_norm = True is not supported"),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            },
            "short_factor and long_factor must have",
        ),
        (
            {"architectures": ["GPT2LMHeadModel"], "add_cross_attention": True},
            "add_cross_attention = True is not supported",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_bad_settings_of_experts(tmp_path: Path, changes: dict[str, Any], message: str):
    folder = save(make_model("mixtral"), tmp_path / "model")
    edit(folder, **changes)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert message in str(caught.value)


def test_an_expert_that_is_missing(tmp_path: Path):
    folder = save(make_model("mixtral"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.2\.block_sparse_moe\.experts\.3\.w2\.weight' is missing"):
        load(folder)


def test_stacked_experts_of_another_number(tmp_path: Path):
    """A GGUF whose metadata counts other experts than its tensors hold."""
    write_gguf(make_model("mixtral"), tmp_path / "model.gguf", Kind.F32)
    data = (tmp_path / "model.gguf").read_bytes()
    count = b"llama.expert_count" + struct.pack("<II", 4, 5)
    assert count in data
    (tmp_path / "model.gguf").write_bytes(data.replace(count, b"llama.expert_count" + struct.pack("<II", 4, 4)))
    with pytest.raises(ConfigError, match=r"the shape \(5, 96\), the model's settings ask for \(4, 96\)"):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff\xfe"])
def test_corrupt_config_json(folder: Path, text: str):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="config.json: (corrupt JSON|expected a JSON object)"):
        read_architecture(identify(folder))


def test_generation_config_overrides_end_tokens(folder: Path):
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2, 5]}')
    assert read_architecture(identify(folder))[1].spec.eos_token_ids == (5, 2)


def test_truncated_safetensors(folder: Path):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="model.safetensors: truncated or corrupt safetensors"):
            load(folder)


def test_missing_tensor_and_odd_dtype(folder: Path):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    down = tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, path)
    with pytest.raises(ConfigError, match="tensor 'model.layers.1.mlp.down_proj.weight' is missing; did you mean"):
        load(folder)
    save_file({**tensors, "model.layers.1.mlp.down_proj.weight": down.to(torch.int8)}, path)
    with pytest.raises(ConfigError, match="down_proj.weight' is I8, which is not supported"):
        load(folder)


def test_other_peoples_tensor_names(folder: Path):
    path = folder / "model.safetensors"
    save_file({f"transformer.{name}": tensor for name, tensor in load_file(path).items()}, path)
    with pytest.raises(ConfigError, match="no llama weights: none of these tensors exists: model.embed_tokens"):
        load(folder)


def test_shards(tmp_path: Path):
    model = make_model("qwen3")
    folder = save(model, tmp_path / "sharded", max_shard_size="200KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    load(folder)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert summarize_weights(identify(folder)).num_bytes == 4 * num_parameters

    (folder / "consolidated.safetensors").write_bytes(b"a copy in another form")
    load(folder)  # the index does not name it
    index = folder / "model.safetensors.index.json"
    index_text = index.read_text()
    index.unlink()
    load(folder)  # all shards, and not the copy

    index.write_text(index_text)
    shards[1].rename(folder / "elsewhere")
    with pytest.raises(ConfigError, match=f"shard {shards[1].name} is missing"):
        load(folder)
    index.write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(ConfigError, match="names a file outside its folder"):
        load(folder)
    for corrupt in ("{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'):
        index.write_text(corrupt)
        with pytest.raises(ConfigError, match="corrupt index of shards"):
            load(folder)


def test_duplicate_tensor_in_two_files(folder: Path):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    for name in ("a.safetensors", "b.safetensors"):
        (folder / name).write_bytes(whole)
    with pytest.raises(ConfigError, match="is in a.safetensors and in b.safetensors"):
        load(folder)


@pytest.mark.parametrize("right", ["a", "b"])
def test_of_a_tensor_in_two_shards_the_one_that_the_index_names_is_loaded(right: str, folder: Path):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    name = "model.layers.1.mlp.down_proj.weight"
    places = dict.fromkeys(tensors, "a.safetensors") | {name: f"{right}.safetensors"}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": places | {"extra": "b.safetensors"}})
    )
    for shard, others in (("a", tensors), ("b", {"extra": tensors[name]})):
        save_file(others | {name: tensors[name] + float(shard == right)}, folder / f"{shard}.safetensors")
    weights = open_weights(identify(folder))
    found = torch.empty(weights.shape(name))
    weights.read_into(name, found)
    torch.testing.assert_close(found, tensors[name] + 1)
    load(folder)


def test_a_tensor_that_only_the_index_has_is_missing(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    down = "model.layers.1.mlp.down_proj.weight"
    places = dict.fromkeys([*tensors, "unused"], "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    load(folder)  # the model does not need the one that is not there
    save_file({name: tensor for name, tensor in tensors.items() if name != down}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"^{folder}: tensor '{down}' is missing"):
        load(folder)


def test_every_tensor_and_key_of_a_gguf_is_there_once(gguf_bytes: bytes, tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(rewrite(b"blk.1.ffn_down.weight", b"blk.0.ffn_down.weight")(gguf_bytes))
    with pytest.raises(ConfigError, match="'blk.0.ffn_down.weight' is there twice"):
        load(path)
    path.write_bytes(rewrite(b"ggml.bos_token_id", b"ggml.eos_token_id")(gguf_bytes))
    with pytest.raises(ConfigError, match="'tokenizer.ggml.eos_token_id' is there twice"):
        load(path)


def test_a_gguf_is_mapped_without_a_copy_of_its_own(gguf_bytes: bytes, tmp_path: Path):
    """Strict overcommit counts a writable private mapping as memory, so that a larger file could not be opened."""
    file = GGUFFile(_write(tmp_path / "model.gguf", gguf_bytes))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file.path))]
    assert [rights for _, rights, *_ in maps] == ["r--s"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of memory that it knows to be read-only
        load(file.path)


def test_truncated_gguf_at_every_place(gguf_bytes: bytes, tmp_path: Path):
    path = tmp_path / "model.gguf"
    generator = random.Random(1)
    path.write_bytes(gguf_bytes)
    end = max(tensor.offset + tensor.num_bytes for tensor in GGUFFile(path).tensors.values())  # padding follows
    lengths = [4, 5, 8, 12, 23, 24, 25, end - 1, *generator.sample(range(24, end), 60)]
    for length in lengths:
        path.write_bytes(gguf_bytes[:length])
        with pytest.raises(ConfigError, match="truncated|cannot be read"):
            load(path)


@pytest.mark.parametrize("kept", range(10))
def test_a_gguf_that_ends_after_a_string_of_an_array(kept: int, tmp_path: Path):
    """kept: bytes of the length of the next string."""
    key = b"tokens"
    array = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 8, 3)  # of three strings
    path = tmp_path / "model.gguf"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array + struct.pack("<Q", 99) + b"a" * 99 + bytes(8)[:kept]
    )
    with pytest.raises(ConfigError, match="truncated or corrupt"):
        GGUFFile(path)


def test_corrupt_gguf_header_is_a_clear_error_or_the_same_header(gguf_bytes: bytes, tmp_path: Path):
    """Any byte of the header overwritten: a ConfigError, or a file that still loads; never another exception."""
    path = tmp_path / "model.gguf"
    generator = random.Random(2)
    refused = 0
    end = gguf_bytes.index(b"blk.2.ffn_up.weight")
    for _ in range(150):
        broken = bytearray(gguf_bytes)
        broken[generator.randrange(4, end)] = generator.choice((0, 1, 9, 0x7F, 0xFF))
        path.write_bytes(broken)
        try:
            load(path)
        except ConfigError:
            refused += 1
    assert refused > 50


def rewrite(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new, 1)

    return change


def text_field(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rewrite(b"GGUF", b"GGML"), "is not a GGUF file (it starts with b'GGML'"),
        (rewrite(b"GGUF\x03", b"GGUF\x09"), "GGUF version 9 is not supported"),
        (rewrite(b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03"), "big-endian files are not supported"),
        (rewrite(text_field("llama"), text_field("gpt2x")), "unknown GGUF architecture 'gpt2x'"),
        (rewrite(b"llama.block_count", b"llama.block_cownt"), "'num_hidden_layers' is missing"),
        (rewrite(b"llama.attention.head_count\x04", b"llama.attention.head_count\x06"), "head_count is float"),
        (rewrite(b"blk.1.ffn_down.weight", b"blk.1.ffn_dawn.weight"), "tensor 'blk.1.ffn_down.weight' is missing"),
        (rewrite(b"token_embd.weight", b"token_ambd.weight"), "'token_embd.weight' is missing"),
        (rewrite(b"output_norm", b"output_\xffrm"), "is not UTF-8"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_gguf_with_invalid_metadata(gguf_bytes: bytes, tmp_path: Path, change: Callable[[bytes], bytes], message: str):
    path = tmp_path / "model.gguf"
    path.write_bytes(change(gguf_bytes))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope__scaling__type": "made-up"}, "rope_type 'made-up' is not supported"),
        ({"rope__scaling__type": "yarn", "rope__scaling__attn_factor": 2.0}, "attn_factor = 2.0 is not supported"),
        ({"rope__dimension_count": 16}, "partial_rotary_factor = 0.5 is not supported"),
        ({"attention__key_length": 0, "embedding_length": 1, "rope__dimension_count": 8}, "heads of 0 elements"),
        ({"expert_count": 8}, "'num_experts_per_tok' is missing"),
        ({"expert_count": 2, "expert_used_count": 3}, "num_experts_per_tok = 3 is more than num_experts = 2"),
        ({"expert_count": 5000, "expert_used_count": 2}, "num_experts = 5000, expected at most 4096"),
    ],
    ids=str,
)
def test_gguf_features_that_are_not_supported(tmp_path: Path, metadata: dict[str, object], message: str):
    write_gguf(make_model("llama"), tmp_path / "model.gguf", Kind.F32, **metadata)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "model.gguf")
    assert message in str(caught.value)


def test_quantisation_that_cannot_be_undone(gguf_bytes: bytes, tmp_path: Path):
    """Q8_K is a type that only llama.cpp's own sums use."""
    tensor = GGUFFile(_write(tmp_path / "a.gguf", gguf_bytes)).tensors["blk.0.attn_norm.weight"]
    head = gguf_bytes.index(b"blk.0.attn_norm.weight") + len("blk.0.attn_norm.weight") + 4 + 8
    assert struct.unpack_from("<I", gguf_bytes, head)[0] == tensor.type
    unknown = _write(tmp_path / "b.gguf", gguf_bytes[:head] + struct.pack("<I", 77) + gguf_bytes[head + 4 :])
    with pytest.raises(ConfigError, match="unknown quantisation type 77"):
        load(unknown)
    integer = _write(tmp_path / "c.gguf", gguf_bytes[:head] + struct.pack("<I", Kind.I32) + gguf_bytes[head + 4 :])
    with pytest.raises(ConfigError, match="'blk.0.attn_norm.weight' is I32, which cannot be"):
        load(integer)


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_quantization_is_refused_until_there_is_one(folder: Path):
    with pytest.raises(ConfigError, match="quantization='int3' is not supported"):
        load_model(identify(folder), select_ops("torch", CpuDevice(1)), torch.float32, CPU, quantization="int3")


def test_a_file_that_cannot_be_read_is_named():
    with pytest.raises(ConfigError, match="/proc/self/mem cannot be read: Input/output error"):
        identify("/proc/self/mem")


def test_identify_says_what_is_missing(tmp_path: Path, folder: Path):
    assert identify(folder, "mine") == ModelFiles("mine", folder, "safetensors")
    cases = {
        "nowhere": "does not exist",
        "empty": "neither *.safetensors nor *.gguf",
        "pickled": "has only pickled PyTorch weights",
        "bare": "has safetensors files but no config.json",
        "two": "has 2 .gguf files (a.gguf, b.gguf); name the one to load",
        "model/model.safetensors": "is a weight file; give the folder",
        "model/config.json": "is not a GGUF file",
    }
    for name, files in {
        "empty": (),
        "pickled": ("a.bin",),
        "bare": ("a.safetensors",),
        "two": ("a.gguf", "b.gguf"),
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    for name, message in cases.items():
        with pytest.raises(ConfigError) as caught:
            identify(tmp_path / name)
        assert message in str(caught.value)
