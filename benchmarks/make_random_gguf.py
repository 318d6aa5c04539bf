#!/usr/bin/env python3
"""Write a GGUF file of a known shape with random blocks: for measuring loading and speed at sizes without a download.

usage: make_random_gguf.py SHAPE KIND FILE.gguf [--seed 0]

SHAPE: a Llama of make_random_model.py (llama-3.2-1b, llama-3.1-8b, tiny, ...), or a model with recurrent layers of
state_gguf.py (granite-4-h-1b, qwen3.5-4b, lfm2-1.2b, ...).   KIND: Q4_K_M (Q4_K with the Q6_K that llama.cpp gives this
name), Q8_0, Q6_K, Q5_K, Q4_0, Q4_1, IQ4_NL, MXFP4, BF16, F16 or F32.

Blocks have random codes and scales that are small enough for finite logits; pagoda and llama.cpp load the file. The
tokenizer is byte-level BPE with as many tokens and merges as a Llama's of that vocabulary. Equal arguments give equal
files. A tensor at a time is in memory.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from make_random_model import SHAPES, Shape
from state_gguf import DECAY, MATRIX, ONES, ROUTER, STATE_SHAPES, StateShape, add_state_settings, state_tensors

from pagoda.engine.tokenizers.token_length import BYTE_LETTERS

KINDS = ("Q4_K_M", "Q8_0", "Q6_K", "Q5_K", "Q4_0", "Q4_1", "IQ4_NL", "MXFP4", "BF16", "F16")
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_LONGEST = 12  # letters of a token
_PIECE = 1 << 15  # blocks made at a time


def types_of(kind: str) -> tuple[GGMLQuantizationType, GGMLQuantizationType]:
    """Return the type of most matrices, and of those that have more bits."""
    if kind == "Q4_K_M":
        return GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
    return GGMLQuantizationType[kind], GGMLQuantizationType[kind]


def has_more_bits(layer: int, layers: int) -> bool:
    """Return whether a layer's values and last matrix have: the first and last eighth have, and a third of the rest."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def tensors(shape: Shape, kind: str) -> Iterator[tuple[str, tuple[int, ...], GGMLQuantizationType]]:
    """Yield name, shape and type of each tensor, in the order of llama.cpp's files."""
    hidden, inner, layers = shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers
    heads, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    usual, head = types_of(kind)
    yield "token_embd.weight", (shape.vocab_size, hidden), head if shape.tie_word_embeddings else usual
    for layer in range(layers):
        finer = head if has_more_bits(layer, layers) else usual
        for name, size, of in (
            ("attn_q", (heads, hidden), usual),
            ("attn_k", (kv, hidden), usual),
            ("attn_v", (kv, hidden), finer),
            ("attn_output", (hidden, heads), usual),
            ("ffn_gate", (inner, hidden), usual),
            ("ffn_up", (inner, hidden), usual),
            ("ffn_down", (hidden, inner), finer),
            ("attn_norm", (hidden,), GGMLQuantizationType.F32),
            ("ffn_norm", (hidden,), GGMLQuantizationType.F32),
        ):
            yield f"blk.{layer}.{name}.weight", size, of
    yield "output_norm.weight", (hidden,), GGMLQuantizationType.F32
    if not shape.tie_word_embeddings:
        yield "output.weight", (shape.vocab_size, hidden), head


_FINER = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight", "output.weight")


def tensors_of_states(shape: StateShape, kind: str) -> Iterator[tuple[str, tuple[int, ...], GGMLQuantizationType, str]]:
    """Yield name, shape, type and kind of value of each tensor of a model with recurrent layers."""
    usual, finer = types_of(kind)
    for name, size, values in state_tensors(shape):
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        has_more = name.endswith(_FINER) and has_more_bits(layer, len(shape.layers))
        has_more |= name == "token_embd.weight" and shape.tied
        of = finer if has_more else usual
        yield name, size, of if values == MATRIX else GGMLQuantizationType.F32, values


def floats(size: tuple[int, ...], values: str, generator: np.random.Generator) -> np.ndarray:
    """Return random float32 of the kinds of state_gguf.py."""
    drawn = generator.standard_normal(size, np.float32)
    if values in (MATRIX, ROUTER):
        return drawn * np.float32(size[-1] ** -0.5)
    if values == DECAY:
        return -np.exp(0.5 * drawn)
    return 1 + 0.2 * drawn if values == ONES else 0.3 * drawn


