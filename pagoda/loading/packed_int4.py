"""Read 4-bit weights as AutoAWQ and GPTQ store them, as codes, scales and minima.

Both keep int32 tensors of eight codes each, lowest bits first, and float16 scales [groups, out]. Values are
scale * (code - zero), with a zero per group and output feature.

    AWQ    qweight [in, out / 8], qzeros [groups, out / 8]; the codes of eight output features in the order _AWQ_ORDER
    GPTQ   qweight [in / 8, out], eight elements along `in` per word; qzeros [groups, out / 8], stored as zero - 1
"""

import torch

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.quantize import QuantizedWeight

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output feature, of eight, of each 4 bits of a word."""

_SYMMETRIC = 8  # the zero of codes that need no minima


def read_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """Return a weight [out, in] that AutoAWQ's GEMM format stores."""
    codes, zeros = (_unpack_columns(words)[:, _awq_columns(words.shape[1])] for words in (qweight, qzeros))
    return _coded(codes.T, zeros, scales)


def read_gptq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, g_idx: torch.Tensor | None = None
) -> QuantizedWeight:
    """Return a weight [out, in] that GPTQ stores.   g_idx: int [in], the group of each element along `in`.

    Raises ConfigError for groups in another order than that of the elements (desc_act).
    """
    codes = _unpack_columns(qweight.T.contiguous())  # [out, in]
    group = codes.shape[1] // scales.shape[0]
    if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(codes.shape[1]) // group):
        raise ConfigError("GPTQ weights whose groups are not in order (desc_act) are not supported")
    return _coded(codes, _unpack_columns(qzeros) + 1, scales)


def _unpack_columns(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] -> uint8 [n, 8 m], lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(1)


def _awq_columns(num_words: int) -> torch.Tensor:
    """Return where each output feature is among the unpacked codes."""
    inverse = torch.tensor(_AWQ_ORDER).argsort()
    return (8 * torch.arange(num_words).unsqueeze(1) + inverse).flatten()


def _coded(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """codes: uint8 [out, in].   zeros: uint8 [groups, out].   scales: [groups, out]."""
    group = codes.shape[1] // scales.shape[0]
    of_rows = scales.T.contiguous()
    minima = None if bool((zeros == _SYMMETRIC).all()) else -(of_rows.float() * zeros.T.float())
    return QuantizedWeight(codes.contiguous(), of_rows, minima, codes.shape[1], group, 4)
