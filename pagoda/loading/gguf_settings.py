"""Read the settings of a GGUF file, by the names that config.json has for them.

A setting of the architecture that is not read, and not known to leave the result as it is, is refused.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.base.pooling import PoolingKind, PoolingPlan
from pagoda.loading.gguf_file import GGUFFile, Value
from pagoda.loading.token_ids import end_token_ids
from pagoda.models.architecture import Architecture, TreeConfig
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import FULL, MLP, RECURRENT, SLIDING, DecoderConfig
from pagoda.models.registry import BY_GGUF_NAME

# GGUF keys after "{architecture}." and their names in config.json.
_INTEGERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "interleave_moe_layer_step": "moe_layer_interval",
    "shortconv.l_cache": "conv_L_cache",
    "nextn_predict_layers": "num_nextn_predict_layers",
    "moe_latent_size": "moe_latent_size",
    "full_attention_interval": "full_attention_interval",
    # config.json names these differently in almost every architecture with recurrent layers.
    **{
        key: key
        for key in (
            *("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count"),
            "expert_shared_feed_forward_length",
        )
    },
}
_NUMBERS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale",
    "expert_weights_scale": "routed_scaling_factor",
}
_FLAGS = {
    "use_parallel_residual": "use_parallel_residual",
    "expert_weights_norm": "norm_topk_prob",
    "rope.scaling.finetuned": "rope_finetuned",
}
_ROPE_SCALING = (
    *("rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
_KV_HEADS, _INNER_SIZE = "attention.head_count_kv", "feed_forward_length"
_WORDS = {
    **_INTEGERS,
    _KV_HEADS: "num_key_value_heads",
    _INNER_SIZE: "intermediate_size",
    **_NUMBERS,
    **_FLAGS,
    **dict.fromkeys(_ROPE_SCALING, "rope_scaling"),
    **dict.fromkeys(("attention.key_length", "attention.value_length"), "head_dim"),
    "rope.dimension_count": "partial_rotary_factor",
    "expert_gating_func": "scoring_func",
    **dict.fromkeys(("attention.sliding_window_pattern", "attention.recurrent_layers"), "layer_types"),
    "rope.dimension_sections": "mrope_section",
}
"""What a key becomes: the setting that an architecture reads, or does not."""

_OPTIONAL_TENSORS = {
    "attention_out_bias": "attn_output.bias",
    "qk_norm": "attn_q_norm.weight",
    "mlp_bias": "ffn_down.bias",
    "ssm.conv_bias": "ssm_conv1d.bias",
    "ssm.norm": "ssm_norm.weight",
    "ssm.by_group": "ssm_in.weight",
}
"""Settings that are true where a layer has a tensor."""

_NO_WINDOW = "llama.cpp has no window for architectures that do not read one here"
_OTHER_NORM = "of the other kind of norm than the architecture has"
WITHOUT_EFFECT: Mapping[str, str] = {
    "vocab_size": "the embedding's rows are counted",
    "tensor_data_layout": "a name; what is stored follows from the architecture",
    "pooling_type": "read by read_gguf_pooling",
    "expert_shared_feed_forward_length": "the shape of the tensors is compared with what the other settings say",
    "attention.causal": "compared with what the architecture is",
    "attention.sliding_window": _NO_WINDOW,
    "attention.sliding_window_pattern": _NO_WINDOW,
    "attention.layer_norm_epsilon": _OTHER_NORM,
    "attention.layer_norm_rms_epsilon": _OTHER_NORM,
    "rope.freq_base": "of an architecture without rotary embedding",
    "rope.scaling.finetuned": "says how the model was trained; only Granite reads it",
}
"""Keys that have no effect on the result where the architecture does not read them, and why."""

_OF_TOWERS = ("vision.", "mm.")
"""How the keys of a tower for images begin, which Ollama stores in the same file; it is not loaded."""

_SAME_AS = {
    "rope.freq_base_swa": "rope.freq_base",
    "rope.dimension_count_swa": "rope.dimension_count",
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "embedding_length_out": "embedding_length",
    "expert_feed_forward_length": "feed_forward_length",
}
"""Keys that have no effect with the value of another key."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "expert_weights_norm": (True,),  # experts that are not asked about it are renormalised
    "expert_gating_func": (0, 1),  # none, softmax
    **dict.fromkeys(("expert_weights_scale", "attention.output_scale", "attention.value_scale"), (0, 1)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count", "experts_per_group"), (0, 1)),
    **dict.fromkeys(("moe_every_n_layers", "interleave_moe_layer_step"), (0, 1)),
}
"""Values with which a key has no effect, where these are not 0, false, or empty."""


