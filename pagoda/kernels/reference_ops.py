"""ReferenceOps: every op as its reference defines it."""

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

import numpy as np
import torch

from pagoda.kernels.constraints import reference as constraints
from pagoda.kernels.kv_cache import reference as kv_cache
from pagoda.kernels.linear import reference as linear
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.kernels.moe.reference import ExpertList
from pagoda.kernels.sampling import logprobs
from pagoda.kernels.sampling import reference as sampling
from pagoda.ops.declare import Op
from pagoda.ops.forward import FORWARD_OPS
from pagoda.ops.tensor import ExpertWeights, LinearWeight, Tensor


def reference_of(op: Op) -> Callable[..., object]:
    """The function named as the op in `kernels/<folder>/reference.py`. Raises TypeError where its signature differs."""
    return implementation(op, import_module(f"pagoda.kernels.{op.folder}.reference"))


def implementation(op: Op, module: ModuleType) -> Callable[..., object]:
    """`module`'s function of the op's name. Raises TypeError where it does not take what the op table declares."""
    function = getattr(module, op.name)
    found = [(parameter.name, parameter.default) for parameter in inspect.signature(function).parameters.values()]
    wanted = [(parameter.name, parameter.default) for parameter in op.signature.parameters.values()]
    if found != wanted:
        raise TypeError(f"{module.__name__}.{op.name} takes {found}; the op table declares {wanted}")
    return function


class ReferenceOps:
    """The definition of `Ops`: plain torch on any device, slow and obvious."""

    name = "reference"

    constrain = staticmethod(constraints.constrain)
    copy_blocks = staticmethod(kv_cache.copy_blocks)
    top_logprobs = staticmethod(logprobs.top_logprobs)
    mask_logits = staticmethod(sampling.mask_logits)

    def __init__(self) -> None:
        for op in FORWARD_OPS.values():
            setattr(self, op.name, reference_of(op))

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return linear.PlainLinear(weight, bias)

    def prepare_quantized_linear(
        self, weight: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> LinearWeight:
        return linear.PlainLinear(weight.dequantize().to(dtype), bias)

    def table_of(self, weight: LinearWeight) -> Tensor | None:
        return weight.weight if isinstance(weight, linear.PlainLinear) else None

    def prepare_experts(self, experts: Sequence[LinearWeight]) -> ExpertWeights:
        return ExpertList(tuple(experts))

    def best_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = logits.max(-1)
        return best.values, best.indices

    def sample(
        self,
        logits: torch.Tensor,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        uniform: np.ndarray,
        best: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        del best  # the definition finds it itself
        return sampling.sample(logits, temperature, top_k, top_p, min_p, uniform)
