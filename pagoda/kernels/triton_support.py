"""What our Triton kernels share: how they are compiled, 8-bit floats, and an interpreter that is closer to a GPU.

`jit` is `triton.jit` without a static type, and without contracting operations. Of `x * y + z` a compiler that may
contract makes a fused multiply-add where it likes, so that two kernels could round one expression differently. Up to
Triton 3.9 that is the default. Here no version does it: fused multiply-adds are explicit, `tl.fma` and `tl.dot`.

8-bit floats (e4m3) are bytes, by integer arithmetic, because GPUs before compute capability 8.9 lack the type. Torch
tensors of float8_e4m3fn are passed as views of uint8.

The interpreter keeps bfloat16 as 16-bit integers. As of Triton 3.9 it cuts float32 off instead of rounding it, converts
other types as if those integers were the values, and multiplies them in `tl.dot`. Its 8-bit floats have the same fate.
Its products of matrices are a library's, in which the bits of a row depend on its place. Triton 3.6's makes integers of
arrays as numpy 2.4 does not allow. And it spends a quarter of its time on finding, at every call of a device function,
what to patch, and on a table that it makes again for each result.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


def jit(function: Callable[..., Any]) -> Any:
    """Return the kernel of a function; a type checker would take its body and launches for plain Python."""
    return _kernel_of(function, ())


def jit_for_any(*varying: str) -> Callable[[Callable[..., Any]], Any]:
    """The same, compiled once for all values of some integer arguments: those that follow from a step's batch.

    Otherwise Triton compiles a kernel again for an argument that is 1, and for one that 16 divides, which takes up to
    seconds in the middle of serving. Not for strides and sizes by which loads are known to be aligned.
    """
    return lambda function: _kernel_of(function, varying)


def _kernel_of(function: Callable[..., Any], varying: tuple[str, ...]) -> Any:
    kernel: Any = triton.jit(do_not_specialize=varying)(function)

    def run(*args: object, **kwargs: object) -> object:
        return type(kernel).run(kernel, *args, enable_fp_fusion=False, **kwargs)

    kernel.run = run
    return kernel


@jit
def from_e4m3(codes, dtype: tl.constexpr):
    """Return 2^-8 times the numbers that are e4m3 in uint8: their bits, moved into float16. NaN becomes 1.875."""
    bits = codes.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)


@jit
def to_e4m3(x):
    """Return float32 as the nearest e4m3 in uint8, ties to even. |x| must not exceed 448, or round to more."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960  # the exponent's bias: 127 -> 7
    # Adding 1.5 * 2^23 leaves the nearest integer in the low bits, ties to even: of x in units of 2^-9.
    small = (tl.abs(x) * 512.0 + 12582912.0).to(tl.uint32, bitcast=True) & 15
    code = tl.where(magnitude < 0x3C800000, small, normal)  # 2^-6, the smallest normal number
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


_is_done = False
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def fix_interpreter() -> None:
    """Replace the conversions and the products of the interpreter in this process; look things up once. Idempotent."""
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
    patch_attr, np_dtype = (getattr(interpreter, name) for name in ("_patch_attr", "_get_np_dtype"))
    is_builtin: Callable[[object], bool] = getattr(tl.core, "is_builtin")  # noqa: B009

    @cache
    def builtins_of(package: object) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtins(package: Any, builder: object, scope: object) -> None:
        for name in builtins_of(package):
            if is_builtin(member := getattr(package, name)):  # it may be patched already
                patch_attr(package, name, member, builder, scope)

    np_dtype_of_scalar = cache(np_dtype)

    def np_dtype_of(kind: Any) -> object:
        return np_dtype_of_scalar(tl.uint64 if kind.scalar.is_ptr() else kind.scalar)

    setattr(interpreter, "_patch_builtin", patch_builtins)  # noqa: B010
    setattr(interpreter, "_get_np_dtype", np_dtype_of)  # noqa: B010


def _rounded(values: np.ndarray) -> np.ndarray:
    """float32 -> the bits of the nearest bfloat16, ties to even; uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
