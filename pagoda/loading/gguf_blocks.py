"""Read the blocks of GGUF tensors: as codes and scales, for kernels that multiply codes, or as floats.

A tensor is a row of blocks: 32 or 256 values that share scales. Where the bits of a type are is in linear/forms.py; the
definition of a type is the gguf package, which also reads those that are not there. Pieces are small enough for the
processor's cache and the arithmetic is the package's float32 arithmetic, so values have its bits (the tests hold them
to it).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import TypeAlias

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from pagoda.kernels.linear.forms import BLOCK_TYPES, BlockType, Plane
from pagoda.kernels.linear.quantize import QuantizedWeight, scales_of, stack_codes

_FLOAT_PIECE = 1 << 18  # values made floats at a time: 1 MiB of float32
_CODE_PIECE = 1 << 22  # values taken as codes at a time

GGUFType: TypeAlias = GGMLQuantizationType

FLOATS: dict[GGUFType, torch.dtype] = {
    GGUFType.F32: torch.float32,
    GGUFType.F16: torch.float16,
    GGUFType.BF16: torch.bfloat16,
    GGUFType.F64: torch.float64,
}


def dequantize(data: memoryview, kind: GGUFType, out: torch.Tensor) -> None:
    """Fill `out` (contiguous, any float dtype) with the values of `data`: exact in float32, then rounded once.

    Raises NotImplementedError for a type that the gguf package cannot dequantise.
    """
    if kind in FLOATS:
        out.copy_(torch.frombuffer(data, dtype=torch.uint8).view(FLOATS[kind]).view(out.shape))
    elif (of := BLOCK_TYPES.get(kind.name)) is not None:
        step, flat = _FLOAT_PIECE // of.num_values, out.view(-1, of.num_values)
        for blocks, values in zip(_blocks(data, of).split(step), flat.split(step), strict=True):
            values.copy_(_read(of, blocks).dequantize())
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
    of = BLOCK_TYPES[kind.name]
    pieces = [_read(of, blocks) for blocks in _blocks(data, of).split(_CODE_PIECE // of.num_values)]
    weight = stack_codes(pieces).each(lambda part: part.view(rows, -1, *part.shape[2:]))
    if of.factors:
        assert weight.scales is not None
        offsets = None if weight.offsets is None else weight.offsets.half()
        weight = replace(weight, scales=weight.scales.half(), offsets=offsets)
    return replace(weight, in_features=columns)


def _blocks(data: memoryview, of: BlockType) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8).view(-1, of.num_bytes)


def _read(of: BlockType, blocks: torch.Tensor) -> QuantizedWeight:
    """Return uint8 [n, bytes of a block] as a weight [n, values of a block]; scales that are products in float32."""
    held, codes = of.held, _numbers(blocks, of.codes, of.num_values)
    codes = codes + of.added if of.added else codes
    assert of.scale is not None, "blocks of GGUF files have scales"
    if held.form.scale_bits == 8 and not held.form.sub_group:
        exponents = blocks[:, of.scale : of.scale + 1]
        return QuantizedWeight(held.form, codes, scales_of(exponents), None, of.num_values, held.group)
    scales, minima = _halves(blocks, of.scale), None if of.minimum is None else _halves(blocks, of.minimum)
    units = None
    if held.form.sub_group:
        units = (scales if minima is None else torch.cat((scales, -minima), dim=1)).unsqueeze(1)
        scales, minima = _integers(of, blocks)
    elif of.factors:
        groups = of.num_values // held.group
        factors = _numbers(blocks, of.factors, groups if minima is None else 2 * groups)
        scales = scales.float() * (factors[:, :groups].float() - of.factor_middle)
        minima = None if minima is None else -(minima.float() * factors[:, groups:])
    return QuantizedWeight(held.form, codes, scales, minima, of.num_values, held.group, units=units)


def _numbers(blocks: torch.Tensor, planes: Sequence[Plane], count: int) -> torch.Tensor:
    """Return the first `count` numbers of planes, uint8 [n, count]."""
    found: list[torch.Tensor] = []
    low = 0
    for plane in planes:
        bytes_ = blocks[:, plane.at : plane.at + count * plane.bits // 8]
        if plane.bits < 8:
            runs = bytes_.reshape(len(blocks), -1, 1, plane.run)
            mask = (1 << plane.bits) - 1
            bytes_ = torch.cat([(runs >> shift) & mask for shift in range(0, 8, plane.bits)], dim=2).flatten(1)
        found.append(bytes_ << low if low else bytes_)
        low += plane.bits
    return reduce(torch.bitwise_or, found)


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at a byte of each block: [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _integers(of: BlockType, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scales, and minima if there are any, of 16 or 32 values each: int8 of 8 bits, or uint8 of 6."""
    if of.minimum is None:
        return blocks[:, of.integers : of.integers + 16].contiguous().view(torch.int8), None
    low, middle, high = blocks[:, of.integers : of.integers + 12].split(4, dim=1)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    return scales, torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), dim=1)
