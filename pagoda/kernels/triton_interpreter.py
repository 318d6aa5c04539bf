"""Triton's interpreter, closer to a GPU.

It keeps bfloat16 as 16-bit integers. As of Triton 3.9 it cuts float32 off instead of rounding it, converts other types
as if those integers were the values, and multiplies them in `tl.dot`. Its products of matrices are a library's, in
which the bits of a row depend on its place.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_is_done = False


def fix_interpreter() -> None:
    """Replace the conversions and the products of the interpreter in this process. Idempotent."""
    global _is_done
    if _is_done:
        return
    _is_done = True
    builder: Any = interpreter.InterpreterBuilder
    handle: Any = interpreter.TensorHandle
    cast = builder.cast_impl

    def cast_impl(self: object, source: Any, target: Any) -> Any:
        from_bf16, to_bf16 = (kind.scalar == tl.bfloat16 for kind in (source.dtype, target))
        if from_bf16 == to_bf16:
            return cast(self, source, target)
        if from_bf16:
            wide = handle((source.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            return cast(self, wide, target)
        return handle(_rounded(cast(self, source, tl.float32).data), tl.bfloat16)

    def create_dot(self: object, a: Any, b: Any, acc: Any, *precision: object) -> Any:
        left, right = (cast_impl(self, x, tl.float32).data for x in (a, b))
        product = np.einsum("mk,kn->mn", left, right, dtype=acc.data.dtype)
        return handle(acc.data + product, acc.dtype.scalar)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot


def _rounded(values: np.ndarray) -> np.ndarray:
    """float32 -> the bits of the nearest bfloat16, ties to even; uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
