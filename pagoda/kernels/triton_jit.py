"""`triton.jit` without a static type: a type checker would take a kernel's body and launches for plain Python."""

from typing import Any

import triton

jit: Any = triton.jit
