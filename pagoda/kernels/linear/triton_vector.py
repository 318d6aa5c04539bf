"""A weight times one row, or codes times a few, in Triton: what a decode step of few sequences does.

Torch's library has products of tiles. With one row it reads weights at a third to nine tenths of the memory's
bandwidth, and a weight of few output features at less. Ours of codes (triton_product) take more instructions for a code
than fit in the time that it takes to read it; here there are about three.
"""

from math import gcd

import torch
import triton
import triton.language as tl

from pagoda.kernels.linear.library import LibraryLinear
from pagoda.kernels.linear.triton_forms import TritonWeight
from pagoda.kernels.triton_support import jit

_BLOCK = 1024  # elements of a row of the weight that are read at once
_FEW = 4096  # output features, which smaller programs, or of more threads, spread over more of a GPU

_MOST_ROWS = 2  # with codes: of more, the products of tiles are as fast
_COLUMNS = 8  # output features of a program, with codes
_STAGES = 3


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


@jit
def _element(four, AT: tl.constexpr, dtype: tl.constexpr):
    """Return element AT of four elements of 16 bits, which are an int64, as float32."""
    return (four >> (16 * AT)).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@jit
def _code(words, mask, AT: tl.constexpr, TARGET: tl.constexpr):
    """Return 2^(23 - TARGET) and the code at bit AT of words, as float32: bits from TARGET on of such a number.

    mask: the bits of a code, from bit 16 on.
    """
    moved = words << (TARGET - AT) if TARGET > AT else words >> (AT - TARGET)
    return (moved & (mask >> (16 - TARGET)) | (150 - TARGET) << 23).to(tl.float32, bitcast=True)


@jit
def _load_group(
    x, scales, minima, group, byte, word, in_features, scale_stride, HAS_MINIMA: tl.constexpr, GROUP: tl.constexpr
):
    """Return (elements of x for pairs of words that begin `byte` codes after their group, its scales and minima)."""
    at = (group * GROUP + byte)[None, None, :, None] // 4 + word
    four = tl.load(x + at, mask=at * 4 < in_features, other=0)
    scale = tl.load(scales + (group * scale_stride)[None, :])
    return four, scale, tl.load(minima + (group * scale_stride)[None, :]) if HAS_MINIMA else scale


@jit
def _add_group(
    acc, words, group, mask, dtype: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, HAS_MINIMA: tl.constexpr
):
    """Add the products of the codes in a half of each byte, or of its one code.   group: what _load_group returns."""
    four, scale, minimum = group
    sum_x = _element(four, 0, dtype)
    for byte in tl.static_range(1, 4):  # type: ignore[misc]
        sum_x += _element(four, byte, dtype)
    # Of 4 bits, two codes of a word are moved at once, by whole bytes.
    target = 15 if BITS == 8 else 16 - BITS * HALF
    offset = (1 << (23 - target)) + (0 if HAS_MINIMA else 1 << (BITS - 1))  # type: ignore[operator]
    total = tl.broadcast_to(sum_x * -offset, (acc.shape[0], acc.shape[1], acc.shape[2], 2))
    for byte in tl.static_range(4):  # type: ignore[misc]
        code = tl.broadcast_to(_code(words, mask, 8 * byte + BITS * HALF, target), total.shape)
        total = tl.fma(code, tl.broadcast_to(_element(four, byte, dtype), total.shape), total)
    total = tl.sum(total, 3)
    if HAS_MINIMA:
        wide = tl.broadcast_to(minimum.to(tl.float32)[None, :, :], acc.shape)
        sums = tl.broadcast_to(tl.sum(sum_x, 3), acc.shape)
        if minimum.dtype == tl.uint8:  # zero points
            total = tl.fma(wide, -sums, total)
        else:
            acc = tl.fma(wide, sums, acc)
    return tl.fma(total, tl.broadcast_to(scale.to(tl.float32)[None, :, :], acc.shape), acc)


@jit
def _multiply_coded_vector(
    x, codes, scales, minima, bias, out, out_features, in_features, x_stride, code_stride, scale_stride, pairs, mask,
    dtype: tl.constexpr, BITS: tl.constexpr, HAS_MINIMA: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [ROWS, out] = weight [out, in] times x [ROWS, in], and the bias.

    x: four elements in an int64; strides count those.   codes: four bytes in an int32.   pairs: of those, in a row of
    codes, a multiple of PAIRS.   mask: see _code; as a constant it would be made anew for each code.   Tensors are
    [rows, columns, pairs, words].
    """
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    word = tl.arange(0, 2)[None, None, None, :]
    codes += column.to(tl.int64)[None, :, None, None] * code_stride + word
    x += row[:, None, None, None] * x_stride
    scales += column[:, None]
    minima += column[:, None]
    acc = tl.zeros([ROWS, COLUMNS, PAIRS], tl.float32)
    for begin in tl.range(0, pairs, PAIRS, num_stages=STAGES):  # type: ignore[misc]
        pair = begin + tl.arange(0, PAIRS)
        group, byte = pair * 8 // GROUP * (8 // BITS), pair * 8 % GROUP
        # All is loaded before anything is computed: it would be waited for one after the other.
        words = tl.load(codes + pair[None, None, :, None] * 2).to(tl.uint32, bitcast=True)
        first = _load_group(x, scales, minima, group, byte, word, in_features, scale_stride, HAS_MINIMA, GROUP)
        if BITS == 4:
            other = _load_group(x, scales, minima, group + 1, byte, word, in_features, scale_stride, HAS_MINIMA, GROUP)
            acc = _add_group(acc, words, other, mask, dtype, 1, BITS, HAS_MINIMA)
        acc = _add_group(acc, words, first, mask, dtype, 0, BITS, HAS_MINIMA)
    result = tl.sum(acc, 2)
    if HAS_BIAS:
        result += tl.load(bias + column).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * out_features + column[None, :], result.to(out.dtype.element_ty))


def takes_codes(x: torch.Tensor, weight: TritonWeight) -> bool:
    """Return whether `multiply_coded_vector` multiplies them."""
    return (
        x.shape[0] <= _MOST_ROWS
        and weight.form in ("int4", "int8")
        and x.element_size() == 2
        and weight.in_features % 4 == 0
        and x.data_ptr() % 8 == x.stride(0) % 4 == 0
    )


def multiply_coded_vector(x: torch.Tensor, weight: TritonWeight, dtype: torch.dtype) -> torch.Tensor:
    """[T, in] -> [T, out] = x @ weight.T + bias, summed in float32; see takes_codes.   dtype: of the result."""
    rows, out_features = x.shape[0], weight.out_features
    out = torch.empty((rows, out_features), dtype=dtype, device=x.device)
    columns = gcd(_COLUMNS, out_features)
    words = weight.codes.view(torch.int32)
    pairs = words.shape[1] // 2
    block, bits = gcd(64 if out_features <= _FEW else 32, pairs), int(weight.form[3:])
    bias = x if weight.bias is None else weight.bias
    minima = weight.scales if weight.minima is None else weight.minima
    _multiply_coded_vector[(out_features // columns,)](
        x.view(torch.int64), words, weight.scales, minima, bias, out, out_features, weight.in_features,
        x.stride(0) // 4, words.stride(0), out_features, pairs, ((1 << bits) - 1) << 16,
        tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16, bits, weight.minima is not None,
        weight.group, weight.bias is not None, rows, columns, block, _STAGES, num_warps=max(1, block // 32),
    )  # fmt: skip
    return out
