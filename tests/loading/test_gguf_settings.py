"""Every setting that llama.cpp knows, of every architecture: read, refused by its name, or listed as without effect."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import pytest

from pagoda.base.errors import ConfigError
from pagoda.base.pooling import PoolingKind, PoolingPlan
from pagoda.layers.rope_config import RopeType
from pagoda.loading.gguf_file import GGUFFile
from pagoda.loading.gguf_settings import WITHOUT_EFFECT, read_gguf, read_gguf_pooling
from pagoda.models.architecture import Architecture
from pagoda.models.registry import BY_GGUF_NAME

CASES = [(name, one) for name in BY_GGUF_NAME for one in BY_GGUF_NAME[name]]

# What llama.cpp reads that the gguf package (0.19) has no name for.
OF_LLAMA_CPP = (
    *("rope.scale_linear", "hidden_activation", "deepstack_mapping", "attention.value_scale", "target_layers"),
    *("attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k", "hash_layer_count"),
    *("attention.output_group_count", "attention.output_lora_rank", "attention.compress_rope_freq_base"),
    *("attention.compress_ratios", "attention.recurrent_layers", "hyper_connection.count", "target_hidden_size"),
    *("hyper_connection.sinkhorn_iterations", "hyper_connection.epsilon", "norm_before_residual"),
    *("dense_2_feat_in", "dense_2_feat_out", "dense_3_feat_in", "dense_3_feat_out"),
)


def keys_of(group: Any) -> Iterator[str]:
    for name, value in vars(group).items():
        if inspect.isclass(value):
            yield from keys_of(value)
        elif not name.startswith("_") and isinstance(value, str) and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.")


KEYS = sorted({key for key in keys_of(gguf.constants.Keys) if "{" not in key} | set(OF_LLAMA_CPP))


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    """A file with an embedding and without settings."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((32, 96), np.float32))
    writer.add_tensor("output.weight", np.zeros((32, 96), np.float32))
    writer.add_tensor("token_types.weight", np.zeros((2, 96), np.float32))
    writer.add_tensor("blk.0.ffn_norm.weight", np.zeros(96, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def settings_of(name: str, architecture: Architecture) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "block_count": 4,
        "context_length": 64,
        "embedding_length": 96,
        "feed_forward_length": 160,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
    }
    if name in ("gemma2", "gemma3", "gpt-oss", "phi3", "starcoder2", "exaone4"):
        settings["attention.sliding_window"] = 7
    if architecture.experts:
        settings |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 160}
    if name == "gpt-oss":
        settings |= YARN_BY_4
        del settings["rope.scaling.factor"]
    if name in WITH_STATES:
        settings |= {"ssm.inner_size": 192, "ssm.time_step_rank": 6, "ssm.state_size": 16, "ssm.group_count": 2}
        settings |= {"ssm.conv_kernel": 4}
    if name.startswith("qwen3") and name in WITH_STATES:
        settings["full_attention_interval"] = 2
    if name in ("granitehybrid", "nemotron_h", "nemotron_h_moe"):
        settings["attention.head_count_kv"] = np.array([0, 2, 0, 0])
    if name.startswith("nemotron_h"):
        settings["feed_forward_length"] = np.array([0, 0, 160, 160])
    if name in ("nemotron_h_moe", "qwen3next", "qwen35moe"):
        settings |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 160}
        settings["expert_shared_feed_forward_length"] = 64
    if name.startswith("granite"):
        settings |= {"attention.scale": 0.2, "embedding_scale": 12.0, "residual_scale": 0.3, "logit_scale": 4.0}
    return settings


WITH_STATES = (
    *("mamba2", "granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "qwen3next", "qwen35", "qwen35moe"),
)
YARN_BY_4 = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}


def read(file: GGUFFile, name: str, settings: dict[str, Any]) -> Any:
    file.metadata = {"general.architecture": name} | {f"{name}.{key}": value for key, value in settings.items()}
    return read_gguf(file)[1]


ODD = (
    7,
    2,
    6,
    1,
    24,
    12,
    200,
    0.37,
    2.5,
    False,
    True,
    "odd",
    np.array([False, True, True, False]),
    np.array([3, 1, 1, 5]),
)


