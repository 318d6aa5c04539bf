"""Read GGUF tensors as codes and scales, for kernels that multiply codes directly."""

from collections.abc import Callable
from dataclasses import replace

import torch
from gguf.constants import GGML_QUANT_SIZES

from pagoda.kernels.linear.forms import Q6, Q8
from pagoda.kernels.linear.quantize import QuantizedWeight, quantize
from pagoda.loading import dequantize
from pagoda.loading.dequantize import Kind
from pagoda.loading.gguf_file import form_of

_PIECE_VALUES = 1 << 22  # values decoded at a time

# codes [n, values], scales [n, groups] and minima or None, of n blocks or groups
_Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def read_codes(data: memoryview, kind: Kind, rows: int, columns: int) -> QuantizedWeight | None:
    """Return a weight [rows, columns] without dequantising it; None for a tensor of plain floats.

    Q4_0, Q4_1, Q5_0, Q8_0 and Q6_K lose nothing; Q4_K's scales and minima are rounded to float16 once. The other types
    have no form of their own: they become 8 bits in groups of 32, a step that is small compared with theirs.
    """
    form = form_of(kind)
    if form is None:
        return None
    if kind not in _DECODERS:
        values = torch.empty(rows, columns)
        dequantize.dequantize(data, kind, values)
        return quantize(values, Q8.gguf_group)
    decode = _DECODERS[kind]
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = torch.frombuffer(data, dtype=torch.uint8).view(-1, block_bytes)
    pieces = [decode(piece) for piece in blocks.split(_PIECE_VALUES // block_values)]
    codes = torch.cat([codes for codes, _, _ in pieces]).view(rows, columns)
    groups = columns // form.gguf_group
    scales = torch.cat([scales for _, scales, _ in pieces]).view(rows, groups)
    if form is not Q6:  # Q6_K's scales are products, which float16 does not hold
        scales = scales.half()
    minima = [least for _, _, least in pieces if least is not None]
    least = torch.cat(minima).half().view(rows, groups) if minima else None
    return QuantizedWeight(form, codes, scales, least, columns, form.gguf_group)


def stack_codes(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Stack parts row-wise; 8 bits in groups of 32 if they are of different kinds."""
    first = parts[0]
    if len({part.held_as for part in parts}) > 1:
        parts = [part if part.form is Q8 else quantize(part.dequantize(), Q8.gguf_group) for part in parts]
        first = parts[0]
    codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return replace(first, codes=codes, scales=scales, offsets=torch.cat(offsets) if offsets else None)


def _q4_0(blocks: torch.Tensor) -> _Groups:
    return dequantize.nibbles(blocks[:, 2:]), dequantize.halves(blocks, 0, 2), None


def _q4_1(blocks: torch.Tensor) -> _Groups:
    scale, least = dequantize.halves(blocks, 0, 4).split(1, dim=1)
    return dequantize.nibbles(blocks[:, 4:]), scale, least


def _q5_0(blocks: torch.Tensor) -> _Groups:
    values = dequantize.nibbles(blocks[:, 6:]) | dequantize.fifth_bits(blocks[:, 2:6])
    return values + (128 - 16), dequantize.halves(blocks, 0, 2), None


def _q8_0(blocks: torch.Tensor) -> _Groups:
    return blocks[:, 2:] ^ 128, dequantize.halves(blocks, 0, 2), None  # signed to excess 128


def _q4_k(blocks: torch.Tensor) -> _Groups:
    scales, minima = dequantize.k_factors(blocks)
    return dequantize.k_nibbles(blocks[:, 16:]), scales, -minima


def _q6_k(blocks: torch.Tensor) -> _Groups:
    return dequantize.k_six_bits(blocks), dequantize.k_six_bit_scales(blocks), None


_DECODERS: dict[Kind, Callable[[torch.Tensor], _Groups]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q6_K: _q6_k,
}
