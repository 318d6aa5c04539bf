"""Writes transformers models as GGUF as llama.cpp's converter does, with the gguf package's own table of names."""

import zlib
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from transformers import PreTrainedModel

from tests.kernels.random_blocks import random_blocks
from tests.models import gguf_states

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "arcee": gguf.MODEL_ARCH.ARCEE,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "phi": gguf.MODEL_ARCH.PHI2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
}
_FACTORS = {"factors": "rope_freqs", **{name: name for name in ("rope_factors_long", "rope_factors_short")}}
_INTERLEAVED = ("llama", "arcee", "smollm3", "granite", "granitemoe", "granitehybrid")
"""Those whose rows of q and k llama.cpp reorders."""


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: GGMLQuantizationType | Callable[[str], GGMLQuantizationType],
    tensors_per_file: int = 0,
    **metadata: object,
) -> PreTrainedModel:
    """Write `model` with its matrices as `kind`, and put the values that reading gives back into `model` itself.

    kind: of all matrices, or of the one of a name (of a part of experts, which are near the values put back if it is
    not that of the whole).
    tensors_per_file: write several files, named as `path` and their numbers; 0 for one.
    metadata: further keys ("__" for "."), without the architecture's prefix; `factors` is the tensor rope_freqs.weight,
    `rope_factors_long` and `rope_factors_short` are those of LongRoPE.
    """
    factors = {
        name: values for key, name in _FACTORS.items() if isinstance(values := metadata.pop(key, None), np.ndarray)
    }
    config = model.config
    has_states = config.model_type in gguf_states.MODELS
    architecture = gguf_states.architecture_of(config) if has_states else _ARCHITECTURES[config.model_type]
    name = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(path, name, split_max_tensors=tensors_per_file)
    if has_states:
        gguf_states.add_settings(writer, config)
    else:
        _add_settings(writer, config)
    for key, value in metadata.items():
        full_key = f"{name}.{key.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(full_key, value)
        elif isinstance(value, int):
            writer.add_uint32(full_key, value)
        else:
            writer.add_float32(full_key, float(str(value)))
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for key, tensor in state.items():
        is_router = key.endswith((*(f"{of}.gate.weight" for of in ("mlp", "feed_forward", "mixer")), ".router.weight"))
        is_router |= key.endswith(".shared_expert_gate.weight")
        stored_as = GGMLQuantizationType.F32
        if key.endswith(("e_score_correction_bias", "expert_bias")):
            writer.add_tensor(f"blk.{key.split('.')[2]}.exp_probs_b.bias", tensor.flatten().numpy())
            continue
        if ".conv.conv." in key:
            tensor = tensor.squeeze(1)
        elif ".conv1d." in key:
            pass
        elif tensor.dim() > 1 and not is_router and not key.endswith("_bias"):
            stored_as = kind(key) if callable(kind) else kind
        transposed = name == "gpt2" and tensor.dim() > 1 and ".c_" in key
        transposed |= name == "gpt-oss" and tensor.dim() == 3
        tensor = tensor.transpose(-1, -2) if transposed else tensor
        folding = gguf_states.folding(config, key) if has_states else None
        data = (tensor if folding is None else folding.fold(tensor)).numpy()
        data = _quantize(np.ascontiguousarray(data), stored_as)
        values = torch.from_numpy(quants.dequantize(data, stored_as))
        tensor.copy_(values if folding is None else folding.unfold(values))
        # From here on only rows change places, whose blocks stay as they are.
        if ".query_key_value." in key:  # from head by head to part by part
            by_head = data.reshape(config.num_attention_heads, 3, -1, *data.shape[1:])
            data = np.ascontiguousarray(by_head.swapaxes(0, 1)).reshape(data.shape)
        if ".experts." in key:
            whole, suffix = (key.removesuffix("_bias"), "bias") if key.endswith("_bias") else (key, "weight")
            whole = whole.replace("block_sparse_moe", "mlp").replace("mixer.experts", "mlp.experts")
            parts = _expert_parts(whole, data, alternate=name == "gpt-oss")
            for part, matrices in parts.items():
                stored = names.get_name(part)
                assert stored is not None, part
                of_part = kind(part) if callable(kind) and suffix == "weight" else stored_as
                if of_part is not stored_as:
                    matrices = _quantize(quants.dequantize(matrices, stored_as), of_part)
                writer.add_tensor(f"{stored}.{suffix}", matrices, raw_dtype=of_part)
            continue
        if name in _INTERLEAVED and (".q_proj." in key or ".k_proj." in key):
            heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
            data = _interleave(data, heads)
        if name.startswith("gemma") and key.endswith("norm.weight"):
            data = data + 1
        key = key if name == "gpt-oss" else key.replace(".router.", ".router.layer.")
        for part, rows in (gguf_states.parts_of(config, key, data) if has_states else {key: data}).items():
            stored = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert stored is not None, part
            stored += ".weight" if key.endswith(".sinks") else ""
            writer.add_tensor(stored, np.ascontiguousarray(rows), raw_dtype=stored_as)
    for key, values in factors.items():
        writer.add_tensor(f"{key}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_settings(writer: gguf.GGUFWriter, config) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    inner_size = getattr(config, "n_inner", None) or config.intermediate_size
    if getattr(config, "block_auto_adjust_ff_dim", False):
        inner_size = -(-(2 * inner_size // 3) // config.block_multiple_of) * config.block_multiple_of
    writer.add_feed_forward_length(inner_size)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type.startswith("lfm2"):
        types = config.layer_types
        writer.add_head_count_kv([config.num_key_value_heads if kind == "full_attention" else 0 for kind in types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_layer_norm_rms_eps(config.norm_eps)
    elif hasattr(config, "num_key_value_heads"):
        writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        if hasattr(config, key):
            writer.add_layer_norm_eps(getattr(config, key))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = getattr(config, "rope_parameters", {})
    if rope:
        stretched = rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))  # Hunyuan's
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"] * stretched)
    if config.model_type in ("gpt_neox", "phi", "phi3", "stablelm"):
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if config.model_type == "gpt_neox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if config.model_type == "cohere":
        writer.add_logit_scale(config.logit_scale)
    num_experts = getattr(config, "num_local_experts", 0)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if config.model_type == "gpt_oss":
            writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type in ("glm4", "glm4_moe", "minimax_m2"):
        writer.add_rope_dimension_count(head_dim // 2)
    if config.model_type == "ernie4_5_moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_used_count(config.moe_k)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    if config.model_type == "lfm2_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "glm4_moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if config.model_type in ("glm4_moe", "minimax_m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "minimax_m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type in ("gemma2", "gemma3_text", "olmo3", "starcoder2", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _expert_parts(key: str, values: np.ndarray, alternate: bool) -> dict[str, np.ndarray]:
    """transformers keeps all experts in two tensors, gate and up in one of them; llama.cpp in three.

    alternate: rows of gate and up take turns.
    """
    layer, _, name = key.rpartition(".")
    if name in ("up_proj", "down_proj"):
        return {key: values}
    gate, up = (values[:, 0::2], values[:, 1::2]) if alternate else np.split(values, 2, axis=1)
    return {f"{layer}.gate_proj": np.ascontiguousarray(gate), f"{layer}.up_proj": np.ascontiguousarray(up)}


def q4_k_m(name: str) -> GGMLQuantizationType:
    """Return the kind of a matrix, by its name, in a file that mixes Q4_K with Q6_K as llama.cpp's Q4_K_M does."""
    is_finer = "v_proj" in name or "down_proj" in name
    return GGMLQuantizationType.Q6_K if is_finer else GGMLQuantizationType.Q4_K


def _quantize(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Quantise along the last dimension; of a kind without a quantiser, return random blocks of the same spread."""
    pack = {GGMLQuantizationType.Q4_K: _q4_k, GGMLQuantizationType.Q6_K: _q6_k}.get(kind)
    if pack is not None:
        return pack(values).reshape(*values.shape[:-1], -1)
    try:
        return quants.quantize(values, kind)
    except NotImplementedError:
        rows, seed = values.size // values.shape[-1], zlib.crc32(values.tobytes())
        spread = quants.dequantize(random_blocks(kind.name, rows, values.shape[-1], seed, 1.0), kind).std()
        blocks = random_blocks(kind.name, rows, values.shape[-1], seed, float(values.std() / spread))
        return blocks.reshape(*values.shape[:-1], -1)


def _q4_k(values: np.ndarray) -> np.ndarray:
    """Blocks of two float16 factors, 8 scales and 8 minima of 6 bits, and 256 codes."""
    groups = values.reshape(-1, 8, 32)
    least = np.maximum(-groups.min(-1), 0)
    step = (groups.max(-1) + least) / 15
    factors = np.stack((step.max(-1), least.max(-1)), -1).astype(np.float16).clip(np.float16(1e-7)) / np.float16(63)
    of_step, of_least = factors.astype(np.float32)[..., None].swapaxes(0, 1)
    scales, minima = (np.round(of / by).clip(0, 63) for of, by in ((step, of_step), (least, of_least)))
    shifted = groups + (of_least * minima)[..., None]
    codes = np.round(shifted / (of_step * scales.clip(1))[..., None]).clip(0, 15).astype(np.uint8)
    s, m = (np.split(of.astype(np.uint8), 2, axis=1) for of in (scales, minima))
    packed = (s[0] | s[1] >> 4 << 6, m[0] | m[1] >> 4 << 6, (s[1] & 15) | (m[1] & 15) << 4)
    pairs = codes.reshape(-1, 4, 2, 32)
    return np.concatenate(
        (factors.view(np.uint8), *packed, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)), axis=1
    )


def _q6_k(values: np.ndarray) -> np.ndarray:
    """Blocks of 256 codes, their low four bits first, 16 signed scales, and a float16 factor."""
    groups = values.reshape(-1, 16, 16)
    largest = np.abs(groups).max(-1)
    factor = (largest.max(-1, keepdims=True) / (31 * 127)).astype(np.float16)
    unit = factor.astype(np.float32).clip(1e-8)
    scales = np.round(largest / 31 / unit).clip(1, 127) * np.where(np.arange(16) % 2, -1, 1)
    codes = np.round(groups / (unit * scales)[..., None]).clip(-32, 31) + 32
    quarters = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (quarters[:, :, :2] & 15) | (quarters[:, :, 2:] & 15) << 4
    high = (quarters >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(2, dtype=np.uint8)
    parts = (low, high, scales.astype(np.int8).view(np.uint8), factor.view(np.uint8))
    return np.concatenate([part.reshape(len(groups), -1) for part in parts], axis=1)


def _interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
