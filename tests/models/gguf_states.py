"""What llama.cpp's converter does with models that have recurrent layers: their settings and tensors."""

from dataclasses import dataclass

import gguf
import numpy as np
import torch
from transformers import PretrainedConfig

MODELS = {
    "mamba2": gguf.MODEL_ARCH.MAMBA2,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "bamba": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
}
_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def architecture_of(config: PretrainedConfig) -> gguf.MODEL_ARCH:
    if config.model_type == "nemotron_h" and "moe" not in config.layers_block_type:
        return gguf.MODEL_ARCH.NEMOTRON_H
    return MODELS[config.model_type]


def add_settings(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Add all settings of a model with recurrent layers, as the converter does."""
    kind, num_layers = config.model_type, config.num_hidden_layers
    writer.add_block_count(num_layers)
    writer.add_context_length(getattr(config, "max_position_embeddings", 2**20))
    writer.add_embedding_length(config.hidden_size)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", getattr(config, "layer_norm_epsilon", None)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    _add_shape(writer, config)
    if kind == "mamba2":
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        return
    kv_heads, types = config.num_key_value_heads, getattr(config, "layers_block_type", None) or config.layer_types
    attends = [kv_heads if "attention" in of and "linear" not in of else 0 for of in types]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(attends if kind in ("granitemoehybrid", "bamba", "nemotron_h") else kv_heads)
    if kind not in ("granitemoehybrid", "bamba"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if kind != "nemotron_h":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if kind == "nemotron_h":
        has_experts = "moe" in types
        inner_size = config.moe_intermediate_size if has_experts else config.intermediate_size
        writer.add_feed_forward_length([inner_size if of in ("mlp", "moe") else 0 for of in types])
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
        writer.add_rope_scaling_finetuned(value=False)
        if has_experts:
            _add_experts(writer, config, config.n_routed_experts, config.moe_shared_expert_intermediate_size)
            writer.add_expert_shared_count(config.n_shared_experts)
            writer.add_expert_weights_norm(config.norm_topk_prob)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            writer.add_expert_group_count(config.n_group)
            if config.moe_latent_size:
                writer.add_moe_latent_size(config.moe_latent_size)
    elif kind in ("granitemoehybrid", "bamba"):
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_scaling_finetuned(kind == "bamba" or config.position_embedding_type == "rope")
        if kind == "granitemoehybrid":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
            if config.num_local_experts:
                writer.add_expert_count(config.num_local_experts)
                writer.add_expert_used_count(config.num_experts_per_tok)
            else:
                writer.add_feed_forward_length(config.shared_intermediate_size)
        else:
            writer.add_rope_dimension_count(head_dim // 2)
    else:
        if kind != "qwen3_5_moe_text":
            writer.add_feed_forward_length(config.intermediate_size)
        writer.add_vocab_size(config.vocab_size)
    if kind in _DELTA:
        writer.add_rope_dimension_count(int(head_dim * config.rope_parameters["partial_rotary_factor"]))
        writer.add_full_attention_interval(4)
        writer.add_array(
            f"{gguf.MODEL_ARCH_NAMES[MODELS[kind]]}.attention.recurrent_layers",
            [of == "linear_attention" for of in types],
        )
        if kind != "qwen3_next":
            writer.add_rope_dimension_sections([11, 11, 10, 0])
        if kind != "qwen3_5_text":
            _add_experts(writer, config, config.num_experts, config.shared_expert_intermediate_size)


def _add_experts(writer: gguf.GGUFWriter, config: PretrainedConfig, count: int, shared_size: int) -> None:
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(shared_size)


def _add_shape(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    heads, size, state, groups, taps = shape_of(config)
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_inner_size(heads * size)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)


def shape_of(config: PretrainedConfig) -> tuple[int, int, int, int, int]:
    """Return heads, their size, the sizes of a state, of groups and of the convolution."""
    names = {
        "mamba2": ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"),
        "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
        **dict.fromkeys(
            _DELTA,
            (
                *("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim", "linear_num_key_heads"),
                "linear_conv_kernel_dim",
            ),
        ),
    }.get(config.model_type, ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"))
    heads, size, state, groups, taps = (getattr(config, name) for name in names)
    return heads, size, state, groups, taps


@dataclass(frozen=True)
class Folding:
    """What a matrix is multiplied with before it is stored, and the order of its columns, None for its own."""

    factor: torch.Tensor | float = 1.0
    columns: torch.Tensor | None = None

    def fold(self, values: torch.Tensor) -> torch.Tensor:
        values = values * self.factor
        return values if self.columns is None else values[:, self.columns]

    def unfold(self, values: torch.Tensor) -> torch.Tensor:
        values = values / self.factor
        return values if self.columns is None else values[:, self.columns.argsort()]


def folding(config: PretrainedConfig, key: str) -> Folding | None:
    """Return how a tensor is folded, if it is: with Falcon-H1's multipliers, or in the order of Qwen3.5's heads."""
    if config.model_type in _DELTA[1:] and ".linear_attn.out_proj." in key:
        return Folding(columns=torch.from_numpy(_tiled(config, shape_of(config)[1])))
    if config.model_type != "falcon_h1" or not key.endswith(".weight"):
        return None
    attention, mlp = config.attention_in_multiplier, config.mlp_multipliers
    if "mamba.in_proj" in key:
        heads, size, state, groups, _ = shape_of(config)
        rows = [heads * size, heads * size, groups * state, groups * state, heads]
        factors = torch.repeat_interleave(torch.tensor(config.ssm_multipliers), torch.tensor(rows))
        return Folding(config.ssm_in_multiplier * factors[:, None])
    factors = {
        "down_proj": mlp[1], "gate_proj": mlp[0], "k_proj": config.key_multiplier * attention, "q_proj": attention,
        "v_proj": attention, "o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier, "embed_tokens": config.embedding_multiplier,
    }  # fmt: skip
    found = next((factor for name, factor in factors.items() if f"{name}." in key), None)
    return None if found is None else Folding(found)


def _tiled(config: PretrainedConfig, size: int) -> np.ndarray:
    """Heads of so many rows, of groups one after the other, in the order in which each group has one in turn."""
    heads, _, _, groups, _ = shape_of(config)
    return np.arange(heads * size).reshape(groups, heads // groups, size).swapaxes(0, 1).flatten()


def parts_of(config: PretrainedConfig, key: str, data: np.ndarray) -> dict[str, np.ndarray]:
    """Return what becomes of a tensor, by names for the converter's table.   data: its rows, which may be quantised."""
    kind, (heads, size, state, groups, _) = config.model_type, shape_of(config)
    layer, _, name = key.rpartition("linear_attn." if kind in _DELTA else "mixer." if "mixer." in key else "mamba.")
    if name == "in_proj_qkvz.weight":
        per_group = heads // groups * size
        by_group = data.reshape(groups, 2 * (state + per_group), -1)
        *qkv, z = np.split(by_group, np.cumsum((state, state, per_group)), axis=1)
        joined, z = (np.concatenate([part.reshape(-1, data.shape[1]) for part in some]) for some in (qkv, [z]))
        return {f"{layer}linear_attn.in_proj_qkv.weight": joined, f"{layer}linear_attn.in_proj_z.weight": z}
    if kind in _DELTA[1:] and layer:
        for_values, keys = _tiled(config, size), 2 * groups * state
        if name in ("in_proj_qkv.weight", "conv1d.weight"):
            data = np.concatenate((data[:keys], data[keys:][for_values]))
        elif name == "in_proj_z.weight":
            data = data[for_values]
        elif name in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
            data = data[_tiled(config, 1)]
    if name == "A_log":
        data = -torch.exp(torch.from_numpy(data)).numpy()
    if key.endswith((".A_log", ".D")) and kind not in _DELTA:
        data = data.reshape(-1, 1)
    if key.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        data = data.reshape(groups, -1)
    if key.endswith(".conv1d.weight"):
        data = data.squeeze(1)
    if kind in _DELTA and key.endswith("norm.weight") and "linear_attn" not in key:
        data = data + 1
    if key.endswith("shared_mlp.input_linear.weight"):
        suffix = "shared_experts." if config.num_local_experts else ""
        gate, up = np.split(data, 2)
        mlp = key.replace("shared_mlp.input_linear.weight", f"mlp.{suffix}")
        return {f"{mlp}gate_proj.weight": gate, f"{mlp}up_proj.weight": up}
    if key.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        key = key.replace("shared_mlp.output_linear", "mlp.down_proj")
    if kind == "nemotron_h" and ".mixer." in key:
        key = key.replace("model.", "backbone.").replace(".dt_bias", ".dt.bias")
    return {key.replace(".dt_bias", ".dt_proj.bias"): data}