def read_gguf(file: GGUFFile) -> tuple[Architecture, TreeConfig]:
    """Return a file's architecture and the configuration of its tree. Raises ConfigError for what is not supported."""
    name = file.require("general.architecture", str)
    try:
        candidates = BY_GGUF_NAME[name]
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from None
    num_experts = file.get(f"{name}.expert_count", int) or 0
    matching = [candidate for candidate in candidates if candidate.experts in (None, num_experts > 0)]
    if not matching:
        raise ConfigError(
            f"{file.path}: {name}.expert_count = {num_experts}: pagoda knows {name!r} only "
            f"{'with' if candidates[0].experts else 'without'} experts"
        )
    architecture = matching[0]
    settings = ConfigReader(_hf_words(file, name), str(file.path))
    settings = settings.changed(architecture.gguf_settings(settings))
    config = architecture.read(settings)
    is_causal = isinstance(config, DecoderConfig) and not config.bidirectional
    if (stated := file.get(f"{name}.attention.causal", bool)) not in (None, is_causal):
        raise _unsupported(file, f"{name}.attention.causal", stated)
    _refuse_unread(file, name, settings)
    return architecture, config


def _refuse_unread(file: GGUFFile, name: str, settings: ConfigReader) -> None:
    """Raise ConfigError for a key of the architecture that may change the result, and was not read."""
    for full, value in file.metadata.items():
        key = full.removeprefix(f"{name}.")
        same = file.metadata.get(f"{name}.{_SAME_AS.get(key, key)}")
        if (
            key == full
            or _WORDS.get(key) in settings.asked
            or (key == "rope.dimension_count" and settings.values["partial_rotary_factor"] == 1)
            or key in WITHOUT_EFFECT
            or key.startswith(_OF_TOWERS)
            or _is_neutral(key, value)
            or (key in _SAME_AS and isinstance(same, int | float) and value == same)
        ):
            continue
        raise _unsupported(file, full, value)


def _is_neutral(key: str, value: Value) -> bool:
    if isinstance(value, np.ndarray):
        return not value.any()
    if isinstance(value, int | float):
        return value in _NEUTRAL.get(key, (0,))
    return not len(value)


def _unsupported(file: GGUFFile, key: str, value: Value) -> ConfigError:
    shown = value if isinstance(value, int | float) else abbreviate(value)
    return ConfigError(
        f"{file.path}: {key} = {shown} is not supported with this architecture; where it has no meaning for the model, "
        f"remove it: gguf-new-metadata --remove-metadata {abbreviate(key)} OLD.gguf NEW.gguf"
    )


