#!/usr/bin/env python3
"""Write a checkpoint of a known shape with random weights: for measuring speed at sizes without a download.

usage: make_random_model.py SHAPE FOLDER [--seed 0] [--device cpu]

The folder is one as Hugging Face writes them: config.json, model.safetensors (bf16) and a tokenizer whose tokens are
bytes, so every engine loads it. Equal shapes, seeds and devices give equal weights. What it says means nothing; its
logits are finite and never equal, so greedy decoding is well defined.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

BOS, EOS = 256, 257  # after the bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's sizes, as config.json names them; with experts a Qwen3-MoE's, with qk_norm a Qwen3's."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    tie_word_embeddings: bool = True
    rope_scaling: dict[str, object] | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool | None = None
    qk_norm: bool = False

    @property
    def norms_heads(self) -> bool:
        return self.qk_norm or bool(self.num_experts)

    @property
    def kind(self) -> tuple[str, str]:
        """The model's class and type, as config.json names them."""
        if self.num_experts:
            return "Qwen3MoeForCausalLM", "qwen3_moe"
        return ("Qwen3ForCausalLM", "qwen3") if self.qk_norm else ("LlamaForCausalLM", "llama")


SHAPES: dict[str, Shape] = {
    "llama-3.2-1b": Shape(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama-3.1-8b": Shape(
        *(4096, 14336, 32, 32, 8, 128, 128256, 131072, 500000.0, False),
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151936, 40960, 1000000.0, qk_norm=True),
    "qwen3-30b-a3b": Shape(
        *(2048, 6144, 48, 32, 4, 128, 151936, 40960, 1000000.0, False),
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 64, 49152, 8192, 100000.0),
    # 1.0 billion parameters, of which a token uses 0.2
    "moe-1b": Shape(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=1000000.0,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=384,
        norm_topk_prob=True,
    ),
    "tiny-moe": Shape(
        *(192, 448, 2, 4, 2, 48, 320, 512, 10000.0, False),
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=80,
        norm_topk_prob=True,
    ),
    # a long context and a whole vocabulary, for next to no work
    "thin": Shape(256, 512, 2, 4, 2, 64, 128256, 131072, 500000.0),
    "tiny": Shape(64, 160, 2, 4, 2, 16, 320, 512, 10000.0),
}


def config_of(shape: Shape) -> dict[str, object]:
    sizes = {name: getattr(shape, name) for name in Shape.__dataclass_fields__ if name != "qk_norm"}
    kind = shape.kind
    return {
        "architectures": [kind[0]],
        "model_type": kind[1],
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        **{name: value for name, value in sizes.items() if value is not None},
    }


def weights_of(shape: Shape, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Normal weights scaled to keep the size of what passes through; the residual grows by one layer's share at a time.

    The order in which the tensors are drawn, and the device, are part of what a seed means.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device)
        return (values * (gain / columns**0.5)).bfloat16().cpu()

    hidden, inner, depth = shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers
    q_size = shape.num_attention_heads * shape.head_dim
    kv_size = shape.num_key_value_heads * shape.head_dim
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {"model.embed_tokens.weight": drawn(shape.vocab_size, hidden)}
    for layer in range(depth):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": ones.clone(),
            f"{prefix}post_attention_layernorm.weight": ones.clone(),
            f"{prefix}self_attn.q_proj.weight": drawn(q_size, hidden),
            f"{prefix}self_attn.k_proj.weight": drawn(kv_size, hidden),
            f"{prefix}self_attn.v_proj.weight": drawn(kv_size, hidden),
            f"{prefix}self_attn.o_proj.weight": drawn(hidden, q_size, depth**-0.5),
        }
        if shape.norms_heads:
            norm = torch.ones(shape.head_dim, dtype=torch.bfloat16)
            weights |= {f"{prefix}self_attn.{name}_norm.weight": norm.clone() for name in ("q", "k")}
        mlps = {f"{prefix}mlp.": inner}
        if shape.num_experts:
            assert shape.moe_intermediate_size is not None
            mlps = {
                f"{prefix}mlp.experts.{expert}.": shape.moe_intermediate_size for expert in range(shape.num_experts)
            }
            weights[f"{prefix}mlp.gate.weight"] = drawn(shape.num_experts, hidden)
        for mlp, width in mlps.items():
            weights |= {
                f"{mlp}gate_proj.weight": drawn(width, hidden),
                f"{mlp}up_proj.weight": drawn(width, hidden),
                f"{mlp}down_proj.weight": drawn(hidden, width, depth**-0.5),
            }
    weights["model.norm.weight"] = ones.clone()
    if not shape.tie_word_embeddings:
        weights["lm_head.weight"] = drawn(shape.vocab_size, hidden)
    return weights


def write_tokenizer(folder: Path) -> None:
    """A token per byte, and two special ones; the rest of the vocabulary has no text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2))


def make(shape: Shape, folder: Path, seed: int = 0, device: str = "cpu") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2))
    ending = {"bos_token_id": BOS, "eos_token_id": EOS}
    (folder / "generation_config.json").write_text(json.dumps(ending, indent=2))
    write_tokenizer(folder)
    save_file(weights_of(shape, seed, device), folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="draws the numbers; a GPU is faster")
    given = parser.parse_args()
    make(SHAPES[given.shape], given.folder, given.seed, given.device)


if __name__ == "__main__":
    main()
