"""Linear layers: a matrix, its bias, and the parts it is fused from."""

from collections.abc import Sequence

from pagoda.layers.embedding import Embedding
from pagoda.layers.module import Module
from pagoda.layers.parameter import Axis, Matrix, Parameter, Part
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import ExpertWeights, LinearWeight, Tensor


class Linear(Module):
    """x @ weight.T + bias.

    outputs: their number, or the parts that are fused and that the checkpoint stores separately.
    shard, unit: see `Matrix`.   quantizable: False for small layers that are sensitive (a router).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int | Sequence[Part],
        bias: bool = False,
        shard: Axis | None = None,
        unit: int = 1,
        quantizable: bool = True,
    ) -> None:
        parts = (Part("", outputs),) if isinstance(outputs, int) else tuple(outputs)
        declared = Matrix(parts, inputs, bias, shard, unit, quantizable=quantizable)
        self.weight = Parameter[LinearWeight](declared)

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs]."""
        return ops.linear(x, self.weight.value)


class ExpertLinear(Module):
    """One matrix of equal shape for each expert; the checkpoint names them `{expert}.{part}`, or stacks them."""

    def __init__(self, num_experts: int, inputs: int, parts: Sequence[Part], shard: Axis) -> None:
        self.weight = Parameter[ExpertWeights](Matrix(tuple(parts), inputs, shard=shard, num_experts=num_experts))


class LMHead(Module):
    """Hidden states to logits.   tied: the embedding whose table is also this layer's weight."""

    def __init__(self, hidden_size: int, vocab_size: int, tied: Embedding | None = None, softcap: float = 0.0) -> None:
        shared = None if tied is None else tied.weight
        declared = Matrix((Part("", vocab_size),), hidden_size, shard=Axis.OUT, tied=shared)
        self.weight = Parameter[LinearWeight](declared)
        self.softcap = softcap

    def __call__(self, ops: ForwardOps, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> float32 [S, vocab]."""
        logits = ops.logits(hidden, self.weight.value)
        return ops.softcap(logits, self.softcap) if self.softcap else logits
