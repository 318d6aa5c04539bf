"""TorchOps: reasonable speed on any device that torch supports, without compiling anything."""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec

import torch

from pagoda.kernels.constraints import library as constraints
from pagoda.kernels.kv_cache.device_blocks import DeviceBlocks
from pagoda.kernels.linear import library as linear
from pagoda.kernels.linear.quantize import CodedWeight, values_of
from pagoda.kernels.low_rank.table import PlainLowRank
from pagoda.kernels.moe.reference import ExpertList
from pagoda.kernels.reference_ops import implementation, reference_of
from pagoda.kernels.sampling import library as sampling
from pagoda.kernels.sampling import logprobs
from pagoda.ops.declare import Op
from pagoda.ops.forward import FORWARD_OPS
from pagoda.ops.tensor import ExpertWeights, LinearWeight, Tensor


def torch_version_of(op: Op) -> Callable[..., object]:
    """Return the op of `kernels/<folder>/library.py`, or the reference, which is a few whole-tensor calls already."""
    name = f"pagoda.kernels.{op.folder}.library"
    module = import_module(name) if find_spec(name) is not None else None
    return implementation(op, module) if hasattr(module, op.name) else reference_of(op)  # type: ignore[arg-type]


class TorchOps:
    """`Ops` on torch's own kernels."""

    name = "torch"
    packs_weights = False

    make_device_blocks = DeviceBlocks
    constrain = staticmethod(constraints.constrain)
    sample = staticmethod(sampling.sample)
    top_logprobs = staticmethod(logprobs.top_logprobs)
    mask_logits = staticmethod(sampling.mask_logits)
    make_low_rank_table = PlainLowRank

    def __init__(self) -> None:
        for op in FORWARD_OPS.values():
            setattr(self, op.name, torch_version_of(op))

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return linear.prepare(weight, bias)

    def prepare_stacked(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> LinearWeight:
        return self.prepare_linear(parts[0] if len(parts) == 1 else torch.cat([*parts]), bias)

    def prepare_quantized_linear(
        self, weight: CodedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> LinearWeight:
        return linear.prepare(values_of(weight).to(dtype), bias)

    def table_of(self, weight: LinearWeight) -> Tensor | None:
        return weight.weight if isinstance(weight, linear.LibraryLinear) and not weight.packed else None

    def prepare_experts(self, experts: Sequence[LinearWeight]) -> ExpertWeights:
        return ExpertList(tuple(experts))

    def best_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = logits.max(-1)
        return best.values, best.indices
