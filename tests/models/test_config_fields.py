"""Every field of transformers' configuration of every family: read, refused by its name, or listed as without effect.

A family that joins the registry is tested with the configuration that its class has by default, and with its tiny ones.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import transformers
from transformers import Gemma4Config, PretrainedConfig, Qwen3_5MoeConfig, T5Config

from pagoda.base.errors import ConfigError
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.registry import ARCHITECTURES
from tests.models import tiny, tiny_encoders, tiny_vision

Path = tuple[str, ...]

_TRAINING = "of training alone"
_BOOKKEEPING = "of transformers' own caches and outputs"
_PLACEHOLDER = "the prompt's placeholder is found by its text"
_TOWER = "of a tower that is not loaded"
WITHOUT_EFFECT: dict[str, str] = {
    "label2id": "the other way round than id2label",
    **dict.fromkeys(
        ("return_dict", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states"), _BOOKKEEPING
    ),
    **dict.fromkeys(("_name_or_path", "transformers_version", "model_type", "architectures"), "names"),
    "chunk_size_feed_forward": "computes the same in parts",
    "pretraining_tp": "computes the same in parts",
    "is_encoder_decoder": "follows from the class; T5's is read",
    "problem_type": "of classifiers, read with their head",
    "id2label": "of classifiers, read with their head",
    **dict.fromkeys(("initializer_range", "initializer_factor", "initializer_cutoff_factor", "init_std"), _TRAINING),
    **dict.fromkeys(("attention_dropout", "attention_probs_dropout_prob", "activation_dropout", "dropout"), _TRAINING),
    **dict.fromkeys(("dropout_rate", "hidden_dropout", "hidden_dropout_prob", "classifier_dropout"), _TRAINING),
    **dict.fromkeys(("embedding_dropout", "residual_dropout", "mlp_dropout", "embd_pdrop", "attn_pdrop"), _TRAINING),
    **dict.fromkeys(("resid_pdrop", "encoder_layerdrop", "decoder_layerdrop", "router_jitter_noise"), _TRAINING),
    **dict.fromkeys(("router_aux_loss_coef", "sparse_prediction", "sparse_pred_ignore_index"), _TRAINING),
    **dict.fromkeys(("apply_spec_augment", "mask_feature_length", "mask_feature_min_masks"), _TRAINING),
    **dict.fromkeys(("mask_feature_prob", "mask_time_length", "mask_time_min_masks", "mask_time_prob"), _TRAINING),
    **dict.fromkeys(("pad_token_id", "_pad_token_id"), "nothing is padded; RoBERTa's positions read it"),
    **dict.fromkeys(("cls_token_id", "sep_token_id"), "the tokenizer adds them"),
    **dict.fromkeys(("image_token_id", "image_token_index", "video_token_id", "audio_token_id"), _PLACEHOLDER),
    **dict.fromkeys(("boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index"), _PLACEHOLDER),
    **dict.fromkeys(("boa_token_id", "eoa_token_index", "vision_start_token_id", "vision_end_token_id"), _PLACEHOLDER),
}
"""Fields without effect in every family, and in every section of a configuration."""

_DERIVED = "follows from other fields"
_OTHER_HEAD = "of a head that is not loaded"
_GENERATION = "read from generation_config.json"
_OF_TEXT = "that of the text model counts"
_LATENT = {
    "head_dim": _DERIVED,
    "qk_head_dim": _DERIVED,
    "num_key_value_heads": "latent attention has keys of every head",
}
_QWEN3_5 = {"vision_config.dtype": _OF_TEXT, "text_config.tie_word_embeddings": "that of the whole counts"}
_T5 = {
    "is_decoder": "it always has both",
    **dict.fromkeys(("dense_act_fn", "is_gated_act"), _DERIVED),
}
OF_FAMILY: dict[str, dict[str, str]] = {
    "gemma3": {"vision_config.vision_use_head": _OTHER_HEAD, "vision_config.dtype": _OF_TEXT},
    "gemma4": {
        **dict.fromkeys(("audio_config", "vision_config"), _TOWER),
    },
    "mistral4": {
        **_LATENT,
        "rope_parameters.type": "an older name of rope_type",
        "rope_parameters.max_position_embeddings": "that of the model counts",
    },
    "mistral3": {
        "rope_parameters.type": "an older name of rope_type",
        "rope_parameters.max_position_embeddings": "that of the model counts",
        "vision_config.dtype": _OF_TEXT,
        "vision_config.vocab_size": "a tower has no words",
    },
    "llama4": {"vision_config": _TOWER},
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "num_nextn_predict_layers": "of layers that are not loaded"},
    "ernie4_5_moe": {"moe_norm_min": "the chosen experts' share is never as small"},
    "glm4_moe": {"num_nextn_predict_layers": "of layers that are not loaded"},
    "hunyuan": {"eod_token_id": _GENERATION, "rope_parameters.factor": "alpha says it"},
    "qwen2_moe": dict.fromkeys(("max_window_layers", "sliding_window"), "use_sliding_window is refused"),
    "gpt2": {
        "reorder_and_upcast_attn": "of the order of rounding",
        **{
            f"summary_{key}": _OTHER_HEAD
            for key in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")
        },
    },
    "gpt_neox": {"is_decoder": "it always is one"},
    "idefics3": {"vision_config.dtype": _OF_TEXT, "text_config.tie_word_embeddings": "that of the whole counts"},
    "qwen2_5_vl": {
        "text_config.tie_word_embeddings": "that of the whole counts",
        "vision_config.dtype": _OF_TEXT,
        "vision_config.tokens_per_second": "of videos, which are refused",
    },
    "mamba2": {
        **dict.fromkeys(("time_step_rank", "time_step_min", "time_step_max", "time_step_floor"), _TRAINING),
        "rescale_prenorm_residual": _TRAINING,
        "residual_in_fp32": "of the order of rounding",
        "chunk_size": "computes the same in parts",
    },
    "granitemoehybrid": {"mamba_chunk_size": "computes the same in parts"},
    "falcon_h1": {"mamba_chunk_size": "computes the same in parts", "num_logits_to_keep": _BOOKKEEPING},
    "nemotron_h": {
        **dict.fromkeys(("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"), _TRAINING),
        "residual_in_fp32": "of the order of rounding",
        "chunk_size": "computes the same in parts",
        "expand": _DERIVED,
        "mamba_ssm_cache_dtype": "states are in float32",
        **dict.fromkeys(("use_mamba_kernels", "moe_shared_expert_overlap"), "of the order of work"),
        "num_logits_to_keep": _BOOKKEEPING,
        **dict.fromkeys(("num_nextn_predict_layers", "mtp_layers_block_type"), "of layers that are not loaded"),
    },
    "bamba": {
        "mamba_chunk_size": "computes the same in parts",
        "z_loss_coefficient": _TRAINING,
        "num_logits_to_keep": _BOOKKEEPING,
    },
    "qwen3_vl": {"vision_config.dtype": _OF_TEXT},
    "qwen3_vl_moe": {
        "vision_config.dtype": _OF_TEXT,
        "text_config.tie_word_embeddings": "that of the whole counts",
    },
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _QWEN3_5),
    "modernbert": {"deterministic_flash_attn": _TRAINING, "decoder_bias": _OTHER_HEAD},
    "whisper": {
        **dict.fromkeys(("begin_suppress_tokens", "suppress_tokens", "decoder_start_token_id"), _GENERATION),
        **dict.fromkeys(("classifier_proj_size", "use_weighted_layer_sum"), _OTHER_HEAD),
    },
    "bart": {"forced_eos_token_id": _GENERATION, "is_decoder": "it always has both"},
    "t5": {**_T5, "tie_word_embeddings": "scale_decoder_outputs says it"},
    "mt5": {
        **_T5,
        "bos_token_id": "no text begins with one",
        "tie_word_embeddings": "its checkpoints have a head of their own",
    },
}
"""Fields without effect in one family."""


def settings_of(config: PretrainedConfig) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=False))


def known_configs() -> dict[type[PretrainedConfig], list[dict[str, Any]]]:
    found: dict[type[PretrainedConfig], list[dict[str, Any]]] = defaultdict(list)
    for part in (tiny, tiny_vision, tiny_encoders):
        for make in part.CONFIGS.values():
            config = make()
            found[type(config)].append(settings_of(config))
    found[T5Config].append(settings_of(T5Config(decoder_start_token_id=0)))
    found[Gemma4Config].append(settings_of(Gemma4Config(text_config=tiny.CONFIGS["gemma4-moe"]().to_dict())))
    tower, text = tiny_vision.QWEN3_TOWER, tiny.CONFIGS["qwen3.5-moe"]().to_dict()
    found[Qwen3_5MoeConfig].append(settings_of(Qwen3_5MoeConfig(text_config=text, vision_config=tower)))
    return found


def variants(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The settings, and forms of them in which fields matter that others hide."""
    yield settings
    text = settings.get("text_config", settings)
    hiding = dict.fromkeys(("layer_types", "eos_token_id", "tie_word_embeddings", "dtype"))
    for more in ({}, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}):
        changed = {key: value for key, value in text.items() if key not in hiding} | more
        yield {**settings, "text_config": changed} if "text_config" in settings else changed


