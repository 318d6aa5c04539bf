"""The product of a tile of rows and a tile of a weight's output features in Triton, for every form of weights.

`triton_forms` describes the forms. Of codes, the tile is computed transposed, weights times rows: the tensor cores take
their left operand from registers, where codes have just become floats, and need 64 rows of it but only 16 columns.
"""

import triton.language as tl

from pagoda.kernels.triton_support import from_e4m3, jit


@jit
def _load_rows(rows, at):
    """Return [at, BLOCK_M]: elements `at` of each row."""
    x, has_row, in_features = rows
    return tl.load(x[None, :] + at[:, None], mask=has_row[None, :] & (at < in_features)[:, None], other=0.0)


@jit
def _add_group(acc, codes, weight, rows, group, at, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr):
    """Add the product with codes [BLOCK_N, at] of one group, uint8; `at` are their elements along K."""
    _, scales, minima, has_column, scale_stride = weight
    x = _load_rows(rows, at)
    scale = tl.load(scales + group * scale_stride, mask=has_column, other=0.0).to(tl.float32)[:, None]
    value = codes.to(tl.float32)
    if HAS_MINIMA:
        minimum = tl.load(minima + group * scale_stride, mask=has_column, other=0).to(tl.float32)[:, None]
        if minima.dtype.element_ty == tl.uint8:  # zero points
            value = (value - minimum) * scale
        else:
            value = tl.fma(value, tl.broadcast_to(scale, value.shape), tl.broadcast_to(minimum, value.shape))
    else:
        value = (value - ZERO) * scale
    return tl.dot(value.to(x.dtype), x, acc, input_precision="ieee")


@jit
def _load_codes(weight, at):
    """Return [BLOCK_N, at]: bytes `at` of each output feature."""
    codes, _, _, has_column, _ = weight
    return tl.load(codes[:, None] + at[None, :], mask=has_column[:, None], other=0)


@jit
def _add_int8(acc, weight, rows, record, HAS_MINIMA: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Add a record: groups, or a part of one."""
    PIECE: tl.constexpr = min(GROUP, BLOCK_K)
    for part in tl.static_range(BLOCK_K // PIECE):  # type: ignore[misc]
        begin = record * BLOCK_K + part * PIECE
        at = begin + tl.arange(0, PIECE)
        acc = _add_group(acc, _load_codes(weight, at), weight, rows, begin // GROUP, at, 128, HAS_MINIMA)
    return acc


@jit
def _add_int4(acc, weight, rows, record, HAS_MINIMA: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Add half of BLOCK_K elements of an even group, and as many of the next."""
    PIECE: tl.constexpr = BLOCK_K // 2
    PIECES: tl.constexpr = GROUP // PIECE
    even = record // PIECES * 2
    # As a multiple of PIECE: the compiler must see that the elements are aligned, to load them ahead.
    at = even * GROUP + record % PIECES * PIECE + tl.arange(0, PIECE)
    pair = _load_codes(weight, record * PIECE + tl.arange(0, PIECE))
    acc = _add_group(acc, pair & 15, weight, rows, even, at, 8, HAS_MINIMA)
    return _add_group(acc, pair >> 4, weight, rows, even + 1, at + GROUP, 8, HAS_MINIMA)


@jit
def _add_int6(acc, weight, rows, record, GROUP: tl.constexpr):
    """Add four groups."""
    byte = record * (3 * GROUP) + tl.arange(0, GROUP)
    high = _load_codes(weight, byte + 2 * GROUP)
    for half in tl.static_range(2):  # type: ignore[misc]
        pair = _load_codes(weight, byte + half * GROUP)
        group = 4 * record + 2 * half
        at = group * GROUP + tl.arange(0, GROUP)
        even = (pair & 15) | ((high >> (4 * half)) & 3) << 4
        odd = (pair >> 4) | ((high >> (4 * half + 2)) & 3) << 4
        acc = _add_group(acc, even, weight, rows, group, at, 32, False)
        acc = _add_group(acc, odd, weight, rows, group + 1, at + GROUP, 32, False)
    return acc


@jit
def _add_fp8(acc, weight, rows, record, BLOCK_K: tl.constexpr):
    at = record * BLOCK_K + tl.arange(0, BLOCK_K)
    x = _load_rows(rows, at)
    pointers, _, _, has_column, _ = weight
    inside = has_column[:, None] & (at < rows[2])[None, :]  # a row of codes is not padded, unlike one of groups
    codes = tl.load(pointers[:, None] + at[None, :], mask=inside, other=0)
    return tl.dot(from_e4m3(codes, x.dtype), x, acc, input_precision="ieee")


@jit
def _add_floats(acc, weight, rows, record, EIGHT_BITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Add to [BLOCK_M, BLOCK_N] the product of floats with floats of one type; bytes with EIGHT_BITS: e4m3."""
    codes, _, _, has_column, _ = weight
    x, has_row, in_features = rows
    at = (record * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    a = tl.load(x[:, None] + at, mask=has_row[:, None] & (at < in_features), other=0)
    b = tl.load(codes[:, None] + at, mask=has_column[:, None] & (at < in_features), other=0)
    if EIGHT_BITS:
        a, b = a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True)
        # Hopper's tensor cores keep about 14 bits of a sum of 8-bit products (DeepSeek-V3, arXiv 2412.19437, 3.3.2):
        # they begin a new one with each step, which is added in float32. By default, Triton leaves them the whole sum.
        return tl.dot(a, tl.trans(b), acc, max_num_imprecise_acc=BLOCK_K)
    else:
        return tl.dot(a, tl.trans(b), acc, input_precision="ieee")


@jit
def product(
    weight, rows, begin, end,
    FORM: tl.constexpr, HAS_MINIMA: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return float32 [BLOCK_M, BLOCK_N], summed in order over steps begin .. end - 1, of BLOCK_K elements each.

    weight: (pointers to the codes of the output features [BLOCK_N], to the scales and the minima of their first group,
    which of the features exist, scale_stride).   rows: (pointers to the rows [BLOCK_M], which exist, in_features).
    Of fp8 the product lacks what `scaled` adds; rows are floats, and with "fp8 fp8" e4m3 as well.
    """
    if FORM == "plain" or FORM == "fp8 fp8":
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for record in range(begin, end):
            acc = _add_floats(acc, weight, rows, record, FORM != "plain", BLOCK_K)
        return acc
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for record in range(begin, end):
            if FORM == "int8":
                acc = _add_int8(acc, weight, rows, record, HAS_MINIMA, GROUP, BLOCK_K)
            elif FORM == "int4":
                acc = _add_int4(acc, weight, rows, record, HAS_MINIMA, GROUP, BLOCK_K)
            elif FORM == "int6":
                acc = _add_int6(acc, weight, rows, record, GROUP)
            else:
                tl.static_assert(FORM == "fp8")
                acc = _add_fp8(acc, weight, rows, record, BLOCK_K)
        return tl.trans(acc)


@jit
def scaled(acc, row_scales, has_row, column_scales, has_column, FORM: tl.constexpr):
    """Return a product with the scales of 8-bit floats, which other forms do not have; pointers to the scales."""
    if FORM == "fp8":
        acc *= tl.load(column_scales, mask=has_column, other=0.0)[None, :] * 256.0  # see from_e4m3
    elif FORM == "fp8 fp8":
        acc *= tl.load(column_scales, mask=has_column, other=0.0)[None, :]
        acc *= tl.load(row_scales, mask=has_row, other=0.0)[:, None]
    return acc
