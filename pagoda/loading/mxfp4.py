"""MXFP4, in which GPT-OSS stores its experts: blocks of 32 floats of 4 bits that share a power of two."""

import torch

BLOCK_VALUES = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 [rows, 32 * n] of uint8 blocks [rows, n, 16] and uint8 exponents [rows, n].

    The low four bits of a byte come first; the highest of four is the sign.
    """
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)
    return torch.ldexp(table[pairs.int()], scales.int().unsqueeze(-1) - _BIAS).flatten(1)
