"""Dense: a linear layer and an activation after the pooling, as sentence-transformers has it."""

from dataclasses import dataclass

from pagoda.layers.linear import Linear
from pagoda.layers.mlp import Activation, activate
from pagoda.models.base import PoolingLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """One layer.   folder: of its weights, within the model's."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: Activation


class Dense(PoolingLayer):
    """activation(linear(x))."""

    def __init__(self, spec: DenseSpec) -> None:
        self.linear = Linear(spec.inputs, spec.outputs, spec.bias, quantizable=False)
        self.folder = spec.folder
        self.size = spec.outputs
        self.activation = spec.activation

    def __call__(self, ops: ForwardOps, pooled: Tensor) -> Tensor:
        return activate(ops, self.activation, self.linear(ops, pooled))