def blocks(count: int, kind: GGMLQuantizationType, spread: float, generator: np.random.Generator) -> np.ndarray:
    """Return random blocks whose values have about the standard deviation `spread` and mean 0: uint8 [count, bytes]."""
    size = GGML_QUANT_SIZES[kind][1]
    found = np.frombuffer(generator.bytes(count * size), np.uint8).reshape(count, size).copy()

    def put(at: int, value: float) -> None:
        found[:, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)

    match kind.name:
        case "Q4_0":  # codes 0 .. 15 less 8
            put(0, spread / 4.6)
        case "Q4_1":
            put(0, spread / 4.6)
            put(2, -7.5 * spread / 4.6)
        case "IQ4_NL":  # levels -127 .. 113, of which the mean is -2.7
            put(0, spread / 70)
        case "MXFP4":  # an exponent, and levels that are twice -6 .. 6
            found[:, 0] = 127 + round(np.log2(spread / 2.9))
        case "Q8_0":
            put(0, spread / 74)
        case "Q4_K":  # scales and minima of 0 .. 63 for each 32 codes
            put(0, spread / 210)
            put(2, 7.5 * spread / 210)
        case "Q5_K":
            put(0, spread / 420)
            put(2, 15.5 * spread / 420)
        case "Q6_K":  # codes 0 .. 63 less 32, a scale of int8 for each 16
            found[:, 192:208] = 8 + (found[:, 192:208] & 15)
            put(208, spread / 300)
        case "BF16":
            words = found.view(np.uint16)
            words &= 0x80FF  # sign, one bit of the exponent, mantissa: |value| within a factor of 4
            words |= np.uint16((127 + int(np.floor(np.log2(spread))) >> 1 << 1) << 7)
        case "F16":
            words = found.view(np.uint16)
            words &= 0x87FF
            words |= np.uint16((15 + int(np.floor(np.log2(spread))) >> 1 << 1) << 10)
        case name:
            raise ValueError(f"no random blocks of {name}")
    return found


def vocabulary(size: int, generator: np.random.Generator) -> tuple[list[str], list[str], int]:
    """Return tokens, merges, and how many tokens at the end are special."""
    special = [*SPECIAL, *(f"<|reserved_{index}|>" for index in range(max(0, min(256, size // 64) - len(SPECIAL))))]
    tokens, known = list(BYTE_LETTERS), dict.fromkeys(BYTE_LETTERS)
    while len(tokens) < size - len(special):
        # Parts are small numbers more often than large ones, as in a vocabulary that was learned.
        left, right = (tokens[int(len(tokens) * draw**3)] for draw in generator.random(2))
        if len(left) + len(right) <= _LONGEST and left + right not in known:
            known[left + right] = None
            tokens.append(left + right)
    merges: list[str] = []
    for token in tokens[len(BYTE_LETTERS) :]:
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges += [f"{left} {right}" for left, right in cuts if left in known and right in known]
    return [*tokens, *special], merges, len(special)


def write(path: Path, shape: Shape | StateShape, kind: str, seed: int = 0) -> None:
    """Write the file."""
    generator = np.random.default_rng(seed)
    if isinstance(shape, StateShape):
        writer, vocab_size = gguf.GGUFWriter(path, shape.arch), shape.vocab
        add_state_settings(writer, shape)
        listed = list(tensors_of_states(shape, kind))
    else:
        writer, vocab_size = gguf.GGUFWriter(path, "llama"), shape.vocab_size
        add_settings(writer, shape)
        listed = [(*tensor, ONES) for tensor in tensors(shape, kind)]
    writer.add_name(f"random {kind}")
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"] if f"MOSTLY_{kind}" in LlamaFileType.__members__ else 1)
    add_tokenizer(writer, vocab_size, generator)
    for name, size, of, _ in listed:
        block, block_bytes = GGML_QUANT_SIZES[of]
        rows = int(np.prod(size[:-1]))
        if of == GGMLQuantizationType.F32:
            writer.add_tensor_info(name, size, np.dtype(np.float32), 4 * rows * size[-1])
            continue
        if size[-1] % block:
            raise SystemExit(f"{name}: rows of {size[-1]} do not divide into {of.name} blocks of {block}")
        row_bytes = size[-1] // block * block_bytes
        writer.add_tensor_info(name, (*size[:-1], row_bytes), np.dtype(np.uint8), rows * row_bytes, of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, size, of, values in listed:
        if of == GGMLQuantizationType.F32:
            is_llama = not isinstance(shape, StateShape)
            writer.write_tensor_data(np.ones(size, np.float32) if is_llama else floats(size, values, generator))
            continue
        count = int(np.prod(size)) // GGML_QUANT_SIZES[of][0]
        spread = size[-1] ** -0.5
        step = _PIECE * 256 // GGML_QUANT_SIZES[of][0]
        made = [blocks(min(step, count - at), of, spread, generator) for at in range(0, count, step)]
        writer.write_tensor_data(np.concatenate(made))
    writer.close()


def add_settings(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Add those of a Llama."""
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_vocab_size(shape.vocab_size)


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int, generator: np.random.Generator) -> None:
    """Add tokens and merges; of a vocabulary that has no room for all bytes, that there are none."""
    if vocab_size < 2 * len(BYTE_LETTERS):
        writer.add_tokenizer_model("no_vocab")
        return
    tokens, merges, num_special = vocabulary(vocab_size, generator)
    first_special = len(tokens) - num_special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * first_special + [3] * num_special)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(first_special)
    writer.add_eos_token_id(first_special + SPECIAL.index("<|eot_id|>"))
    writer.add_chat_template(TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = {name: shape for name, shape in SHAPES.items() if shape.kind[1] == "llama"} | STATE_SHAPES
    parser.add_argument("shape", choices=shapes)
    parser.add_argument("kind", choices=(*KINDS, "F32"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.file, shapes[given.shape], given.kind, given.seed)
    print(f"{given.file}: {given.file.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
