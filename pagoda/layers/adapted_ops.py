"""AdaptedOps: the ops of a forward in which rows have LoRA adapters. Models do not know of it."""

from collections.abc import Mapping
from typing import cast

from pagoda.ops.batch import ForwardBatch
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import LinearWeight, LowRankTable, Tensor

ADAPTERS, OUTPUT_ADAPTERS, LOGITS_ADAPTERS = "adapters", "output_adapters", "logits_adapters"
"""Inputs of a batch with adapters: int32, the slot of each token, each output row, and each of logits_index."""


class AdaptedOps:
    """ForwardOps that add what each row's adapter adds to the layers that adapters adapt; other ops are `ops`'s own.

    tables: by identity of the weight (Parameter.value) that a layer passes to its op.
    slots: the adapters of rows, by the number of rows: of the batch's tokens, or of its output rows. They cannot be
    confused, because as many output rows as the batch has tokens are the batch.
    """

    def __init__(self, ops: ForwardOps, tables: Mapping[int, LowRankTable], slots: Mapping[int, Tensor]) -> None:
        self._ops, self._tables, self._slots = ops, tables, slots

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        return self._adapted(self._ops.linear(x, weight), x, weight)

    def logits(self, x: Tensor, weight: LinearWeight) -> Tensor:
        return self._adapted(self._ops.logits(x, weight), x, weight)

    def embedding(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        return self._adapted_embedding(self._ops.embedding(token_ids, table, scale), token_ids, table)

    def partial_embedding(self, token_ids: Tensor, table: Tensor, first: int, scale: float = 1.0) -> Tensor:
        y = self._ops.partial_embedding(token_ids, table, first, scale)
        return self._adapted_embedding(y, token_ids, table)

    def _adapted_embedding(self, y: Tensor, token_ids: Tensor, table: Tensor) -> Tensor:
        adapters = self._tables.get(id(table))
        if adapters is not None:
            self._ops.add_low_rank_embedding(y, token_ids, self._slots[token_ids.shape[0]], adapters)
        return y

    def _adapted(self, y: Tensor, x: Tensor, weight: LinearWeight) -> Tensor:
        table = self._tables.get(id(weight))
        if table is not None:
            self._ops.add_low_rank(y, x, self._slots[x.shape[0]], table)
        return y


def adapted_to(ops: ForwardOps, tables: Mapping[int, LowRankTable], batch: ForwardBatch) -> ForwardOps:
    """Return the ops for a batch; `ops` itself if none of its rows has an adapter."""
    given = batch.inputs.get(ADAPTERS)
    if given is None:
        return ops
    slots = {given.tensor.shape[0]: given.tensor}
    of_outputs = batch.inputs[OUTPUT_ADAPTERS].tensor
    slots.setdefault(of_outputs.shape[0], of_outputs)
    return cast(ForwardOps, AdaptedOps(ops, tables, slots))
