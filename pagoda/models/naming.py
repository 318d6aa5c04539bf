"""Naming: the names of a model's parameters in a checkpoint, and how they are stored.

The tree's own paths are the names that transformers gives, so a safetensors checkpoint needs substitutions only where
it deviates. llama.cpp's names are a table.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pagoda.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """name: of a checkpoint's tensor.   index: in its first dimension, where several matrices are stacked."""

    name: str
    index: int | None = None

    def shape_of_vector(self, size: int) -> tuple[int, ...]:
        """Return the tensor's shape, if it is a vector of so many elements, or the only row of a matrix."""
        return (size,) if self.index is None else (1, size)


@dataclass(frozen=True, slots=True)
class Naming:
    """From a tree's paths to a checkpoint's tensors.

    names: paths (numbers as `*`) to names, None if they are equal. The first number of a path goes where the name has a
        `*`; a further one (an expert) counts the matrices stacked in the tensor. `.weight` and `.bias` are left out of
        both, except for a path that ends in another word.
    substitutions: regular expressions and replacements that turn paths into names, if there is no table. A number in
        brackets in what they make is the place of the matrix (an expert) in a tensor of stacked ones, [0] of a vector
        that is stored as a matrix of one row.
    interleaved_rotary: rows that the rotary embedding turns are stored in llama.cpp's order, pairs (0, D/2),
        (1, D/2 + 1), ... next to each other in each head.
    by_part: parts of one tensor are stored one after the other, also where they alternate in transformers' checkpoints.
    transposed: regular expression of the names of matrices that are stored [columns, rows].
    folded: norms that multiply by 1 + weight are stored with the 1 added, and -exp of a value as that is.
    rope_factors: the tensor that divides the rotary frequencies, if the checkpoint has it.
    """

    names: Mapping[str, str] | None = None
    substitutions: tuple[tuple[str, str], ...] = ()
    interleaved_rotary: bool = False
    by_part: bool = False
    transposed: str | None = None
    folded: bool = False
    rope_factors: str | None = None

    def is_transposed(self, name: str) -> bool:
        return self.transposed is not None and re.search(self.transposed, name) is not None

    def find(self, path: str) -> StoredTensor:
        """Return the tensor of a parameter's path; it may not exist."""
        if self.names is None:
            for pattern, replacement in self.substitutions:
                path = re.sub(pattern, replacement, path)
            stacked = re.fullmatch(r"(.*)\[(\d+)\](.*)", path)
            return StoredTensor(path) if stacked is None else StoredTensor(stacked[1] + stacked[3], int(stacked[2]))
        words, numbers = [], []
        for word in path.split("."):
            words.append("*" if word.isdigit() else word)
            if word.isdigit():
                numbers.append(int(word))
        *layer, suffix = words
        name = self.names.get(".".join(words))
        if name is None and ".".join(layer) in self.names:
            name = f"{self.names['.'.join(layer)]}.{suffix}"
        if name is None:
            raise ConfigError(f"checkpoints of this kind have no name for {path!r}")
        if numbers:
            name = name.replace("*", str(numbers[0]))
        return StoredTensor(name, numbers[1] if len(numbers) > 1 else None)


HF = Naming()
BARE = Naming(substitutions=((r"^model\.", ""),))
"""Of a checkpoint that was saved without its head, as embedding models are."""

MULTIMODAL = (
    HF,
    Naming(substitutions=((r"^model\.", "model.language_model."),)),
    Naming(substitutions=((r"^", "language_model."),)),
    BARE,
)
"""Of the text model of a checkpoint that may also have a vision tower."""

STACKED_EXPERTS = (
    (r"\.mlp\.experts\.(\d+)\.(?:gate|up)_proj\.weight$", r".mlp.experts.gate_up_proj[\1]"),
    (r"\.mlp\.experts\.(\d+)\.down_proj\.weight$", r".mlp.experts.down_proj[\1]"),
)
"""Substitutions for checkpoints that have the experts of a layer in two tensors."""

_GGUF_MODEL = {
    "model.embed_tokens": "token_embd",
    "model.embed_positions": "position_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.choice_bias": "exp_probs_b.bias",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
}


def gguf_naming(layer: Mapping[str, str] | None = None, interleaved_rotary: bool = False) -> Naming:
    """Return llama.cpp's names.   layer: the exceptions, by path within a layer."""
    layers = {**_GGUF_LAYER, **(layer or {})}
    names = _GGUF_MODEL | {f"model.layers.*.{path}": f"blk.*.{name}" for path, name in layers.items()}
    return Naming(
        names,
        interleaved_rotary=interleaved_rotary,
        by_part=True,
        folded=True,
        rope_factors="rope_freqs.weight",
    )


POST_NORM_GGUF = gguf_naming(
    {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
)
"""Of decoders whose norms are after attention and MLP."""
