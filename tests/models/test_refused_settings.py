"""A config that is close to a known family and differs in one setting is refused by the name of that setting."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import BartConfig, PretrainedConfig, T5Config, WhisperConfig

from pagoda.assembly.engine_setup import resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.layers.attention import Heads
from pagoda.loading.model_config import read_architecture, read_model
from pagoda.loading.model_files import ModelFiles, identify
from pagoda.models.decoder_config import DecoderConfig
from pagoda.worker.memory import kv_bytes_per_token
from tests.models.tiny import CONFIGS, make_model, save
from tests.models.tiny_vision import CONFIGS as VISION_CONFIGS

DEEPSEEK_V3_AS_RELEASED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip


TOWER_THETA = ("vision_config", "rope_parameters", "rope_theta")
MROPE = ("text_config", "rope_parameters", "mrope_interleaved")


WITH_MAMBA = ("mamba2", "granite4-dense", "bamba", "falcon-h1")


def write(folder: Path, settings: dict[str, Any]) -> ModelFiles:
    (folder / "config.json").write_text(json.dumps(settings))
    return ModelFiles("test", folder, "safetensors")


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("deepseek-v2", "scoring_func", "sigmoid", "'sigmoid' is not supported"),
        ("deepseek-v2", "topk_method", "noaux_tc", "'noaux_tc' is not supported"),
        ("deepseek-v2", "norm_topk_prob", True, "not supported"),
        ("deepseek-v2", "mlp_bias", True, "not supported"),
        ("deepseek-v2", "num_experts_per_tok", 9, "more than"),
        ("deepseek-v3", "scoring_func", "softmax", "'softmax' is not supported"),
        ("deepseek-v3", "topk_method", "greedy", "'greedy' is not supported"),
        ("deepseek-v3", "moe_layer_freq", 2, "not supported"),
        ("deepseek-v3", "hidden_act", "gelu", "'gelu' is not supported"),
        ("deepseek-v3", "kv_lora_rank", 72, "multiples of 32"),
        ("deepseek-v3", "v_head_dim", 24, "multiples of 32"),
        ("deepseek-v3", "qk_rope_head_dim", 24, "multiples of 16"),
        ("deepseek-v3", "qk_rope_head_dim", 64, "less than kv_lora_rank, 64"),
        ("deepseek-v3", "n_group", 3, "does not divide"),
        ("deepseek-v3", "n_group", 8, "groups of 2 or more"),
        ("deepseek-v3", "topk_group", 1, "does not fit"),
        ("deepseek-v3", "n_shared_experts", 0, "a positive integer"),
        ("llama", "hidden_act", "gelu_fancy", "'gelu_fancy' is not supported"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True, "not supported"),
        ("olmoe", "clip_qkv", 5.0, "not supported"),
        ("cohere", "use_qk_norm", True, "not supported"),
        ("stablelm", "qk_layernorm", True, "not supported"),
        ("phi", "qk_layernorm", True, "not supported"),
        ("phi3", "mlp_bias", True, "not supported"),
        ("olmo2", "clip_qkv", 5.0, "not supported"),
        ("olmo3", "layer_types", ["chunked_attention"] * 4, "'chunked_attention' is not supported"),
        ("olmo3", "rope_parameters", {"rope_theta": 1e4}, "'full_attention' is missing"),
        ("arcee", "hidden_act", "xielu", "'xielu' is not supported"),
        ("apertus", "hidden_act", "silu", "'silu' is not supported"),
        ("hunyuan", "use_cla", True, "not supported"),
        ("hunyuan", "rope_parameters", {"rope_type": "yarn", "alpha": 2.0}, "'yarn' is not supported"),
        ("ernie4.5-moe", "use_bias", True, "not supported"),
        ("ernie4.5-moe", "hidden_act", "gelu", "'gelu' is not supported"),
        ("glm4-moe", "n_group", 3, "does not divide"),
        ("minimax-m2", "scoring_func", "softmax", "'softmax' is not supported"),
        ("minimax-m2", "shared_intermediate_size", 64, "not supported"),
        ("mistral4", "rope_parameters", {"rope_type": "default"}, "'default' is not supported"),
        (
            "mistral4",
            "rope_parameters",
            {"rope_type": "yarn", "partial_rotary_factor": 0.9},
            "partial_rotary_factor = 0.9",
        ),
        ("gpt-oss", "hidden_act", "gelu", "'gelu' is not supported"),
        ("granitemoe", "hidden_act", "gelu", "'gelu' is not supported"),
        ("exaone4", "layer_types", ["chunked_attention"] * 3, "'chunked_attention' is not supported"),
        ("exaone4", "layer_types", ["full_attention"] * 2, "2 entries for 3 layers"),
        ("exaone4-full", "layer_types", ["full_attention"] * 2, "2 entries for 3 layers"),
        ("exaone4-full", "layer_types", ["sliding_attention"] * 3, "but there is no sliding_window"),
        ("qwen3", "layer_types", ["sliding_attention"] * 3, "but there is no sliding_window"),
        ("qwen2-moe", "layer_types", ["full_attention"] * 4, "4 entries for 3 layers"),
        ("smollm3", "no_rope_layers", [1, 0], "a number for each of the 4 layers"),
        ("starcoder2", "hidden_act", "mish", "'mish' is not supported"),
        ("gpt-neox", "hidden_act", "mish", "'mish' is not supported"),
        ("glm4", "hidden_act", "mish", "'mish' is not supported"),
        ("gemma2", "use_bidirectional_attention", True, "not supported"),
        ("qwen2-moe", "use_sliding_window", True, "not supported"),
        ("gemma4-moe", "num_experts", None, "'num_experts' is missing"),
        ("gemma4-moe", "top_k_experts", 6, "expected at most num_experts = 5"),
        ("gemma4", "use_bidirectional_attention", "all", "not supported"),
        ("gemma4", "sliding_window", 64, "at most 63"),
        ("gemma4", "per_layer_config", {"1": {"head_dim": 48, "intermediate_size": 8}}, "intermediate_size = 8 is not"),
        ("gemma4", "per_layer_config", {"1": {"head_dim": 48}}, "layers of one type differ"),
        ("gemma4", "per_layer_config", {"4": {}}, "a layer, 0 to 3"),
        ("gemma4-shared", "num_kv_shared_layers", 4, "leaves no layer"),
        ("gemma4-shared", "vocab_size_per_layer_input", 100, "less than vocab_size = 131"),
    ],
    ids=str,
)
def test_a_setting_that_is_not_supported_is_named(name: str, key: str, value: Any, said: str, tmp_path: Path):
    config = CONFIGS[name]()
    known = {**config.to_dict(), "architectures": [name_of_class(name)]}
    read_architecture(write(tmp_path, known))
    with pytest.raises(ConfigError, match=said) as caught:
        read_architecture(write(tmp_path, {**known, key: value}))
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("family", "config", "path", "value", "said"),
    [
        ("Whisper", WhisperConfig, ("scale_embedding",), True, "not supported"),
        ("Whisper", WhisperConfig, ("median_filter_width",), 9, "not supported"),
        ("Whisper", WhisperConfig, ("tie_word_embeddings",), False, "expected True"),
        ("Bart", BartConfig, ("tie_word_embeddings",), False, "expected True"),
        ("T5", partial(T5Config, decoder_start_token_id=0), ("is_encoder_decoder",), False, "expected True"),
        ("Qwen2_5_VL", VISION_CONFIGS["qwen2.5-vl"], TOWER_THETA, 5000.0, "expected 10000"),
        ("Idefics3", VISION_CONFIGS["idefics3"], ("text_config", "qk_layer_norms"), True, "not supported"),
        ("Qwen2_5_VL", VISION_CONFIGS["qwen2.5-vl"], MROPE, True, "not supported"),
        ("Gemma3", VISION_CONFIGS["gemma3"], ("mm_tokens_per_image",), 8, "not a square"),
    ],
)
def test_a_setting_of_a_model_that_hears_or_sees_is_named(
    family: str,
    config: Callable[[], PretrainedConfig],
    path: tuple[str, ...],
    value: Any,
    said: str,
    tmp_path: Path,
):
    settings = json.loads(config().to_json_string(use_diff=False))
    settings["architectures"] = [f"{family}ForConditionalGeneration"]
    read_architecture(write(tmp_path, settings))
    section = settings
    for name in path[:-1]:
        section = section[name]
    section[path[-1]] = value
    with pytest.raises(ConfigError, match=said) as caught:
        read_architecture(write(tmp_path, settings))
    assert path[-1] in str(caught.value)


def test_both_ways_of_saying_how_layers_of_gemma_4_differ_are_read(tmp_path: Path):
    written = {**CONFIGS["gemma4"]().to_dict(), "architectures": ["Gemma4ForCausalLM"]}
    released = {**written, "global_head_dim": 48, "num_global_key_value_heads": 1}
    assert written["per_layer_config"] == {layer: {"head_dim": 48, "num_key_value_heads": 1} for layer in "13"}
    del released["per_layer_config"]
    configs = [read_architecture(write(tmp_path, settings))[1] for settings in (written, released)]
    assert configs[0] == configs[1]
    assert isinstance(configs[0], DecoderConfig)
    assert configs[0].full_heads == Heads(4, 1, 48)


def name_of_class(name: str) -> str:
    return type(make_model(name)).__name__


def test_deepseek_v3_as_released_keeps_576_numbers_per_token_and_layer(tmp_path: Path):
    files = write(tmp_path, DEEPSEEK_V3_AS_RELEASED)
    assert kv_bytes_per_token(read_model(files).kv_groups, "bfloat16") == 61 * 576 * 2
    config = read_architecture(files)[1]
    assert isinstance(config, DecoderConfig)
    assert config.spec.max_position == 163840
    assert config.dense_layers == {0, 1, 2}
    assert config.attention_scale == pytest.approx(0.1352337788608801)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"kv_cache_dtype": "int8", "kernels": "native"},
            "kv_cache_dtype='int8': models of .*'deepseek_v3'",
        ),
        ({"kernels": "triton"}, "latent attention, which does not run on a GPU or in Triton yet"),
    ],
    ids=str,
)
def test_what_does_not_go_with_latent_attention_is_refused_at_start(options: dict[str, Any], said: str, tmp_path: Path):
    save(make_model("deepseek-v3"), tmp_path)

    def resolve(**more: Any) -> None:
        resolve_engine(EngineConfig.from_options(model=str(tmp_path), device="cpu", **more))

    resolve(kernels="torch", kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match=said):
        resolve(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernels": "triton"}, "recurrent layers, which do not run on a GPU or in Triton yet"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8': models of architecture 'lfm2' have recurrent layers"),
        (
            {"speculative_config": {"method": "layer_skip", "num_draft_layers": 1}},
            "the states of the first layers would not go back",
        ),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 does not go with short convolutions yet"),
    ],
    ids=str,
)
def test_what_does_not_go_with_states_is_refused_at_start(options: dict[str, Any], said: str, tmp_path: Path):
    save(make_model("lfm2", num_attention_heads=4, num_key_value_heads=2), tmp_path)

    def resolve(**more: Any) -> None:
        resolve_engine(EngineConfig.from_options(model=str(tmp_path), device="cpu", **more))

    resolve(pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=said):
        resolve(**options)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "mamba"]}, "layer_types"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "4 times full_attention or conv"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache = 1"),
        *((name, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported") for name in WITH_MAMBA),
        ("lfm2", {"block_ffn_dim_multiplier": 0.0001}, "leaves MLPs without elements"),
        ("falcon-h1", {"mamba_d_ssm": 100}, "mamba_n_heads = 6, expected a divisor of mamba_d_ssm = 100"),
        ("nemotron-h", {"layers_block_type": ["mlp", "conv"]}, "layers_block_type = .*, expected a list of linear_att"),
        ("nemotron-h", {"layers_block_type": None}, "'hybrid_override_pattern' is missing"),
        ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "M-X"}, r"a string of M \* - E"),
        ("nemotron-h", {"n_groups": 4}, "n_groups = 4, expected a divisor of mamba_num_heads = 6"),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported"),
        ("falcon-h1", {"mlp_multipliers": [1.0]}, r"mlp_multipliers = .*, expected 2 positive numbers"),
    ],
    ids=str,
)
def test_wrong_settings_of_models_with_states(name: str, changes: dict[str, object], said: str, tmp_path: Path):
    save(make_model(name), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=said):
        read_model(identify(tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "3 times full_attention or linear_attention"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types"),
        ({"linear_num_key_heads": 4}, "a divisor of linear_num_value_heads = 6"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1"),
        ({"attn_output_gate": False}, "attn_output_gate = False"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype 'bfloat16' is not supported"),
    ],
    ids=str,
)
def test_wrong_settings_of_qwen3_next(changes: dict[str, object], said: str, tmp_path: Path):
    save(make_model("qwen3-next"), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=said):
        read_model(identify(tmp_path))


def test_ranks_do_not_divide_the_gated_delta_rule(tmp_path: Path):
    save(make_model("qwen3.5-attention-last"), tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 does not go with layers of the gated delta rule"):
        resolve_engine(EngineConfig.from_options(model=str(tmp_path), device="cpu", tensor_parallel_size=2))


def test_older_spellings_of_lfm2(tmp_path: Path):
    save(make_model("lfm2"), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["layer_types"]
    settings |= {"full_attn_idxs": [1], "block_ff_dim": settings.pop("intermediate_size"), "tie_embedding": False}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    spec = read_model(identify(tmp_path)).spec
    assert (spec.intermediate_size, spec.tie_embeddings) == (128, False)
    assert len(read_model(identify(tmp_path)).kv_groups) == 2


def test_older_spellings_of_nemotron_h(tmp_path: Path):
    """A letter for each layer, and Bamba's names of settings."""
    save(make_model("nemotron-h"), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    plain = read_model(identify(tmp_path))
    del settings["layers_block_type"]
    settings |= {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4, "n_groups": 8, "mamba_n_groups": 2}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_model(identify(tmp_path)).spec == plain.spec
    assert read_model(identify(tmp_path)).kv_groups == plain.kv_groups


def test_embeddings_in_place_of_tokens_are_refused_where_layers_look_up_tokens(tmp_path: Path):
    options: dict[str, Any] = {"model": str(save(make_model("gemma4-shared"), tmp_path)), "device": "cpu"}
    with pytest.raises(ConfigError, match="enable_prompt_embeds"):
        resolve_engine(EngineConfig.from_options(**options, enable_prompt_embeds=True))


@pytest.mark.parametrize(
    ("of_whole", "of_text", "tied"), [(False, None, False), (None, False, False), (None, None, True)]
)
def test_whether_a_head_is_tied_may_be_said_for_the_whole(
    of_whole: bool | None, of_text: bool | None, tied: bool, tmp_path: Path
) -> None:
    settings = json.loads(VISION_CONFIGS["gemma3"]().to_json_string(use_diff=False))
    settings |= {"architectures": ["Gemma3ForConditionalGeneration"], "tie_word_embeddings": of_whole}
    settings["text_config"]["tie_word_embeddings"] = of_text
    assert read_architecture(write(tmp_path, settings))[1].spec.tie_embeddings is tied
