"""Shapes of models with recurrent layers, and their tensors and settings as GGUF files have them."""

from collections.abc import Iterator
from dataclasses import dataclass

import gguf

MATRIX, ROUTER, ONES, DECAY, VALUES = "matrix", "router", "ones", "decay", "values"
"""What a tensor holds: a matrix that may be quantised, one that is not, norms, -exp(A_log), and others."""
Tensors = Iterator[tuple[str, tuple[int, ...], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """One model.

    arch: llama.cpp's name.   layers: a letter each: R recurrent, A attention, B both, F an MLP, E experts (alone).
    heads: of attention, those of keys and values, and the size of each.
    state: heads, the size of each, that of their keys, groups and taps of recurrent layers; LFM2 has taps alone.
    inner: of MLPs.   experts: how many, of which a token has so many, their size and that of the one that all have.
    """

    arch: str
    hidden: int
    layers: str
    vocab: int
    heads: tuple[int, int, int] = (0, 0, 0)
    state: tuple[int, int, int, int, int] = (0, 0, 0, 0, 3)
    inner: int = 0
    experts: tuple[int, int, int, int] | None = None
    tied: bool = True
    settings: tuple[tuple[str, float], ...] = ()

    @property
    def has_delta(self) -> bool:
        return self.arch.startswith("qwen3")

    @property
    def has_taps_alone(self) -> bool:
        return self.arch.startswith("lfm2")


_GRANITE = (("attention.scale", 0.0078125), ("embedding_scale", 12.0), ("residual_scale", 0.22), ("logit_scale", 8.0))
_TINY_GRANITE = (("attention.scale", 0.2), ("embedding_scale", 2.0), ("residual_scale", 0.5), ("logit_scale", 2.0))
_TINY: dict[str, int] = {"hidden": 256, "vocab": 131}
_HEADS, _STATE = (4, 2, 64), (16, 32, 16, 2, 4)
STATE_SHAPES: dict[str, StateShape] = {
    "mamba2-1.3b": StateShape(arch="mamba2", hidden=2048, layers="R" * 48, vocab=50288, state=(64, 64, 128, 1, 4)),
    "mamba2-2.7b": StateShape(arch="mamba2", hidden=2560, layers="R" * 64, vocab=50288, state=(80, 64, 128, 1, 4)),
    "granite-4-h-1b": StateShape(
        arch="granitehybrid", hidden=1536, layers="RRRRRARRRR" * 4, vocab=100352, heads=(12, 4, 128),
        state=(48, 64, 128, 1, 4), inner=4096, settings=_GRANITE,
    ),
    "granite-4-h-micro": StateShape(
        arch="granitehybrid", hidden=2048, layers="RRRRRARRRR" * 4, vocab=100352, heads=(32, 8, 64),
        state=(64, 64, 128, 1, 4), inner=8192, settings=_GRANITE,
    ),
    "falcon-h1-1.5b": StateShape(
        arch="falcon-h1", hidden=2048, layers="B" * 24, vocab=65536, heads=(8, 2, 128), state=(48, 64, 256, 1, 4),
        inner=4096, tied=False,
    ),
    "qwen3.5-2b": StateShape(
        arch="qwen35", hidden=2048, layers="RRRA" * 6, vocab=248320, heads=(8, 2, 256), state=(16, 128, 128, 16, 4),
        inner=6144,
    ),
    "qwen3.5-4b": StateShape(
        arch="qwen35", hidden=2560, layers="RRRA" * 8, vocab=248320, heads=(16, 4, 256), state=(32, 128, 128, 16, 4),
        inner=9216,
    ),
    "lfm2-1.2b": StateShape(
        arch="lfm2", hidden=2048, layers="RRARRARRARARARAR", vocab=65536, heads=(32, 8, 64), inner=8192,
    ),
    "lfm2-2.6b": StateShape(
        arch="lfm2", hidden=2048, layers="RRA" * 8 + "RRARRR", vocab=65536, heads=(32, 8, 64), inner=10752,
    ),
    # Those that are compared with llama.cpp number by number.
    "tiny-mamba2": StateShape(arch="mamba2", layers="RRR", state=_STATE, tied=False, **_TINY),
    "tiny-granite": StateShape(
        arch="granitehybrid", layers="RAR", heads=_HEADS, state=_STATE, inner=512, settings=_TINY_GRANITE, **_TINY
    ),
    "tiny-granite-moe": StateShape(
        arch="granitehybrid", layers="RAR", heads=_HEADS, state=_STATE, experts=(5, 2, 256, 512),
        settings=_TINY_GRANITE, **_TINY,
    ),
    "tiny-falcon-h1": StateShape(arch="falcon-h1", layers="BB", heads=_HEADS, state=_STATE, inner=512, **_TINY),
    "tiny-nemotron-h": StateShape(
        arch="nemotron_h", layers="RFAF", heads=_HEADS, state=_STATE, inner=512, tied=False, **_TINY
    ),
    "tiny-nemotron-h-moe": StateShape(
        arch="nemotron_h_moe", layers="REAE", heads=_HEADS, state=_STATE, experts=(6, 2, 256, 512), tied=False, **_TINY
    ),
    "tiny-qwen3-next": StateShape(
        arch="qwen3next", layers="RAR", heads=_HEADS, state=(8, 32, 32, 4, 4), experts=(5, 2, 256, 256), tied=False,
        **_TINY,
    ),
    "tiny-qwen3.5": StateShape(
        arch="qwen35", layers="RAR", heads=_HEADS, state=(8, 32, 32, 4, 4), inner=512, **_TINY
    ),
    "tiny-qwen3.5-moe": StateShape(
        arch="qwen35moe", layers="RAR", heads=_HEADS, state=(8, 32, 32, 4, 4), experts=(5, 2, 256, 256), **_TINY
    ),
    "tiny-lfm2": StateShape(arch="lfm2", layers="RARR", heads=_HEADS, inner=512, **_TINY),
    "tiny-lfm2-moe": StateShape(
        arch="lfm2moe", layers="RRA", heads=_HEADS, inner=512, experts=(6, 2, 256, 0), **_TINY
    ),
}  # fmt: skip


def state_tensors(shape: StateShape) -> Tensors:
    """Yield name, shape and kind of each tensor."""
    yield "token_embd.weight", (shape.vocab, shape.hidden), MATRIX
    for layer, letter in enumerate(shape.layers):
        for name, size, kind in _of_layer(shape, layer, letter):
            yield f"blk.{layer}.{name}", size, kind
    yield ("token_embd_norm" if shape.has_taps_alone else "output_norm") + ".weight", (shape.hidden,), ONES
    if not shape.tied:
        yield "output.weight", (shape.vocab, shape.hidden), MATRIX


def _of_layer(shape: StateShape, layer: int, letter: str) -> Tensors:
    hidden = shape.hidden
    yield "attn_norm.weight", (hidden,), ONES
    if letter in "RB":
        yield from _recurrent(shape)
    if letter in "AB":
        count, kv, size = shape.heads
        queries = count * size * (2 if shape.has_delta else 1)  # and gates
        yield "attn_q.weight", (queries, hidden), MATRIX
        yield "attn_k.weight", (kv * size, hidden), MATRIX
        yield "attn_v.weight", (kv * size, hidden), MATRIX
        yield "attn_output.weight", (hidden, count * size), MATRIX
        if shape.has_delta or shape.has_taps_alone:
            yield "attn_q_norm.weight", (size,), ONES
            yield "attn_k_norm.weight", (size,), ONES
    if shape.arch == "mamba2" or (shape.arch.startswith("nemotron") and letter in "RA"):
        return
    if letter in "RAB":
        name = "post_attention_norm" if shape.has_delta else "ffn_norm"
        yield name if shape.arch == "falcon-h1" else f"{name}.weight", (hidden,), ONES
    if shape.experts is None or letter == "F" or (shape.arch == "lfm2moe" and layer < 1):
        if letter != "F":
            yield "ffn_gate.weight", (shape.inner, hidden), MATRIX
        yield "ffn_up.weight", (shape.inner, hidden), MATRIX
        yield "ffn_down.weight", (hidden, shape.inner), MATRIX
        return
    count, _, inner, shared = shape.experts
    yield "ffn_gate_inp.weight", (count, hidden), ROUTER
    if shape.arch in ("lfm2moe", "nemotron_h_moe"):
        yield "exp_probs_b.bias", (count,), VALUES
    if letter != "E":
        yield "ffn_gate_exps.weight", (count, inner, hidden), MATRIX
    yield "ffn_up_exps.weight", (count, inner, hidden), MATRIX
    yield "ffn_down_exps.weight", (count, hidden, inner), MATRIX
    if shape.has_delta:
        yield "ffn_gate_inp_shexp.weight", (hidden,), VALUES
    if shared:
        if letter != "E":
            yield "ffn_gate_shexp.weight", (shared, hidden), MATRIX
        yield "ffn_up_shexp.weight", (shared, hidden), MATRIX
        yield "ffn_down_shexp.weight", (hidden, shared), MATRIX


def _recurrent(shape: StateShape) -> Tensors:
    hidden, (heads, size, keys, groups, taps) = shape.hidden, shape.state
    if shape.has_taps_alone:
        yield "shortconv.in_proj.weight", (3 * hidden, hidden), MATRIX
        yield "shortconv.conv.weight", (hidden, taps), VALUES
        yield "shortconv.out_proj.weight", (hidden, hidden), MATRIX
        return
    width, convolved = heads * size, heads * size + 2 * groups * keys
    yield "ssm_conv1d.weight", (convolved, taps), VALUES
    yield "ssm_dt.bias", (heads,), VALUES
    yield "ssm_a", (heads,) if shape.has_delta else (heads, 1), DECAY
    yield "ssm_out.weight", (hidden, width), MATRIX
    if shape.has_delta:
        yield "attn_qkv.weight", (convolved, hidden), MATRIX
        yield "attn_gate.weight", (width, hidden), MATRIX
        yield "ssm_norm.weight", (size,), ONES
        if shape.arch == "qwen3next":
            yield "ssm_ba.weight", (2 * heads, hidden), MATRIX
        else:
            yield "ssm_beta.weight", (heads, hidden), MATRIX
            yield "ssm_alpha.weight", (heads, hidden), MATRIX
        return
    yield "ssm_in.weight", (width + convolved + heads, hidden), MATRIX
    yield "ssm_conv1d.bias", (convolved,), VALUES
    yield "ssm_d", (heads, 1), VALUES
    yield "ssm_norm.weight", (groups, width // groups), ONES


def add_state_settings(writer: gguf.GGUFWriter, shape: StateShape) -> None:
    """Add what llama.cpp's converter writes."""
    count, kv, size = shape.heads
    is_recurrent = [letter in "RFE" for letter in shape.layers]
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(len(shape.layers))
    writer.add_vocab_size(shape.vocab)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_head_count(count)
    by_layer = shape.arch.startswith(("granite", "nemotron", "lfm2"))
    if count:
        writer.add_head_count_kv([0 if recurs else kv for recurs in is_recurrent] if by_layer else kv)
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_rope_freq_base(10_000.0)
    inner = shape.inner or (shape.experts[2] if shape.experts else 0)
    if shape.arch.startswith("nemotron"):
        writer.add_feed_forward_length([inner if letter in "FE" else 0 for letter in shape.layers])
        writer.add_layer_norm_eps(1e-5)
        writer.add_rope_scaling_finetuned(value=False)
        writer.add_rope_dimension_count(size)
    else:
        writer.add_feed_forward_length(inner)
    if shape.arch == "granitehybrid":
        writer.add_rope_dimension_count(size)
        writer.add_rope_scaling_finetuned(value=False)
    for key, value in shape.settings:
        writer.add_float32(f"{shape.arch}.{key}", value)
    if shape.experts is not None:
        num_experts, used, inner, shared = shape.experts
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(used)
        if shape.arch != "granitehybrid":
            writer.add_expert_feed_forward_length(inner)
        if shared:
            writer.add_expert_shared_feed_forward_length(shared)
        if shape.arch == "lfm2moe":
            writer.add_leading_dense_block_count(1)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if shape.arch == "nemotron_h_moe":
            writer.add_expert_shared_count(1)
            writer.add_expert_weights_norm(value=True)
            writer.add_expert_weights_scale(2.5)
            writer.add_expert_group_count(1)
    heads, width, keys, groups, taps = shape.state
    if shape.has_taps_alone:
        writer.add_shortconv_l_cache(taps)
        return
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_inner_size(heads * width)
    writer.add_ssm_state_size(keys)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)
    if shape.has_delta:
        writer.add_rope_dimension_count(size // 4)
        writer.add_full_attention_interval(4)
        writer.add_array(f"{shape.arch}.attention.recurrent_layers", is_recurrent)
        if shape.arch != "qwen3next":
            writer.add_rope_dimension_sections([11, 11, 10, 0])
