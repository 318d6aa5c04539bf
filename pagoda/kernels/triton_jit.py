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
    kernel: Any = triton.jit(function)

    def run(*args: object, **kwargs: object) -> object:
        return type(kernel).run(kernel, *args, enable_fp_fusion=False, **kwargs)

    kernel.run = run
    return kernel
