"""ReferenceOps: every op computed by its reference."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import cast

import torch

from pagoda.kernels.kv_cache.device_blocks import DeviceBlocks
from pagoda.kernels.linear import reference as linear
from pagoda.kernels.linear.quantize import CodedWeight
from pagoda.kernels.low_rank.table import PlainLowRank
from pagoda.kernels.moe.reference import ExpertList
from pagoda.kernels.native.checks import check_below
from pagoda.kernels.sampling import reference as sampling
from pagoda.kernels.sampling.batch import DrawParams
from pagoda.kernels.sampling.reference import without_nonfinite
from pagoda.ops.declare import Op, Rows
from pagoda.ops.forward import FORWARD_OPS
from pagoda.ops.tensor import ExpertWeights, LinearWeight, LowRankTable, Tensor


def reference_of(op: Op) -> Callable[..., object]:
    """Return the function named as the op in `kernels/<folder>/reference.py`. See `implementation`."""
    return implementation(op, import_module(f"pagoda.kernels.{op.folder}.reference"))


def implementation(op: Op, module: ModuleType) -> Callable[..., object]:
    """Return `module`'s function of the op's name; it raises InvariantBroken for an index outside its table.

    Raises TypeError if the function does not take the arguments that the op table declares.
    """
    function = getattr(module, op.name)
    found = [(parameter.name, parameter.default) for parameter in inspect.signature(function).parameters.values()]
    wanted = [(parameter.name, parameter.default) for parameter in op.signature.parameters.values()]
    if found != wanted:
        raise TypeError(f"{module.__name__}.{op.name} takes {found}; the op table declares {wanted}")
    below = {name: declared.below for name, declared in op.arguments.items() if isinstance(declared, Rows)}
    limits = {name: table for name, table in below.items() if table is not None}
    return _checked(op, function, limits) if limits else function


def _checked(op: Op, function: Callable[..., object], limits: Mapping[str, str]) -> Callable[..., object]:
    """Check indices as the native kernels do, on a CPU.

    limits: argument of indices -> the argument whose rows they index.
    """

    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        arguments = op.bind(args, kwargs)
        for name, table in limits.items():
            indices, indexed = arguments[name], arguments[table]
            assert isinstance(indices, torch.Tensor)
            shape = cast(Tensor | LowRankTable, indexed).shape
            if indices.device.type == "cpu":  # elsewhere, reading them waits for the device
                check_below(f"{op.name}: {name}", indices.numpy(), shape[0])
        return function(*args, **kwargs)

    return call


class ReferenceOps:
    """The definition of `Ops`: plain torch on any device, slow and obvious."""

    name = "reference"
    packs_weights = False

    constrain = staticmethod(sampling.constrain)
    make_device_blocks = DeviceBlocks
    top_logprobs = staticmethod(sampling.top_logprobs)
    mask_logits = staticmethod(sampling.mask_logits)
    make_low_rank_table = PlainLowRank

    def __init__(self) -> None:
        for op in FORWARD_OPS.values():
            setattr(self, op.name, reference_of(op))

    def plain_keys(self, pages: torch.Tensor) -> torch.Tensor:
        return pages

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return linear.PlainLinear(weight, bias)

    def prepare_stacked(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None, in_pairs: bool = False
    ) -> LinearWeight:
        return self.prepare_linear(parts[0] if len(parts) == 1 else torch.cat([*parts]), bias)

    def prepare_quantized_linear(
        self, weight: CodedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None, in_pairs: bool = False
    ) -> LinearWeight:
        return linear.prepare_quantized(weight, dtype, bias)

    def table_of(self, weight: LinearWeight) -> Tensor | None:
        return weight.weight if isinstance(weight, linear.PlainLinear) else None

    def prepare_experts(self, experts: Sequence[LinearWeight]) -> ExpertWeights:
        return ExpertList(tuple(experts))

    def best_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = logits.max(-1)
        return best.values, best.indices

    @staticmethod
    def sample(logits: torch.Tensor, params: DrawParams, best: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return sampling.sample(without_nonfinite(logits, best)[0], params)

    @staticmethod
    def process_logits(logits: torch.Tensor, params: DrawParams, best: tuple[torch.Tensor, torch.Tensor]) -> None:
        sampling.process_logits(logits, params)
