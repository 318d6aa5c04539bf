"""A weight of floats times one row in Triton: what a decode step of one sequence does.

Torch's library has products of tiles. With one row it reads weights at a third to nine tenths of the memory's
bandwidth, and a weight of few output features at less.
"""

import torch
import triton
import triton.language as tl

from pagoda.kernels.linear.library import LibraryLinear
from pagoda.kernels.triton_support import jit

_BLOCK = 1024  # elements of a row of the weight that are read at once
_FEW = 4096  # output features, which two per program spread over more of a GPU than four


@jit
def _multiply_vector(
    x, weight, bias, out, out_features, in_features, weight_stride,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [out] = weight [out, in] times x [in], and the bias.   EVEN: blocks and columns leave no rest."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, BLOCK)
    has_column = column < out_features
    source = weight + column.to(tl.int64)[:, None] * weight_stride + at[None, :]
    acc = tl.zeros([COLUMNS, BLOCK], tl.float32)
    for begin in range(0, in_features, BLOCK):
        if EVEN:
            row = tl.load(x + begin + at)
            values = tl.load(source + begin)
        else:
            inside = begin + at < in_features
            row = tl.load(x + begin + at, mask=inside, other=0.0)
            values = tl.load(source + begin, mask=has_column[:, None] & inside[None, :], other=0.0)
        acc = tl.fma(values.to(tl.float32), tl.broadcast_to(row.to(tl.float32)[None, :], acc.shape), acc)
    total = tl.sum(acc, 1)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=has_column, other=0.0).to(tl.float32)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=has_column)


def multiply_vector(x: torch.Tensor, weight: LibraryLinear, dtype: torch.dtype) -> torch.Tensor:
    """[1, in] -> [1, out] = x @ weight.T + bias, summed in float32.   weight: not packed.   dtype: of the result."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out_features, in_features = weight.out_features, weight.in_features
    out = torch.empty((1, out_features), dtype=dtype, device=x.device)
    columns = 2 if out_features <= _FEW else 4
    bias = x if weight.bias is None else weight.bias
    is_even = in_features % _BLOCK == 0 and out_features % columns == 0
    _multiply_vector[(triton.cdiv(out_features, columns),)](
        x, weight.weight, bias, out, out_features, in_features, weight.weight.stride(0),
        weight.bias is not None, is_even, columns, _BLOCK, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
