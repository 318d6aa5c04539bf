"""The codes by which kernels are told a tensor's dtype; `Dtype` in simd.h."""

import torch

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
