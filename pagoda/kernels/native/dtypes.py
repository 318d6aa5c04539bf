"""torch's dtypes and the codes by which kernels know them."""

import torch

from pagoda.ops.declare import DType

DTYPE_CODES: dict[torch.dtype, DType] = {
    torch.float32: DType.F32,
    torch.bfloat16: DType.BF16,
    torch.float16: DType.F16,
    torch.int8: DType.I8,
    torch.int32: DType.I32,
    torch.int64: DType.I64,
}
TORCH_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
ELEMENT_BYTES = {code: dtype.itemsize for dtype, code in DTYPE_CODES.items()}