def is_heeded(file: GGUFFile, name: str, settings: dict[str, Any], key: str) -> bool:
    """Whether some value of the key's type changes the configuration, or is refused."""
    try:
        plain = read(file, name, settings)
    except ConfigError:  # an architecture without what these settings are of
        return False
    for value in ODD:
        try:
            if read(file, name, settings | {key: value}) != plain:
                return True
        except ConfigError as error:
            if not re.search("expected (int|float|bool|str)$", str(error)):
                return True
    return False


# Settings that are read, of what these models do not have, or say in another way.
WITHOUT_MEANING = {
    "attention.key_length": {"mamba2"},
    "context_length": {"mamba2"},
    "rope.dimension_count": {"mamba2", "nemotron_h", "nemotron_h_moe"},
    "attention.recurrent_layers": {"granitehybrid", "nemotron_h", "nemotron_h_moe"},
    **{key: {"nemotron_h"} for key in ("expert_group_used_count", "expert_weights_norm", "expert_weights_scale")},
    "expert_shared_count": {"nemotron_h_moe"},
}


def test_every_setting_of_llama_cpp(empty: GGUFFile) -> None:
    ignored: dict[str, set[str]] = {}
    for name, architecture in CASES:
        settings = settings_of(name, architecture)
        for key in KEYS:
            if not any(is_heeded(empty, name, settings | more, key) for more in ({}, YARN_BY_4)):
                ignored.setdefault(key, set()).add(name)
    names = {name for name, _ in CASES}
    layer_norms = {"bert", "command-r", "gpt2", "gptneox", "phi2", "stablelm", "starcoder2"}
    same_window = {"phi3", "starcoder2"}
    windows = {"exaone4", "gemma2", "gemma3", "gpt-oss", "olmo2"}
    optional = {"qwen2", "qwen3", "qwen3moe", "smollm3", "lfm2", "lfm2moe"}  # refused: there is no window
    assert ignored.pop("use_parallel_residual") == {"stablelm"}  # its norms show it
    for key, of in WITHOUT_MEANING.items():
        assert ignored.pop(key) == of, key
    refusing = {"lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"}
    assert ignored == {
        "vocab_size": names,
        "tensor_data_layout": names,
        "expert_shared_feed_forward_length": names - {"nemotron_h_moe", "qwen3next", "qwen35moe"},
        "pooling_type": names,
        "attention.layer_norm_epsilon": names - layer_norms,
        "attention.layer_norm_rms_epsilon": layer_norms,
        "attention.sliding_window": names - windows - same_window - refusing,
        "attention.sliding_window_pattern": names - windows - optional - {"qwen3next", "qwen35", "qwen35moe"},
        "rope.freq_base": {"bert", "gpt2"},
        "rope.scaling.finetuned": names - {"granite", "granitemoe", "granitehybrid"},
    }
    assert ignored.keys() <= WITHOUT_EFFECT.keys()


@pytest.mark.parametrize(
    ("stated", "kind", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, RopeType.LINEAR, 4.0),
        ({"rope.scale_linear": 2.0}, RopeType.LINEAR, 2.0),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, RopeType.LINEAR, 4.0),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 2.0}, RopeType.LINEAR, 2.0),
        ({"rope.scaling.factor": 0.0}, RopeType.DEFAULT, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, RopeType.DEFAULT, 1.0),
        ({"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 16}, RopeType.YARN, 1.0),
        (YARN_BY_4, RopeType.YARN, 4.0),
    ],
    ids=str,
)
def test_rope_scaling_is_read_as_llama_cpp_reads_it(
    stated: dict[str, Any], kind: RopeType, factor: float, empty: GGUFFile
) -> None:
    config = read(empty, "llama", settings_of("llama", CASES[0][1]) | stated)
    assert (config.rope_full.rope_type, config.rope_full.factor) == (kind, factor)
    assert config.rope_full == config.rope_window


def test_layers_of_draft_heads_are_left_out(empty: GGUFFile) -> None:
    settings = settings_of("glm4moe", BY_GGUF_NAME["glm4moe"][0])
    whole, less = (read(empty, "glm4moe", settings | {"nextn_predict_layers": count}) for count in (0, 1))
    assert less.spec.num_layers == whole.spec.num_layers - 1


