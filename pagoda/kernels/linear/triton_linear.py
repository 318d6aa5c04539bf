"""Linear layers in Triton, for results that do not depend on the batch: tiles follow from the weight's shape alone.

Every output element is summed along `in` in steps of one size, in order, whatever the number of rows. A library's
product chooses its tiles, and how it divides the sum, by the number of rows as well.
"""

import torch
import triton
import triton.language as tl

from pagoda.kernels.linear.library import LibraryLinear
from pagoda.kernels.triton_jit import jit

_BLOCK_M = 64  # from 64 rows on, and only then, a Hopper GPU has its fast products: one size for all batches


@jit
def _linear(
    x, weight, bias, out, rows, out_features, in_features, x_stride, weight_stride,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row, has_column = row < rows, column < out_features
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        inside = at < in_features
        a = tl.load(x + row[:, None] * x_stride + at[None, :], mask=has_row[:, None] & inside[None, :], other=0.0)
        panel = weight + column[:, None] * weight_stride
        b = tl.load(panel + at[None, :], mask=has_column[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=has_column, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None] * out_features + column[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


def linear(x: torch.Tensor, weight: LibraryLinear) -> torch.Tensor:
    """See reference.linear. weight: not packed."""
    return _run(x, weight, x.dtype)


def logits(x: torch.Tensor, weight: LibraryLinear) -> torch.Tensor:
    """See reference.logits. weight: not packed."""
    return _run(x, weight, torch.float32)


def _run(x: torch.Tensor, weight: LibraryLinear, dtype: torch.dtype) -> torch.Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, out_features = x.shape[0], weight.out_features
    out = torch.empty((rows, out_features), dtype=dtype, device=x.device)
    # Narrow layers are cut into narrow tiles, so that a decode step still has work for most of the GPU.
    block_n = 32 if out_features <= 8192 else 64 if out_features <= 32768 else 128
    block_k = 32 if x.dtype == torch.float32 else 64
    bias = weight.weight if weight.bias is None else weight.bias
    _linear[(triton.cdiv(out_features, block_n), triton.cdiv(rows, _BLOCK_M))](
        x, weight.weight, bias, out, rows, out_features, weight.in_features, x.stride(0), weight.weight.stride(0),
        weight.bias is not None, _BLOCK_M, block_n, block_k, num_warps=4, num_stages=4 if block_n < 128 else 3,
    )  # fmt: skip
    return out
