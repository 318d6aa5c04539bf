"""Token embedding, and the rows of a batch that are given in its place."""

from pagoda.layers.module import Module
from pagoda.layers.parameter import Parameter, Table
from pagoda.ops.batch import ForwardBatch
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor

EMBEDS, EMBED_ROWS = "prompt_embeds", "prompt_embed_rows"
"""Inputs of a batch with prompt embeddings: [n, hidden], and int64 [n], the batch's token that each is of."""


class Embedding(Module):
    """A row per token, or per position.   scale: multiplies every row.   skipped: see `Table`."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float = 1.0, skipped: int = 0) -> None:
        self.weight = Parameter[Tensor](Table(vocab_size, hidden_size, skipped))
        self.scale = scale

    def __call__(self, ops: ForwardOps, token_ids: Tensor) -> Tensor:
        """token_ids int32 [T] -> [T, hidden]."""
        return ops.embedding(token_ids, self.weight.value, self.scale)

    def of_batch(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        """Return the embeddings of the batch's tokens, [T, hidden]: of prompts given as embeddings, those."""
        x = self(ops, batch.token_ids)
        given = batch.inputs.get(EMBEDS)
        if given is not None:
            ops.put_rows(x, given.tensor, batch.inputs[EMBED_ROWS].tensor)
        return x