@pytest.mark.parametrize(
    ("name", "stated", "said"),
    [
        ("llama", {"rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor = 2.0 is not supported"),
        ("llama", {"rope.scaling.yarn_ext_factor": 1.0}, "yarn_ext_factor = 1.0 is not supported"),
        ("llama", {"attention.scale": 0.5}, "llama.attention.scale = 0.5 is not supported"),
        ("llama", {"no_such_key": 3}, "remove it: gguf-new-metadata --remove-metadata 'llama.no_such_key' OLD.gguf"),
        ("llama", {"attention.causal": False}, "llama.attention.causal = False is not supported"),
        ("bert", {"attention.causal": True}, "bert.attention.causal = True is not supported"),
        ("granite", {"rope.scaling.finetuned": False}, "rope.scaling.finetuned = false is not supported with Granite"),
        ("qwen3moe", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func = 2 is not supported"),
        ("lfm2", {"attention.sliding_window": 7}, "sliding_window = 7 is not supported"),
        ("lfm2", {"attention.head_count_kv": np.array([0, 2, 1, 0])}, "attention.head_count_kv"),
        ("gemma3", {"rope.dimension_count": 12}, "gemma3.rope.dimension_count = 12 is not supported"),
        (
            "exaone4",
            {"attention.sliding_window_pattern": np.array([True] * 3)},
            "layer_types has 3 entries for 4 layers",
        ),
    ],
    ids=str,
)
def test_what_would_change_the_result_is_refused_by_name(
    name: str, stated: dict[str, Any], said: str, empty: GGUFFile
) -> None:
    settings = settings_of(name, BY_GGUF_NAME[name][-1])
    read(empty, name, settings)
    with pytest.raises(ConfigError) as caught:
        read(empty, name, settings | stated)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("llama", {"rope.dimension_count": 24, "attention.key_length": 24, "vocab_size": 32, "expert_count": 0}),
        ("llama", {"embedding_length_out": 96, "rope.scaling.finetuned": False, "leading_dense_block_count": 0}),
        ("gemma3", {"rope.dimension_count": 24, "vision.block_count": 27, "mm.tokens_per_image": 256}),
        ("gpt-oss", {"rope.freq_base_swa": 10_000.0, "expert_weights_norm": True, "expert_gating_func": 1}),
        ("qwen3", {"attention.causal": True, "rope.dimension_sections": np.zeros(4, np.int32)}),
    ],
    ids=str,
)
def test_what_changes_nothing_is_taken(name: str, stated: dict[str, Any], empty: GGUFFile) -> None:
    settings = settings_of(name, BY_GGUF_NAME[name][0])
    assert read(empty, name, settings) == read(empty, name, settings | stated)


def test_layers_with_windows_are_those_that_the_file_names(empty: GGUFFile) -> None:
    settings = settings_of("gemma3", CASES[0][1])
    for pattern, expected in (
        (np.array([0, 1, 0, 1], bool), (0, 7, 0, 7)),
        (2, (7, 0, 7, 0)),
        (1, (0,) * 4),
        (0, (7,) * 4),
    ):
        config = read(empty, "gemma3", settings | {"attention.sliding_window_pattern": pattern})
        assert config.spec.layer_windows == expected
    for name in ("phi3", "gemma3", "starcoder2"):
        none = settings_of(name, CASES[0][1]) | {"attention.sliding_window": 0}
        assert read(empty, name, none).spec.layer_windows == (0,) * 4
    del settings["attention.sliding_window"]
    assert read(empty, "gemma3", settings).spec.layer_windows == (0,) * 4


def test_pooling_is_what_the_file_says(empty: GGUFFile) -> None:
    plan = PoolingPlan()
    for stated, kind in ((0, PoolingKind.LAST), (1, PoolingKind.MEAN), (2, PoolingKind.CLS), (3, PoolingKind.LAST)):
        read(empty, "qwen3", settings_of("qwen3", CASES[0][1]) | {"pooling_type": stated})
        assert read_gguf_pooling(empty, plan).kind is kind
    empty.metadata["qwen3.pooling_type"] = 4
    with pytest.raises(ConfigError, match="qwen3.pooling_type = 4 is not supported; supported: 1, 2, 3"):
        read_gguf_pooling(empty, plan)
