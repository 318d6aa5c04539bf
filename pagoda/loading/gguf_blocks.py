"""Read the blocks of GGUF tensors: as codes and scales, for kernels that multiply codes, or as floats.

A tensor is a row of blocks: 32 or 256 values that share scales. A function here per type takes the blocks apart; the
definition of a type is the gguf package, which also reads those that have no function here. Pieces are small enough for
the processor's cache and the arithmetic is the package's float32 arithmetic, so values have its bits (the tests hold
them to it).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pagoda.kernels.linear.forms import GGUF_TYPES, IQ4, MXFP4, Offset
from pagoda.kernels.linear.quantize import QuantizedWeight, scales_of

_FLOAT_PIECE = 1 << 18  # values made floats at a time: 1 MiB of float32
_CODE_PIECE = 1 << 22  # values taken as codes at a time

GGUFType: TypeAlias = GGMLQuantizationType


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """n blocks of m values in g groups: scale * (code - zero), scale * level, or with minima scale * code + minimum.

    codes: uint8 [n, m].   scales, minima: [n, g].   zero: of all codes.   levels: by code.
    units: float32 [n, 1], or with minima 2: what scales and minima are multiplied with, where those are integers.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None
    zero: int = 0
    levels: tuple[int, ...] = ()
    units: torch.Tensor | None = None

    def factors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scales and minima, multiplied with what they count."""
        if self.units is None:
            return self.scales, self.minima
        return self.scales * self.units[:, :1], None if self.minima is None else self.minima * self.units[:, 1:]

    def values(self) -> torch.Tensor:
        """float32 [n, m]."""
        scales, minima = self.factors()
        values = torch.tensor(self.levels).float()[self.codes.int()] if self.levels else self.codes.float()
        values = values.unflatten(1, (scales.shape[1], -1))
        if self.zero:
            values.sub_(self.zero)
        values.mul_(scales.unsqueeze(-1))
        if minima is not None:
            values.add_(minima.unsqueeze(-1))
        return values.flatten(1)


def dequantize(data: memoryview, kind: GGUFType, out: torch.Tensor) -> None:
    """Fill `out` (contiguous, any float dtype) with the values of `data`: exact in float32, then rounded once.

    Raises NotImplementedError for a type that the gguf package cannot dequantise.
    """
    if kind in FLOATS:
        out.copy_(torch.frombuffer(data, dtype=torch.uint8).view(FLOATS[kind]).view(out.shape))
    elif kind in _READERS:
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        blocks, flat = torch.frombuffer(data, dtype=torch.uint8).view(-1, block_bytes), out.view(-1, block_values)
        step = _FLOAT_PIECE // block_values
        for first in range(0, len(blocks), step):
            flat[first : first + step] = _READERS[kind](blocks[first : first + step]).values()
    else:
        dequantize_reference(data, kind, out)


def dequantize_reference(data: memoryview, kind: GGUFType, out: torch.Tensor) -> None:
    """Do what `dequantize` does, with the gguf package."""
    values = quants.dequantize(np.frombuffer(data, np.uint8), kind)
    out.copy_(torch.from_numpy(np.array(values, np.float32)).view(out.shape))


def read_codes(data: memoryview, kind: GGUFType, rows: int, columns: int) -> QuantizedWeight:
    """Return a weight [rows, columns] of a type in GGUF_TYPES without dequantising it: the definition of its codes.

    Nothing is lost, but scales and minima that are products are rounded to float16 once.
    """
    held = GGUF_TYPES[kind.name]
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    pieces = torch.frombuffer(data, dtype=torch.uint8).view(-1, block_bytes).split(_CODE_PIECE // block_values)
    found = [_READERS[kind](piece) for piece in pieces]
    codes = torch.cat([blocks.codes for blocks in found]).view(rows, columns)
    if held.form.offset is Offset.MIDDLE and not held.form.levels:
        codes += held.form.middle - found[0].zero
    factors = [(blocks.scales, blocks.minima) if held.form.sub_group else blocks.factors() for blocks in found]
    scales = torch.cat([of for of, _ in factors]).view(rows, -1)
    minima = [of for _, of in factors if of is not None]
    offsets = torch.cat(minima).view(rows, -1) if minima else None
    if held.form.sub_group:
        units = torch.cat([blocks.units for blocks in found if blocks.units is not None]).half()
        units = units.view(rows, columns // held.group, -1)
        return QuantizedWeight(held.form, codes, scales, offsets, columns, held.group, units=units)
    scales = scales.half() if held.form.scale_bits == 16 else scales
    offsets = None if offsets is None else offsets.half()
    return QuantizedWeight(held.form, codes, scales, offsets, columns, held.group)


def _halves(blocks: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Read bytes first .. last - 1 of each block as float16: float32 [n, (last - first) / 2]."""
    return blocks[:, first:last].contiguous().view(torch.float16).float()


