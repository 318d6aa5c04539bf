"""Token embedding."""

from pagoda.layers.module import Module
from pagoda.layers.parameter import Parameter, Table
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


class Embedding(Module):
    """A row per token, or per position.   scale: multiplies every row.   skipped: see `Table`."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float = 1.0, skipped: int = 0) -> None:
        self.weight = Parameter[Tensor](Table(vocab_size, hidden_size, skipped))
        self.scale = scale

    def __call__(self, ops: ForwardOps, token_ids: Tensor) -> Tensor:
        """token_ids int32 [T] -> [T, hidden]."""
        return ops.embedding(token_ids, self.weight.value, self.scale)
