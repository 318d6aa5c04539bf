"""Dequantisation of GGUF tensors into torch tensors."""

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType


def dequantize(data: memoryview, kind: GGMLQuantizationType, out: torch.Tensor) -> None:
    """Fill `out` (any shape, float dtype, device) with the values of `data`: exact in float32, then rounded once.

    Raises NotImplementedError for a type that the gguf package cannot dequantise.
    """
    dequantize_reference(data, kind, out)


def dequantize_reference(data: memoryview, kind: GGMLQuantizationType, out: torch.Tensor) -> None:
    """As `dequantize`, by the gguf package."""
    values = quants.dequantize(np.frombuffer(data, np.uint8), kind)
    out.copy_(torch.from_numpy(np.ascontiguousarray(values, np.float32)).view(out.shape))