def _hf_words(file: GGUFFile, name: str) -> dict[str, object]:
    """Return a GGUF file's metadata with the keys of a config.json."""
    values: dict[str, object] = {ours: file.get(f"{name}.{key}", int) for key, ours in _INTEGERS.items()}
    values |= {ours: file.get(f"{name}.{key}", float) for key, ours in _NUMBERS.items()}
    values |= {ours: file.get(f"{name}.{key}", bool) for key, ours in _FLAGS.items()}
    values["sliding_window"] = values["sliding_window"] or None  # Phi-4 files have 0
    gating = file.get(f"{name}.expert_gating_func", int)
    values["scoring_func"] = _GATING_FUNCTIONS.get(gating, str(gating)) if gating else None
    if values["rope_theta"] is None:
        values["rope_theta"] = 10_000.0  # llama.cpp's, where the publisher's may be another
    values["head_dim"] = head_dim = _head_dim(file, name)
    turned = file.get(f"{name}.rope.dimension_count", int)
    values["partial_rotary_factor"] = None if turned is None else turned / head_dim
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path}: tensor 'token_embd.weight' is missing or does not have two dimensions")
    values["vocab_size"] = embedding.shape[0]
    if (token_types := file.tensors.get("token_types.weight")) is not None:
        values["type_vocab_size"] = token_types.shape[0]
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    of_layers = {tensor.split(".", 2)[2] for tensor in file.tensors if re.match(r"blk\.\d+\.", tensor)}
    values["attention_bias"] = bool({"attn_q.bias", "attn_qkv.bias"} & of_layers)
    values |= {word: tensor in of_layers for word, tensor in _OPTIONAL_TENSORS.items()}
    values["eos_token_id"] = list(end_token_ids(file))
    values["bos_token_id"] = file.get("tokenizer.ggml.bos_token_id", int)
    values["dtype"] = _natural_dtype(file)
    values["one_norm"] = "ffn_norm.weight" not in of_layers
    kv_heads, inner_sizes = (_numbers_of_layers(file, name, key) for key in (_KV_HEADS, _INNER_SIZE))
    values["num_key_value_heads"] = max(kv_heads) if kv_heads else file.get(f"{name}.{_KV_HEADS}", int)
    values["intermediate_size"] = max(inner_sizes) if inner_sizes else file.get(f"{name}.{_INNER_SIZE}", int)
    values["layer_types"] = _layer_types(file, name)
    if kv_heads and 0 in kv_heads:
        values["layer_types"] = [FULL if count else RECURRENT for count in kv_heads]
    if inner_sizes and 0 in inner_sizes:
        types = values["layer_types"] or [FULL] * len(inner_sizes)
        values["layer_types"] = [MLP if size else kind for size, kind in zip(inner_sizes, types, strict=False)]
    sections = file.metadata.get(f"{name}.rope.dimension_sections")
    values["mrope_section"] = sections.tolist() if isinstance(sections, np.ndarray) else sections
    values["rope_scaling"] = _longrope(file, f"{name}.rope.scaling") or _rope_scaling(file, f"{name}.rope")
    return values


def _numbers_of_layers(file: GGUFFile, name: str, key: str) -> list[int] | None:
    """Return what the file says of each layer, if it does: 0 of those without KV heads, or without an MLP.

    Raises ConfigError if the others differ.
    """
    if not isinstance(stated := file.metadata.get(f"{name}.{key}"), np.ndarray) or stated.dtype.kind not in "iu":
        return None
    if len({*stated.tolist()} - {0}) > 1 or len(stated) != file.require(f"{name}.block_count", int):
        raise _unsupported(file, f"{name}.{key}", stated)
    return [int(count) for count in stated]


_GATING_FUNCTIONS = {1: "softmax", 2: "sigmoid"}


def _layer_types(file: GGUFFile, name: str) -> list[str] | None:
    """Return the kind of each layer, where the file says it: a flag for each, or that every n-th has no window."""
    if isinstance(recurrent := file.metadata.get(f"{name}.attention.recurrent_layers"), np.ndarray):
        return [RECURRENT if flag else FULL for flag in recurrent.astype(bool).tolist()]
    key = f"{name}.attention.sliding_window_pattern"
    if isinstance(stated := file.metadata.get(key), np.ndarray):
        has_window = stated.astype(bool).tolist()
    elif (every := file.get(key, int)) is not None:
        num_layers = file.require(f"{name}.block_count", int)
        has_window = [not every or at % every < every - 1 for at in range(num_layers)]
    else:
        return None
    return [SLIDING if windowed else FULL for windowed in has_window]


_MOST_FACTORS_BYTES = 4 * 1025  # one more factor than the settings' reader takes