def _scale_and_minimum(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Read two float16 in front of each block: float32 [n, 1] each."""
    scale, minimum = _halves(blocks, 0, 4).split(1, dim=1)
    return scale, minimum


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, m] -> [n, 2 m], the low halves and then the high ones; four bytes at a time."""
    words = packed.contiguous().view(torch.int32)
    return torch.cat((words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F), dim=1).view(torch.uint8)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 4], one bit per value -> uint8 [n, 32], 16 where it is set."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1) << 4


def _k_blocks(blocks: torch.Tensor, codes: torch.Tensor) -> _Blocks:
    """Return K blocks of these codes, with a scale and a minimum, of 6 bits each, per 32 values."""
    low, middle, high = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), dim=1)
    units = _halves(blocks, 0, 4) * torch.tensor((1.0, -1.0))  # what minima count is taken off
    return _Blocks(codes, scales, minima, units=units)


def _k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 128] -> [n, 8, 32]: of each 32 bytes the low halves and then the high ones."""
    rows = packed.reshape(-1, 4, 1, 32)
    return torch.cat((rows & 15, rows >> 4), dim=2).flatten(1, 2)


def _q4_0(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 2:]), _halves(blocks, 0, 2), zero=8)


def _q4_1(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 4:]), *_scale_and_minimum(blocks))


def _q5_0(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _halves(blocks, 0, 2), zero=16)


def _q5_1(blocks: torch.Tensor) -> _Blocks:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _Blocks(codes, *_scale_and_minimum(blocks))


def _q8_0(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(blocks[:, 2:] ^ 128, _halves(blocks, 0, 2), zero=128)  # signed to excess 128


def _q4_k(blocks: torch.Tensor) -> _Blocks:
    return _k_blocks(blocks, _k_nibbles(blocks[:, 16:]).flatten(1))


def _q5_k(blocks: torch.Tensor) -> _Blocks:
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4
    return _k_blocks(blocks, (_k_nibbles(blocks[:, 48:]) | fifth).flatten(1))


def _q6_k(blocks: torch.Tensor) -> _Blocks:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 2, 4, 32)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    scales, unit = blocks[:, 192:208].contiguous().view(torch.int8), _halves(blocks, 208, 210)
    return _Blocks((low | high).view(-1, 256), scales, zero=32, units=unit)


def _k_pairs(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 64], two bits per value -> [n, 2, 4, 32]."""
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8).view(1, 1, 4, 1)
    return (packed.reshape(-1, 2, 1, 32) >> shifts) & 3


def _q2_k(blocks: torch.Tensor) -> _Blocks:
    scale, least = _halves(blocks, 80, 84).split(1, dim=1)
    minima = -(least * (blocks[:, :16] >> 4))
    return _Blocks(_k_pairs(blocks[:, 16:80]).flatten(1), scale * (blocks[:, :16] & 15), minima)


def _q3_k(blocks: torch.Tensor) -> _Blocks:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    low = torch.cat((low & 15, low >> 4), dim=1)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    scales = (low | high << 4).to(torch.int8) - 32
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    third = ((blocks[:, :32].unsqueeze(1) >> shifts) & 1) << 2
    return _Blocks(_k_pairs(blocks[:, 32:96]).flatten(1) | third.flatten(1), _halves(blocks, 108, 110) * scales, zero=4)


def _iq4_nl(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 2:]), _halves(blocks, 0, 2), levels=IQ4.levels)


def _iq4_xs(blocks: torch.Tensor) -> _Blocks:
    shifts = torch.tensor((0, 4), dtype=torch.uint8)
    low = ((blocks[:, 4:8].unsqueeze(-1) >> shifts) & 15).flatten(1)
    high = blocks[:, 2:4].contiguous().view(torch.int16).int()
    high = (high >> torch.arange(0, 16, 2, dtype=torch.int32)) & 3
    scales = _halves(blocks, 0, 2) * ((low | high << 4) - 32)
    return _Blocks(_nibbles(blocks[:, 8:].reshape(-1, 16)).view(-1, 256), scales, levels=IQ4.levels)


def _mxfp4(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 1:]), scales_of(blocks[:, :1]), levels=MXFP4.levels)


FLOATS: dict[GGUFType, torch.dtype] = {
    GGUFType.F32: torch.float32,
    GGUFType.F16: torch.float16,
    GGUFType.BF16: torch.bfloat16,
    GGUFType.F64: torch.float64,
}
_READERS: dict[GGUFType, Callable[[torch.Tensor], _Blocks]] = {
    GGUFType.Q4_0: _q4_0,
    GGUFType.Q4_1: _q4_1,
    GGUFType.Q5_0: _q5_0,
    GGUFType.Q5_1: _q5_1,
    GGUFType.Q8_0: _q8_0,
    GGUFType.Q4_K: _q4_k,
    GGUFType.Q5_K: _q5_k,
    GGUFType.Q6_K: _q6_k,
    GGUFType.Q2_K: _q2_k,
    GGUFType.Q3_K: _q3_k,
    GGUFType.IQ4_NL: _iq4_nl,
    GGUFType.IQ4_XS: _iq4_xs,
    GGUFType.MXFP4: _mxfp4,
}
