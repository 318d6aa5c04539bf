"""Tiny models with recurrent layers whose rows are whole blocks of 256 elements, for types with such blocks."""

from typing import Any

_HYBRID: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 16,
}
_DELTA: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,  # that of values, too, in llama.cpp
}
_EXPERTS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
WIDE_STATES: dict[str, dict[str, Any]] = {
    "mamba2": {"hidden_size": 256, "num_heads": 16},
    "granite4": {**_HYBRID, "shared_intermediate_size": 256},
    "granite4-dense": {**_HYBRID, "shared_intermediate_size": 512},
    "falcon-h1": {**_HYBRID, "mamba_d_ssm": 512, "head_dim": 64},
    "nemotron-h": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "mamba_num_heads": 16,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 512,
    },
    "qwen3-next": {**_DELTA, **_EXPERTS, "intermediate_size": 512},
    "qwen3.5": {**_DELTA, "intermediate_size": 512},
    "qwen3.5-moe": {**_DELTA, **_EXPERTS},
    "lfm2": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "block_auto_adjust_ff_dim": False,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
"""Changes of tests.models.tiny's models, by name."""
IN_GGUF: dict[str, dict[str, Any]] = {
    "nemotron-h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "moe_intermediate_size": 160,  # a file with experts does not have the size of MLPs
    },
    "nemotron-h-latent": {"layers_block_type": ["mlp", "full_attention", "linear_attention", "mlp"], "use_bias": False},
    "granite4-dense": {"mamba_proj_bias": False},
}
"""What their files cannot say, changed: llama.cpp has fewer kinds of layers, biases and groups."""