def paths(settings: dict[str, Any]) -> Iterator[Path]:
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from ((key, *path) for path in paths(value))
        else:
            yield (key,)


def replaced(settings: dict[str, Any], path: Path, value: object) -> dict[str, Any]:
    rest = replaced(settings[path[0]], path[1:], value) if len(path) > 1 else value
    return {**settings, path[0]: rest}


def others(value: object) -> list[object]:
    """Values of the same type."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value * 2, 1, 3, 0]
        case float():
            return [value * 2, value + 0.3, 0.7]
        case str():
            return ["odd", "relu", "silu", "gelu", "tanh"]
        case list():
            return [value[:-1], value + value[-1:], value[::-1], [7]]
        case None:
            return [5, True, 0.7, "odd", [3], {"odd": 1}]
        case _:
            return [None, {"odd": 1}]


def is_heeded(architecture: Architecture, settings: dict[str, Any], path: Path) -> bool:
    """Whether some value changes what is read, or is refused by the field's name."""
    plain, value = architecture.read(ConfigReader(settings, "config.json")), settings
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    for other in others(value):
        try:
            if other != value and architecture.read(ConfigReader(replaced(settings, path, other), "x")) != plain:
                return True
        except ConfigError as error:
            if path[-1] in str(error):
                return True
    return False


