"""TorchOps: reasonable speed on any device that torch supports, without compiling anything."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch

from pagoda.kernels.linear import library as linear
from pagoda.kernels.linear.quantize import CodedWeight, values_of
from pagoda.kernels.reference_ops import ReferenceOps, implementation, reference_of
from pagoda.kernels.sampling import library as sampling
from pagoda.ops.declare import Op
from pagoda.ops.forward import FORWARD_OPS
from pagoda.ops.tensor import LinearWeight, Tensor


def torch_version_of(op: Op) -> Callable[..., object]:
    """Return the op of `kernels/<folder>/library.py`, or the reference, which is a few whole-tensor calls already."""
    name = f"pagoda.kernels.{op.folder}.library"
    module = import_module(name) if find_spec(name) is not None else None
    return implementation(op, module) if hasattr(module, op.name) else reference_of(op)  # type: ignore[arg-type]


class TorchOps(ReferenceOps):
    """`Ops` on torch's own kernels, where `library.py` has them; else the references."""

    name = "torch"

    constrain = staticmethod(sampling.constrain)
    sample = staticmethod(sampling.sample)
    process_logits = staticmethod(sampling.process_logits)
    mask_logits = staticmethod(sampling.mask_logits)

    def __init__(self) -> None:
        for op in FORWARD_OPS.values():
            setattr(self, op.name, torch_version_of(op))

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return linear.prepare(weight, bias)

    def prepare_quantized_linear(
        self, weight: CodedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None, in_pairs: bool = False
    ) -> LinearWeight:
        return linear.prepare(values_of(weight).to(dtype), bias)

    def table_of(self, weight: LinearWeight) -> Tensor | None:
        return weight.weight if isinstance(weight, linear.LibraryLinear) and not weight.packed else None
