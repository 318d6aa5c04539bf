"""Tables whose rows are looked up, and linear layers: a matrix, its bias, and the parts it is fused from."""

from collections.abc import Sequence

from pagoda.layers.module import Module
from pagoda.layers.parameter import Axis, Matrix, Parameter, Part, Table
from pagoda.layers.sharding import divide_weight
from pagoda.ops.batch import ForwardBatch
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import ExpertWeights, LinearWeight, RankGroup, Tensor

EMBEDS, EMBED_ROWS = "prompt_embeds", "prompt_embed_rows"
"""Inputs of a batch with prompt embeddings: [n, hidden], and int64 [n], the batch's token that each is of."""


class Embedding(Module):
    """A row per token, or per position.

    scale: multiplies every row.   input_scale: multiplies what `of_batch` returns, with prompts given as embeddings.
    skipped, is_divided, by_position: see `Table`.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        scale: float = 1.0,
        skipped: int = 0,
        is_divided: bool = True,
        by_position: bool = False,
        input_scale: float = 1.0,
    ) -> None:
        self.weight = Parameter[Tensor](Table(vocab_size, hidden_size, skipped, is_divided, by_position))
        self.scale, self.input_scale = scale, input_scale
        self.ranks: RankGroup | None = None

    def divide(self, ranks: RankGroup, group: int) -> None:
        """Hold the rows of some tokens, which no group crosses; the sum over the ranks has those of all."""
        self.ranks = ranks if divide_weight(self.weight, ranks, 1) else None

    def __call__(self, ops: ForwardOps, token_ids: Tensor) -> Tensor:
        """token_ids int32 [T] -> [T, hidden]."""
        if self.ranks is None:
            return ops.embedding(token_ids, self.weight.value, self.scale)
        first = self.weight.shard.rows[0].start
        return ops.all_reduce(ops.partial_embedding(token_ids, self.weight.value, first, self.scale), self.ranks)

    def of_batch(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        """Return the embeddings of the batch's tokens, [T, hidden]: of prompts given as embeddings, those."""
        x = self(ops, batch.token_ids)
        given = batch.inputs.get(EMBEDS)
        if given is not None:
            ops.put_rows(x, given.tensor, batch.inputs[EMBED_ROWS].tensor)
        return x if self.input_scale == 1.0 else ops.scale(x, self.input_scale)


class Linear(Module):
    """x @ weight.T + bias.

    outputs: their number, or the parts that are fused and that the checkpoint stores separately.
    shard, unit, kernel, taps, in_pairs: see `Matrix`.
    quantizable: False for small layers that are sensitive, as a router.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int | Sequence[Part],
        bias: bool = False,
        shard: Axis | None = None,
        unit: int = 1,
        quantizable: bool = True,
        kernel: tuple[int, ...] = (),
        taps: int = 0,
        in_pairs: bool = False,
    ) -> None:
        parts = (Part("", outputs),) if isinstance(outputs, int) else tuple(outputs)
        self.shard = shard
        declared = Matrix(
            parts,
            inputs,
            bias,
            shard,
            unit,
            quantizable=quantizable,
            kernel=kernel,
            taps=taps,
            in_pairs=in_pairs,
        )
        self.weight = Parameter[LinearWeight](declared)
        self.ranks: RankGroup | None = None

    def divide(self, ranks: RankGroup, group: int) -> None:
        """Hold a share of the outputs, or a share of every output, which is summed over the ranks."""
        divide_weight(self.weight, ranks, group)
        self.ranks = ranks if self.shard is Axis.IN else None

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs]: this rank's inputs, if the weight is divided along them, or outputs."""
        y = ops.linear(x, self.weight.value)
        return y if self.ranks is None else ops.all_reduce(y, self.ranks)


class ExpertLinear(Module):
    """One matrix of equal shape for each expert; the checkpoint names them `{expert}.{part}`, or stacks them."""

    def __init__(self, num_experts: int, inputs: int, parts: Sequence[Part], shard: Axis, bias: bool = False) -> None:
        declared = Matrix(tuple(parts), inputs, bias, shard, num_experts=num_experts)
        self.weight = Parameter[ExpertWeights](declared)

    def divide(self, ranks: RankGroup, group: int) -> None:
        """Hold a share of every expert."""
        divide_weight(self.weight, ranks, group)


class LMHead(Module):
    """Hidden states to logits.

    tied: the embedding whose table is also this layer's weight.   scale: multiplies logits.   softcap: 0 is off.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        tied: Embedding | None = None,
        softcap: float = 0.0,
        scale: float = 1.0,
        bias: bool = False,
    ) -> None:
        shared = None if tied is None else tied.weight
        declared = Matrix((Part("", vocab_size),), hidden_size, bias, shard=Axis.OUT, tied=shared)
        self.weight = Parameter[LinearWeight](declared)
        self.vocab_size = vocab_size
        self.softcap, self.scale = softcap, scale
        self.ranks: RankGroup | None = None

    def divide(self, ranks: RankGroup, group: int) -> None:
        """Compute the logits of some tokens, whose rows no group crosses; every rank gets those of all."""
        divide_weight(self.weight, ranks, 1)
        self.ranks = ranks

    def __call__(self, ops: ForwardOps, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> float32 [S, vocab]."""
        logits = ops.logits(hidden, self.weight.value)
        if self.scale != 1.0:
            logits = ops.scale(logits, self.scale)
        if self.softcap:
            logits = ops.softcap(logits, self.softcap)
        return logits if self.ranks is None else ops.all_gather(logits, self.vocab_size, self.ranks)