def is_readable(architecture: Architecture, settings: dict[str, Any]) -> bool:
    try:
        architecture.read(ConfigReader(settings, "config.json"))
    except ConfigError:  # defaults of sections that do not fit each other, for example
        return False
    return True


def test_every_field_of_every_family() -> None:
    known, ignored, listed = known_configs(), defaultdict[str, set[str]](set), set[str]()
    for architecture in ARCHITECTURES:
        of_family = OF_FAMILY.get(architecture.name, {})
        kinds = {getattr(transformers, name).config_class: name for name in architecture.hf_names}
        for kind, name in kinds.items():
            given = [{**one, "architectures": [name]} for one in (settings_of(kind()), *known.get(kind, ()))]
            forms = [form for one in given for form in variants(one) if is_readable(architecture, form)]
            assert forms, f"{architecture.name}: no configuration of {kind.__name__} can be read: add a tiny one"
            for path in {path for one in given for path in paths(one)}:
                if not WITHOUT_EFFECT.keys().isdisjoint(path):
                    continue
                prefixes = {".".join(path[:length]) for length in range(1, len(path) + 1)}
                if prefixes & of_family.keys():
                    listed |= {f"{architecture.name} {prefix}" for prefix in prefixes}
                elif not any(is_heeded(architecture, form, path) for form in forms):
                    ignored[f"{architecture.name} ({name})"].add(".".join(path))
    assert not ignored, "read these fields, refuse them, or list them above with the reason why they have no effect"
    assert {f"{family} {field}" for family, fields in OF_FAMILY.items() for field in fields} <= listed
