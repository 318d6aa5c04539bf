"""`triton.jit` as all kernels use it: without a static type, and without contracting operations.

Of `x * y + z` a compiler that may contract makes a fused multiply-add where it likes, so that two kernels could round
one expression differently. Up to Triton 3.9 that is the default. Here no version does it: fused multiply-adds are
explicit, `tl.fma` and `tl.dot`.
"""

from collections.abc import Callable
from typing import Any

import triton


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
