"""Adapters' files: settings that are applied or refused by name, and files that do not fit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from safetensors.numpy import save_file

from pagoda.base.errors import ConfigError
from pagoda.loading.adapters.config import APPLIED, WITHOUT_EFFECT, read_adapter_config
from pagoda.loading.adapters.files import AdapterTargets, check_adapter, digest_of
from pagoda.loading.model_config import read_architecture
from pagoda.loading.model_files import ModelFiles

HIDDEN, VOCAB = 32, 50
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def zeros(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def write(folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: object) -> Path:
    """An adapter of q_proj in layer 0, of rank 2, with the given settings and tensors in place of its own."""
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    tensors = tensors or {f"{Q}.lora_A.weight": zeros(2, HIDDEN), f"{Q}.lora_B.weight": zeros(HIDDEN, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> AdapterTargets:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    architecture, decoder = read_architecture(ModelFiles("tiny", folder, "safetensors"))
    return AdapterTargets(architecture, architecture.model(decoder))


def test_scale_and_rank_of_a_module(tmp_path: Path, targets: AdapterTargets) -> None:
    folder = write(tmp_path)
    found = check_adapter(folder, targets, 16)
    (module,) = found.modules
    assert (module.target, module.rank, module.scale, found.rank) == ("model.layers.0.self_attn.q_proj", 2, 2.0, 2)
    config = read_adapter_config(write(tmp_path, use_rslora=True, r=4, rank_pattern={"^x|v_proj": 9}, lora_alpha=6))
    assert config.scale_of("model.layers.1.self_attn.v_proj") == 2.0
    assert config.scale_of("model.layers.1.self_attn.q_proj") == 3.0
    config = read_adapter_config(write(tmp_path, alpha_pattern={"layers.1.self_attn.q_proj": 10, "q_proj": 1}))
    assert config.scale_of("model.layers.1.self_attn.q_proj") == 5.0
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 0.5


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("trainable_token_indices", [1, 2]),
        ("alora_invocation_tokens", [7]),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("bias", "all"),
        ("ensure_weight_tying", True),
        ("use_qalora", True),
        ("megatron_config", {"a": 1}),
        ("arrow_config", {"top_k": 1}),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("a_field_of_next_year", 3),
        ("peft_type", "IA3"),
        ("r", 0),
        ("r", "8"),
        ("lora_alpha", float("inf")),
        ("rank_pattern", {"q_proj": -1}),
        ("rank_pattern", ["q_proj"]),
        ("alpha_pattern", {"(": 4}),
        ("alpha_pattern", {"(?i)Q_PROJ": 4}),  # which is not at the beginning of what PEFT makes of it
        ("rank_pattern", {"(" * 3000 + ")" * 3000: 4}),
        ("target_modules", "q_proj{" + "9" * 30 + "}"),
        ("target_modules", [3]),
        ("target_modules", "layers.(0"),
        ("exclude_modules", {"q_proj": 1}),
        ("layers_to_transform", ["0"]),
        ("use_rslora", "yes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refuses_by_name(setting: str, value: Any, tmp_path: Path, targets: AdapterTargets) -> None:
    with pytest.raises(ConfigError, match=rf"adapter_config.json: {setting}="):
        check_adapter(write(tmp_path, **{setting: value}), targets, 16)


REFUSED = sorted({field.name for field in dataclasses.fields(LoraConfig)} - APPLIED - WITHOUT_EFFECT)


@pytest.mark.parametrize("setting", REFUSED)
def test_all_other_fields_of_peft_are_refused_by_name(setting: str, tmp_path: Path, targets: AdapterTargets) -> None:
    for value in (True, "a", ["a"], {"a": 1}):
        settings: dict[str, Any] = {setting: value}
        with pytest.raises(ConfigError, match=rf"adapter_config.json: {setting}="):
            check_adapter(write(tmp_path, **settings), targets, 16)


def test_accepts_what_changes_nothing(tmp_path: Path, targets: AdapterTargets) -> None:
    settings: dict[str, Any] = {
        "use_dora": False, "modules_to_save": None, "bias": "none", "layer_replication": None, "rank_pattern": {},
        "loftq_config": {}, "lora_dropout": 0.3, "inference_mode": True, "init_lora_weights": "gaussian",
        "base_model_name_or_path": "another/name", "peft_version": "0.99", "revision": None, "fan_in_fan_out": False,
        "task_type": "CAUSAL_LM", "auto_mapping": None, "megatron_core": "megatron.core",
        "trainable_token_indices": None,
    }  # fmt: skip
    assert check_adapter(write(tmp_path, **settings), targets, 16).rank == 2


@pytest.mark.parametrize(
    ("tensors", "settings", "words"),
    [
        (None, {"r": 3}, r"lora_A.weight' has the shape \(2, 32\), expected \(3, 32\)"),
        (None, {"r": 17}, "its rank is 17, but max_lora_rank is 16"),
        (None, {"target_modules": ["v_proj"]}, "which adapter_config.json does not name as a target"),
        (None, {"exclude_modules": ["q_proj"]}, "which adapter_config.json does not name as a target"),
        (None, {"layers_to_transform": [1]}, "which adapter_config.json does not name as a target"),
        (None, {"lora_bias": True}, "has lora_A.weight, lora_B.weight; expected lora_A.weight, lora_B.bias"),
        ({f"{Q}.lora_A.weight": zeros(2, HIDDEN)}, {}, "has lora_A.weight; expected lora_A.weight, lora_B.weight"),
        ({f"{Q}.lora_magnitude_vector": zeros(32)}, {}, "is not of a LoRA adapter of this model"),
        (
            {"base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight": zeros(2, HIDDEN)},
            {},
            "which this model does not have or cannot adapt",
        ),
        ({f"{Q}.lora_A.weight": zeros(2, HIDDEN, dtype=np.int32)}, {}, "is I32; expected F32, BF16, F16"),
        (
            {"base_model.model.model.embed_tokens.base_layer.weight": zeros(VOCAB + 1, HIDDEN)},
            {},
            "adapters that resize the vocabulary are not supported",
        ),
    ],
)
def test_refuses_tensors_that_do_not_fit(
    tensors: dict[str, np.ndarray] | None,
    settings: dict[str, object],
    words: str,
    tmp_path: Path,
    targets: AdapterTargets,
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_adapter(write(tmp_path, tensors, **settings), targets, 16)


def test_refuses_broken_and_missing_files(tmp_path: Path, targets: AdapterTargets) -> None:
    folder = write(tmp_path)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = weights.read_bytes()
    for data in (whole[:-8], b"", b"\xff" * 64):
        weights.write_bytes(data)
        with pytest.raises(ConfigError, match="truncated or corrupt safetensors"):
            check_adapter(folder, targets, 16)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="no adapter_model.safetensors .adapter_model.bin is pickled"):
        check_adapter(folder, targets, 16)
    for text in ("[]", "{", '{"peft_type": "LORA", "r": 1e999}'):
        config.write_text(text)
        with pytest.raises(ConfigError, match=r"adapter_config\.json"):
            check_adapter(folder, targets, 16)
    config.unlink()
    with pytest.raises(ConfigError, match=r"no adapter_config\.json"):
        check_adapter(folder, targets, 16)


def test_the_digest_is_of_the_contents(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
    one, same = (write(folder) for folder in folders[:2])
    scaled = write(folders[2], lora_alpha=5)
    other = write(folders[3], {f"{Q}.lora_A.weight": np.ones((2, HIDDEN), np.float32)})
    digests = [digest_of(folder) for folder in (one, same, scaled, other)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