def _longrope(file: GGUFFile, prefix: str) -> dict[str, object] | None:
    """Return LongRoPE's parameters, whose factors are tensors; None without them."""
    factors: dict[str, object] = {}
    for kind in ("short", "long"):
        tensor = file.tensors.get(f"rope_factors_{kind}.weight")
        if tensor is None or tensor.type.name != "F32":
            return None
        factors[f"{kind}_factor"] = file.bytes_of(tensor)[:_MOST_FACTORS_BYTES].cast("f").tolist()
    _refuse_others(file, prefix, ("factor", "yarn_attn_factor", "yarn_ext_factor"))
    return {
        **factors,
        "rope_type": "longrope",
        "original_max_position_embeddings": file.require(f"{prefix}.original_context_length", int),
        "attention_factor": file.get(f"{prefix}.attn_factor", float),
    }


def _rope_scaling(file: GGUFFile, prefix: str) -> dict[str, object] | None:
    """Return what is said of scaling, None if nothing is. As in llama.cpp, a factor without a type is linear."""
    kind = file.get(f"{prefix}.scaling.type", str) or "linear"
    factor = file.get(f"{prefix}.scaling.factor", float)
    if factor is None:
        factor = file.get(f"{prefix}.scale_linear", float)  # its older name
    _refuse_others(file, f"{prefix}.scaling", ("attn_factor", "yarn_attn_factor"))
    _refuse_others(file, f"{prefix}.scaling", ("yarn_ext_factor",), (-1.0, 1.0 if kind == "yarn" else 0.0))
    if kind == "none" or (kind == "linear" and not factor):
        return None
    return {
        "rope_type": kind,
        "factor": factor or 1.0,
        "original_max_position_embeddings": file.get(f"{prefix}.scaling.original_context_length", int),
        "beta_fast": file.get(f"{prefix}.scaling.yarn_beta_fast", float),
        "beta_slow": file.get(f"{prefix}.scaling.yarn_beta_slow", float),
    }


def _refuse_others(file: GGUFFile, prefix: str, keys: tuple[str, ...], neutral: tuple[float, ...] = (0.0, 1.0)) -> None:
    """Raise ConfigError for one of the keys that is set to another value than the neutral ones."""
    for key in keys:
        stated = file.get(f"{prefix}.{key}", float)
        if stated is not None and stated not in neutral:
            raise _unsupported(file, f"{prefix}.{key}", stated)


def _head_dim(file: GGUFFile, name: str) -> int:
    heads = file.require(f"{name}.attention.head_count", int)
    derived = file.require(f"{name}.embedding_length", int) // max(heads, 1)
    head_dim = file.get(f"{name}.attention.key_length", int) or derived
    if head_dim < 1:
        raise ConfigError(f"{file.path}: heads of {head_dim} elements ({heads} heads); expected at least 1")
    other = file.get(f"{name}.attention.value_length", int)
    if other is not None and other != head_dim:
        raise ConfigError(
            f"{file.path}: {name}.attention.value_length = {other} with heads of {head_dim} is not supported"
        )
    return head_dim


def _natural_dtype(file: GGUFFile) -> str:
    """Return a guess of the weights' dtype before they were quantised."""
    kinds: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) == 2:
            kinds[tensor.type.name] += tensor.num_bytes
    largest = kinds.most_common(1)[0][0] if kinds else ""
    return {"F32": "float32", "F16": "float16"}.get(largest, "bfloat16")


_POOLING = {1: PoolingKind.MEAN, 2: PoolingKind.CLS, 3: PoolingKind.LAST}


def read_gguf_pooling(file: GGUFFile, plan: PoolingPlan) -> PoolingPlan:
    """Return the plan with the pooling that the file names, if any. Raises ConfigError for another kind."""
    key = f"{file.require('general.architecture', str)}.pooling_type"
    kind = file.get(key, int)
    if not kind:
        return plan
    if kind not in _POOLING:
        raise ConfigError(f"{file.path}: {key} = {kind} is not supported; supported: 1, 2, 3 (mean, CLS, last)")
    # A GGUF does not say whether vectors get unit length; llama.cpp gives it to all.
    return replace(plan, kind=_POOLING[kind], normalize=True)
