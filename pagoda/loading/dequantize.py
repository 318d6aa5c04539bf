"""Dequantise GGUF tensors into torch tensors: the gguf package is the definition, the common types are faster here.

A GGUF tensor is a row of blocks: 32 or 256 values that share scales. The fast versions walk over pieces small enough
for the processor's cache and do the same float32 arithmetic, so they give the same bits (the tests hold them to it).
"""

from collections.abc import Callable

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

_PIECE_VALUES = 1 << 18  # values dequantised at a time: 1 MiB of float32

Kind = GGMLQuantizationType


def dequantize(data: memoryview, kind: Kind, out: torch.Tensor) -> None:
    """Fill `out` (contiguous, any float dtype) with the values of `data`: exact in float32, then rounded once.

    Raises NotImplementedError for a type that the gguf package cannot dequantise.
    """
    if kind in _PLAIN:
        out.copy_(torch.frombuffer(data, dtype=torch.uint8).view(_PLAIN[kind]).view(out.shape))
    elif kind in _FAST:
        _by_pieces(torch.frombuffer(data, dtype=torch.uint8), kind, _FAST[kind], out)
    else:
        dequantize_reference(data, kind, out)


def dequantize_reference(data: memoryview, kind: Kind, out: torch.Tensor) -> None:
    """Do what `dequantize` does, with the gguf package."""
    values = quants.dequantize(np.frombuffer(data, np.uint8), kind)
    out.copy_(torch.from_numpy(np.array(values, np.float32)).view(out.shape))


def _by_pieces(
    raw: torch.Tensor, kind: Kind, decode: Callable[[torch.Tensor], torch.Tensor], out: torch.Tensor
) -> None:
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.view(-1, block_bytes)
    flat = out.view(-1, block_values)
    step = _PIECE_VALUES // block_values
    for first in range(0, len(blocks), step):
        flat[first : first + step] = decode(blocks[first : first + step]).view(-1, block_values)


def halves(blocks: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Read bytes first .. last - 1 of each block as float16: float32 [n, (last - first) / 2]."""
    return blocks[:, first:last].contiguous().view(torch.float16).float()


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, m] -> [n, 2 m], the low halves and then the high ones; four bytes at a time."""
    words = packed.contiguous().view(torch.int32)
    return torch.cat((words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F), dim=1).view(torch.uint8)


def fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 4], one bit per value -> uint8 [n, 32], 16 where it is set."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return nibbles(blocks[:, 2:]).float().sub_(8).mul_(halves(blocks, 0, 2))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    scale, least = halves(blocks, 0, 4).split(1, dim=1)
    return nibbles(blocks[:, 4:]).float().mul_(scale).add_(least)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    values = nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6])
    return values.float().sub_(16).mul_(halves(blocks, 0, 2))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    scale, least = halves(blocks, 0, 4).split(1, dim=1)
    values = nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])
    return values.float().mul_(scale).add_(least)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(halves(blocks, 0, 2))


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight 6-bit scales and minima of a K block: uint8 [n, 12] -> two uint8 [n, 8]."""
    low, middle, high = packed.split(4, dim=1)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), dim=1)
    return scales, minima


def k_factors(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and minimum of each 32 values: float32 [n, 8, 1]."""
    scale, least = halves(blocks, 0, 4).split(1, dim=1)
    scales, minima = _k_scales(blocks[:, 4:16])
    return (scale * scales).unsqueeze(-1), (least * minima).unsqueeze(-1)


def k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 128] -> [n, 8, 32]: of each 32 bytes the low halves and then the high ones."""
    rows = packed.reshape(-1, 4, 1, 32)
    return torch.cat((rows & 15, rows >> 4), dim=2).flatten(1, 2)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = k_factors(blocks)
    return k_nibbles(blocks[:, 16:]).float().mul_(scales).sub_(minima)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = k_factors(blocks)
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4
    return (k_nibbles(blocks[:, 48:]) | fifth).float().mul_(scales).sub_(minima)


def k_six_bits(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of Q6_K blocks: uint8 [n, 256]."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 2, 4, 32)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    return (low | high).view(-1, 256)


def k_six_bit_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Return the scale of each 16 values of Q6_K blocks: float32 [n, 16]."""
    return halves(blocks, 208, 210) * blocks[:, 192:208].view(torch.int8)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    codes, scales = k_six_bits(blocks), k_six_bit_scales(blocks)
    return codes.view(-1, 16, 16).float().sub_(32).mul_(scales.unsqueeze(-1))


_PLAIN: dict[Kind, torch.dtype] = {
    Kind.F32: torch.float32,
    Kind.F16: torch.float16,
    Kind.BF16: torch.bfloat16,
    Kind.F64: torch.float64,
}
_FAST: dict[Kind, Callable[[torch.Tensor], torch.Tensor]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}
