"""MXFP4, in which GPT-OSS stores its experts: blocks of 32 floats of 4 bits that share a power of two."""

import torch

from pagoda.kernels.linear.forms import MXFP4
from pagoda.kernels.linear.quantize import QuantizedWeight, scales_of

BLOCK_VALUES = 32


def read_mxfp4(blocks: torch.Tensor, exponents: torch.Tensor) -> QuantizedWeight:
    """Return a weight [rows, 32 * n] of uint8 blocks [rows, n, 16] and uint8 exponents [rows, n].

    The low four bits of a byte come first; the highest of four is the sign.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    return QuantizedWeight(MXFP4, codes, scales_of(exponents), None, codes.shape[1], BLOCK_VALUES)
