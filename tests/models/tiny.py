"""Tiny random checkpoints of every architecture, made by transformers, in sizes and head counts that catch mistakes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    ApertusConfig,
    ArceeConfig,
    BambaConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MiniMaxM2Config,
    Ministral3Config,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    NanoChatConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

VOCAB = 131
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LAYER_NORM_SHAPE = {
    key: value for key, value in _SHAPE.items() if key not in ("intermediate_size", "num_key_value_heads")
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
}


def _by_layer_type(of_full: dict[str, Any]) -> dict[str, Any]:
    plain = {"rope_type": "default", "rope_theta": of_full["rope_theta"]}
    return {"full_attention": of_full, "sliding_attention": plain}


WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
"""Changes of a tiny model that let each of two ranks have whole blocks of 256 elements."""
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.05 * pair for pair in range(12)],
        "long_factor": [1.0 + 0.4 * pair for pair in range(12)],
    },
}


def _llama(**more: object) -> PretrainedConfig:
    return LlamaConfig(**{**_SHAPE, **more})


def _qwen3_moe(**more: object) -> PretrainedConfig:
    shape = {**_SHAPE, "head_dim": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3MoeConfig(**{**shape, "moe_intermediate_size": 64, "num_experts": 7, "num_experts_per_tok": 3, **more})


def _gemma3_text(**more: object) -> Gemma3TextConfig:
    shape = {**_SHAPE, "num_hidden_layers": 7, "head_dim": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Gemma3TextConfig(**{**shape, "sliding_window": 5, "query_pre_attn_scalar": 40, **more})


def _gemma2(**more: object) -> PretrainedConfig:
    shape = {**_SHAPE, "head_dim": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    return Gemma2Config(**{**shape, **caps, "sliding_window": 5, "query_pre_attn_scalar": 40, **more})


def _gemma4(**more: object) -> PretrainedConfig:
    shape = {
        **_SHAPE, "num_hidden_layers": 4, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 48,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 3.0,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB,
    }  # fmt: skip
    return Gemma4TextConfig(**{**shape, **more})


_GEMMA4_SHARED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
}


_GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}


def _gemma3_multimodal() -> PretrainedConfig:
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = _gemma3_text(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    return Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4, eos_token_id=2)


def _llama4(**more: object) -> PretrainedConfig:
    shape = {**_SHAPE, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    own = {"intermediate_size": 48, "intermediate_size_mlp": 160, "num_local_experts": 5, "num_experts_per_tok": 2,
           "attention_chunk_size": 7, "floor_scale": 6, "attn_scale": 0.5}  # fmt: skip
    return Llama4TextConfig(**{**shape, **own, **more})


def _lfm2(**more: object) -> PretrainedConfig:
    layer_types = ["conv", "full_attention", "conv", "conv"]
    shape = {**_SHAPE, "num_hidden_layers": 4, "layer_types": layer_types, "block_multiple_of": 32}
    return Lfm2Config(**{**shape, **more})


def _lfm2_moe(**more: object) -> PretrainedConfig:
    experts = {"moe_intermediate_size": 64, "num_experts": 6, "num_experts_per_tok": 2, "num_dense_layers": 1}
    layer_types = ["conv", "conv", "full_attention"]
    return Lfm2MoeConfig(**{**_SHAPE, **experts, "layer_types": layer_types, "routed_scaling_factor": 1.5, **more})


def _mamba2(**more: object) -> PretrainedConfig:
    shape = {name: _SHAPE[name] for name in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")}
    heads = {"num_heads": 6, "head_dim": 32, "n_groups": 2, "state_size": 16, "num_hidden_layers": 3}
    return Mamba2Config(**{**shape, **heads, "pad_token_id": 0, "chunk_size": 16, **more})


_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16,
}  # fmt: skip


def _granite4(**more: object) -> PretrainedConfig:
    layer_types = ["linear_attention", "full_attention", "linear_attention"]
    scales = {"embedding_multiplier": 4.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
              "logits_scaling": 2.0}  # fmt: skip
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 64}
    return GraniteMoeHybridConfig(**{**_SHAPE, **_MAMBA, **scales, **experts, "layer_types": layer_types, **more})


def _falcon_h1(**more: object) -> PretrainedConfig:
    factors = {
        "embedding_multiplier": 3.0, "key_multiplier": 0.6, "lm_head_multiplier": 0.4, "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.7,
        "mlp_multipliers": [0.9, 0.6], "ssm_multipliers": [0.5, 0.7, 0.8, 1.1, 1.4],
    }  # fmt: skip
    return FalconH1Config(**{**_SHAPE, **_MAMBA, **factors, "mamba_d_ssm": 192, **more})


def _nemotron_h(**more: object) -> PretrainedConfig:
    heads = {"head_dim": 32, "mamba_num_heads": 6, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16}
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
               "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 1.5}  # fmt: skip
    kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    shape = {key: value for key, value in _SHAPE.items() if key != "num_hidden_layers"}
    return NemotronHConfig(**{**shape, **heads, **experts, "chunk_size": 16, "layers_block_type": kinds, **more})


def _bamba(**more: object) -> PretrainedConfig:
    return BambaConfig(**{**_SHAPE, **_MAMBA, "attn_layer_indices": [1], **more})


_DELTA: dict[str, Any] = {
    **_SHAPE, "head_dim": 32, "linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64,
}  # fmt: skip


def _qwen3_next(**more: object) -> PretrainedConfig:
    return Qwen3NextConfig(**{**_DELTA, **_SHARED_EXPERT, **more})


def _qwen3_5_moe() -> PretrainedConfig:
    shape = {key: value for key, value in _DELTA.items() if key != "intermediate_size"}
    return Qwen3_5MoeTextConfig(**shape, **_SHARED_EXPERT)


_LATENT: dict[str, Any] = {
    **_SHAPE,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "rope_parameters": {**_YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.9},
}
_MISTRAL4_ROPE = {**_YARN_ROPE, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5, "mscale": 0.7}
_IN_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}


def _deepseek_v3(**more: object) -> PretrainedConfig:
    return DeepseekV3Config(**{**_LATENT, **_IN_GROUPS, "q_lora_rank": 40, "n_shared_experts": 2, **more})


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _llama,
    "llama-tied-biased": lambda: _llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-mha-wide-heads": lambda: _llama(num_key_value_heads=3, head_dim=64),
    "llama-rope-linear": lambda: _llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "llama-rope-dynamic": lambda: _llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "llama-rope-llama3": lambda: _llama(rope_parameters=_LLAMA3_ROPE),
    "llama-rope-yarn": lambda: _llama(rope_parameters=_YARN_ROPE),
    "mistral": lambda: MistralConfig(**{**_SHAPE, "sliding_window": None, "num_attention_heads": 6, "head_dim": 16}),
    "mistral-window": lambda: MistralConfig(**_SHAPE, sliding_window=7),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen2-window": lambda: Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**{**_SHAPE, "head_dim": 48, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "mixtral": lambda: MixtralConfig(**_SHAPE, num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
    "mixtral-window": lambda: MixtralConfig(**_SHAPE, num_local_experts=3, num_experts_per_tok=1, sliding_window=7),
    "qwen3-moe": _qwen3_moe,
    "qwen3-moe-renormalized": lambda: _qwen3_moe(norm_topk_prob=True),
    "qwen3-moe-some-layers": lambda: _qwen3_moe(decoder_sparse_step=2, mlp_only_layers=[3], num_hidden_layers=4),
    "olmoe": lambda: OlmoeConfig(**_SHAPE, num_experts=6, num_experts_per_tok=2),
    "olmoe-gqa": lambda: OlmoeConfig(
        **{**_SHAPE, "num_attention_heads": 6, "num_key_value_heads": 2}, num_experts=4, num_experts_per_tok=4
    ),
    "gpt2": lambda: GPT2Config(**_LAYER_NORM_SHAPE, n_inner=160),
    "gpt-neox": lambda: GPTNeoXConfig(**_LAYER_NORM_SHAPE, intermediate_size=160),
    "gemma2": _gemma2,
    "gemma2-scale-of-head-dim": lambda: _gemma2(head_dim=32, query_pre_attn_scalar=32),
    "phi": lambda: PhiConfig(**{**_SHAPE, "num_key_value_heads": 3}),
    "phi3": lambda: Phi3Config(**_SHAPE),
    "starcoder2": lambda: Starcoder2Config(**_SHAPE, sliding_window=7),
    "stablelm": lambda: StableLmConfig(**_SHAPE),
    "cohere": lambda: CohereConfig(**_SHAPE, logit_scale=0.4),
    "cohere2": lambda: Cohere2Config(**{**_SHAPE, "num_hidden_layers": 4}, sliding_window=7, logit_scale=0.4),
    "gemma3": _gemma3_text,
    "gemma3-scale-of-head-dim": lambda: _gemma3_text(head_dim=32, query_pre_attn_scalar=32),
    "gemma3-softcap-scaled": lambda: _gemma3_text(
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    "gemma3-multimodal": _gemma3_multimodal,
    "gemma4": _gemma4,
    "gemma4-shared": lambda: _gemma4(**_GEMMA4_SHARED),
    "gemma4-moe": lambda: _gemma4(enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=48),
    "olmo2": lambda: Olmo2Config(**_SHAPE),
    "olmo3": lambda: Olmo3Config(
        **{**_SHAPE, "num_hidden_layers": 4}, sliding_window=7, rope_parameters=_by_layer_type(_YARN_ROPE)
    ),
    "seed-oss": lambda: SeedOssConfig(**_SHAPE, head_dim=48),
    "apertus": lambda: ApertusConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE),
    "arcee": lambda: ArceeConfig(**_SHAPE),
    "ernie4.5": lambda: Ernie4_5Config(**_SHAPE, head_dim=48),
    "ernie4.5-moe": lambda: Ernie4_5_MoeConfig(
        **_SHAPE, moe_num_experts=6, moe_k=2, moe_intermediate_size=48, moe_num_shared_experts=2
    ),
    "hunyuan": lambda: HunYuanDenseV1Config(
        **_SHAPE,
        head_dim=48,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0},
    ),
    "nanochat": lambda: NanoChatConfig(**_SHAPE),
    "glm4-moe": lambda: Glm4MoeConfig(
        **_SHAPE,
        **_IN_GROUPS,
        head_dim=32,
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=3,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "minimax-m2": lambda: MiniMaxM2Config(
        **_SHAPE, head_dim=32, num_local_experts=5, num_experts_per_tok=2, rotary_dim=16
    ),
    "mistral4": lambda: Mistral4Config(
        **{**_LATENT, **_IN_GROUPS, "q_lora_rank": 40, "rope_parameters": _MISTRAL4_ROPE}, n_shared_experts=2
    ),
    "smollm3": lambda: SmolLM3Config(**{**_SHAPE, "num_hidden_layers": 4}),
    "exaone4": lambda: Exaone4Config(**_SHAPE, sliding_window=6, sliding_window_pattern=2),
    "exaone4-full": lambda: Exaone4Config(**_SHAPE, sliding_window=None, layer_types=["full_attention"] * 3),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **_SHAPE, moe_intermediate_size=64, shared_expert_intermediate_size=80, num_experts=5, num_experts_per_tok=2
    ),
    "glm4": lambda: Glm4Config(**_SHAPE, head_dim=32),
    "mistral3": lambda: Ministral3Config(
        **_SHAPE,
        head_dim=32,
        rope_parameters={**_YARN_ROPE, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5},
    ),
    "gpt-oss": lambda: GptOssConfig(
        **_SHAPE,
        head_dim=32,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=6,
        rope_parameters={**_YARN_ROPE, "truncate": False},
        swiglu_limit=1.0,
    ),
    "deepseek-v2": lambda: DeepseekV2Config(**_LATENT, n_shared_experts=2, attention_bias=True),
    "deepseek-v2-groups": lambda: DeepseekV2Config(
        **{**_LATENT, **_IN_GROUPS, "rope_parameters": None, "q_lora_rank": 40}, topk_method="group_limited_greedy"
    ),
    "deepseek-v3": _deepseek_v3,
    "deepseek-v3-halves": lambda: _deepseek_v3(rope_interleave=False, norm_topk_prob=False, q_lora_rank=None),
    "lfm2": _lfm2,
    "lfm2-biased": lambda: _lfm2(conv_bias=True, conv_L_cache=4, block_auto_adjust_ff_dim=False),
    "lfm2-attention-last": lambda: _lfm2(num_hidden_layers=3, layer_types=["conv", "conv", "full_attention"]),
    "lfm2-moe": _lfm2_moe,
    "mamba2": _mamba2,
    "granite4": _granite4,
    "granite4-dense": lambda: _granite4(num_local_experts=0, position_embedding_type="rope", mamba_proj_bias=True),
    "bamba": _bamba,
    "bamba-biased": lambda: _bamba(attention_bias=True, mlp_bias=True, mamba_conv_bias=False, mamba_n_groups=1),
    "falcon-h1": _falcon_h1,
    "falcon-h1-normed": lambda: _falcon_h1(
        mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_d_ssm=None, projectors_bias=True, attention_bias=True
    ),
    "qwen3-next": _qwen3_next,
    "qwen3-next-biased": lambda: _qwen3_next(
        attention_bias=True, linear_num_key_heads=6, mlp_only_layers=[2], norm_topk_prob=False
    ),
    "qwen3.5": lambda: Qwen3_5TextConfig(**_DELTA),
    "qwen3.5-attention-last": lambda: Qwen3_5TextConfig(
        **{
            **_DELTA,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "linear_num_key_heads": 2,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
        tie_word_embeddings=True,
    ),
    "qwen3.5-moe": _qwen3_5_moe,
    "nemotron-h": _nemotron_h,
    "nemotron-h-latent": lambda: _nemotron_h(
        layers_block_type=["mlp", "full_attention", "linear_attention", "moe"],
        moe_latent_size=64,
        mlp_bias=True,
        use_bias=True,
        use_conv_bias=False,
        n_group=2,
        topk_group=1,
        norm_topk_prob=False,
    ),
    "mamba2-plain": lambda: _mamba2(n_groups=1, use_conv_bias=False, use_bias=True),
    "lfm2-moe-without-bias": lambda: _lfm2_moe(use_expert_bias=False, norm_topk_prob=False),
    "llama4": _llama4,
    "llama4-dense-layers": lambda: _llama4(
        interleave_moe_layer_step=2, attn_temperature_tuning=False, use_qk_norm=False, attention_chunk_size=8
    ),
    "granite": lambda: GraniteConfig(**_SHAPE, **_GRANITE, rms_norm_eps=1e-3),
    "granitemoe": lambda: GraniteMoeConfig(**_SHAPE, **_GRANITE, num_local_experts=5, num_experts_per_tok=2),
}


def make_model(name: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A model in float32 whose every parameter, norms and biases included, is random and matters.

    changes: of the settings called `name`.
    """
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    config.update(changes)
    kind = {
        "gemma3-multimodal": transformers.Gemma3ForConditionalGeneration,
        "mistral4": transformers.Mistral4ForCausalLM,  # not one of the automatic ones
    }.get(name)
    model = transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    model = model.float().eval()
    around = 0.0 if name.startswith(("gemma2", "gemma3")) else 1.0
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight", "final_layernorm.weight")):
                # multiples of 2^-10, so that llama.cpp's 1 + weight is exact
                parameter.copy_(around + (torch.randn_like(parameter) * 0.3).mul(1024).round().div(1024))
            elif parameter.dim() == 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
        for key, buffer in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.2)
            elif key.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.4)
    return model


def save(model: PreTrainedModel, folder: Path, max_shard_size: str = "5GB") -> Path:
    """Write a checkpoint folder and return it."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers answers, greedily, whatever ends it."""
    answer = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return answer[0, len(prompt) :].tolist()
