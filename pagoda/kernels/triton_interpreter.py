"""Triton's interpreter, closer to a GPU.

It keeps bfloat16 as 16-bit integers. As of Triton 3.9 it cuts float32 off instead of rounding it, converts other types
as if those integers were the values, and multiplies them in `tl.dot`. Its 8-bit floats have the same fate. Its products
of matrices are a library's, in which the bits of a row depend on its place. Triton 3.6's makes integers of arrays as
numpy 2.4 does not allow.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_is_done = False
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


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
        left, right = (
            _E4M3[x.data] if x.dtype.scalar == tl.float8e4nv else cast_impl(self, x, tl.float32).data for x in (a, b)
        )
        product = np.einsum("mk,kn->mn", left, right, dtype=acc.data.dtype)
        return handle(acc.data + product, acc.dtype.scalar)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    patch_tensor = getattr(interpreter, "_patch_lang_tensor")  # noqa: B009  # it has no public name

    def patch_tensor_to_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    setattr(interpreter, "_patch_lang_tensor", patch_tensor_to_index)  # noqa: B010


def _rounded(values: np.ndarray) -> np.ndarray:
    """float32 -> the bits of the nearest bfloat16, ties to even; uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
