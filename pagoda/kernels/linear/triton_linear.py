"""Linear layers in Triton: of quantised weights, and of floats for one row or where bits must not depend on the batch.

Every output element is summed along `in` in steps of one size, in order, within each of the parts that the sum is
divided into. With `batch_invariant`, tiles and parts follow from the weight's shape alone; a library's product chooses
them by the number of rows as well, and so does ours otherwise.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagoda.kernels.linear import library
from pagoda.kernels.linear.library import LibraryLinear
from pagoda.kernels.linear.triton_forms import TritonWeight, plain, step_size
from pagoda.kernels.linear.triton_product import product, scaled
from pagoda.kernels.linear.triton_vector import multiply_coded_vector, multiply_vector, takes_codes
from pagoda.kernels.triton_support import jit, jit_for_any, to_e4m3

_PROGRAMS = 512  # a decode step's products are divided until there are so many programs: about four for each processor
_LEAST_STEPS = 8  # of a part of a sum


@jit_for_any("rows", "steps", "steps_per_part")
def _linear(
    x, codes, scales, minima, bias, row_scales, out, rows, out_features, in_features,
    x_stride, code_stride, scale_stride, steps, steps_per_part,
    FORM: tl.constexpr, HAS_MINIMA: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [parts, rows, out] = x [rows, in] times a weight, and its bias."""
    part = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row, has_column = row < rows, column < out_features
    begin = tl.program_id(2) * steps_per_part
    acc = product(
        (codes + column * code_stride, scales + column, minima + column, has_column, scale_stride),
        (x + row * x_stride, has_row, in_features),
        begin, tl.minimum(begin + steps_per_part, steps), FORM, HAS_MINIMA, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    acc = scaled(acc, row_scales + row, has_row, scales + column, has_column, FORM)
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=has_column, other=0.0).to(tl.float32)[None, :]
    target = out + (part * rows + row[:, None]) * out_features + column[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@jit_for_any("num_parts")
def _add_parts(parts, bias, out, num_parts, size, out_features, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """out [size] = the sum of the parts [num_parts, size], first to last, and the bias."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    acc = tl.zeros([BLOCK], tl.float32)
    source = parts + at
    for _ in range(num_parts):
        acc += tl.load(source, mask=inside, other=0.0)
        source += size
    if HAS_BIAS:
        acc += tl.load(bias + at % out_features, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@jit
def _quantize_rows(x, codes, scales, size, x_stride, BLOCK: tl.constexpr):
    """codes [T, size], e4m3, and scales [T] of x: see quantize.quantize_vectors."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    wide = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), 0), 0.0)
    inverse = tl.where(largest > 0, tl.div_rn(448.0, largest), 0.0)  # `/` would not be rounded correctly
    # A maximum may ignore NaN; the scale must not.
    tl.store(scales + row, tl.div_rn(largest, 448.0) + tl.sum(wide * 0.0, 0))
    code = to_e4m3(tl.minimum(tl.maximum(wide * inverse, -448.0), 448.0))
    tl.store(codes + row * size + at, code, mask=inside)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows and output features of a program, and its warps."""

    rows: int
    columns: int
    warps: int


class TritonLinear:
    """`linear` and `logits` of the op table.

    batch_invariant: multiply floats too, and give a row the same bits in any batch.
    multiplies_fp8: the GPU multiplies 8-bit floats (from compute capability 8.9 on); others widen the weight's and do
    not round the input.
    """

    def __init__(self, batch_invariant: bool = False, multiplies_fp8: bool = True) -> None:
        self._batch_invariant = batch_invariant
        self._multiplies_fp8 = multiplies_fp8

    def linear(self, x: torch.Tensor, weight: LibraryLinear | TritonWeight) -> torch.Tensor:
        """See reference.linear. weight: not packed."""
        return self._run(x, weight, x.dtype)

    def logits(self, x: torch.Tensor, weight: LibraryLinear | TritonWeight) -> torch.Tensor:
        """See reference.logits. weight: not packed."""
        return self._run(x, weight, torch.float32)

    def _run(self, x: torch.Tensor, weight: LibraryLinear | TritonWeight, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(weight, LibraryLinear):
            if not self._batch_invariant:
                if x.shape[0] == 1:
                    return multiply_vector(x, weight, dtype)
                return library.linear(x, weight) if dtype == x.dtype else library.logits(x, weight)
            weight = plain(weight)
        x = x if x.stride(1) == 1 else x.contiguous()
        if not self._batch_invariant and takes_codes(x, weight):
            return multiply_coded_vector(x, weight, dtype)
        rows, out_features = x.shape[0], weight.out_features
        tile = self._tile(rows, weight, x.dtype)
        x, row_scales, form = rows_for(x, weight, self._multiplies_fp8)
        block_k = step_size(form, weight.group, x.dtype)
        steps = weight.num_steps(block_k)
        programs = triton.cdiv(out_features, tile.columns) * triton.cdiv(rows, tile.rows)
        parts = min(triton.cdiv(_PROGRAMS, programs), steps // _LEAST_STEPS)
        parts = 1 if self._batch_invariant or parts < 2 else parts
        per_part = triton.cdiv(steps, parts)
        parts = triton.cdiv(steps, per_part)
        out = torch.empty((rows, out_features), dtype=dtype, device=x.device)
        sums = out if parts == 1 else torch.empty((parts, rows, out_features), dtype=torch.float32, device=x.device)
        bias = x if weight.bias is None else weight.bias
        scales, minima = (x if of is None else of for of in (weight.scales, weight.minima))
        _linear[(triton.cdiv(out_features, tile.columns), triton.cdiv(rows, tile.rows), parts)](
            x, weight.codes, scales, minima, bias, row_scales, sums, rows, out_features, weight.in_features,
            x.stride(0), weight.codes.stride(0), out_features, steps, per_part,
            form, weight.minima is not None, weight.group, weight.bias is not None and parts == 1,
            tile.rows, tile.columns, block_k, num_warps=tile.warps, num_stages=_stages(tile, block_k, x),
        )  # fmt: skip
        if parts > 1:
            block = 512
            _add_parts[(triton.cdiv(out.numel(), block),)](
                sums, bias, out, parts, out.numel(), out_features, weight.bias is not None, block
            )
        return out

    def _tile(self, rows: int, weight: TritonWeight, dtype: torch.dtype) -> _Tile:
        """Return the tiles of a product: with batch_invariant, they follow from the weight alone."""
        if weight.form == "plain":
            # From 64 rows on, and only then, a Hopper GPU has its fast products: one size for all batches. Narrow
            # layers are cut into narrow tiles, so that a decode step still has work for most of the GPU.
            out_features = weight.out_features
            return _Tile(64, 32 if out_features <= 8192 else 64 if out_features <= 32768 else 128, 4)
        if dtype == torch.float32 and (self._batch_invariant or rows > 16):
            return _Tile(32, 64, 4)  # see step_size
        if self._batch_invariant:
            return _Tile(64, 64, 4)
        if rows > 64:
            return _Tile(128, 128, 8)
        return _Tile(16 if rows <= 16 else 32 if rows <= 32 else 64, 64, 4)


def _stages(tile: _Tile, block_k: int, x: torch.Tensor) -> int:
    """Return how many tiles are on their way at once, within the shared memory of the smallest GPUs."""
    if tile.columns < 128:
        return 4
    return 3 if tile.rows * block_k * x.element_size() <= 16 * 1024 else 2


def rows_for(x: torch.Tensor, weight: TritonWeight, multiplies_fp8: bool) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return (x as `product` takes it, the scales of its rows if it has any, the form of the product)."""
    if weight.form == "fp8" and multiplies_fp8:
        return *quantize_rows(x), "fp8 fp8"
    return x, x, weight.form


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See quantize.quantize_vectors; x [T, D] -> (uint8 [T, D], the bits of e4m3, float32 scales [T])."""
    rows, size = x.shape
    codes = torch.empty((rows, size), dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _quantize_rows[(rows,)](x, codes, scales, size, x.stride(0), block, num_warps=min(16, max(1, block // 512)))
    return codes, scales
