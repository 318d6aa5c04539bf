"""GraphedForward: steps of few tokens replayed as CUDA graphs, so that the host launches one thing, not hundreds."""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pagoda.kernels.batch import ForwardBatch, KVLayer
from pagoda.kernels.low_rank.table import FillableLowRank
from pagoda.kernels.ops import Ops
from pagoda.layers.adapted_ops import ADAPTERS
from pagoda.models.base import Model
from pagoda.worker.decode_inputs import DecodeInputs
from pagoda.worker.forward_pass import EagerForward

if TYPE_CHECKING:
    from pagoda.worker.devices.device import Capture, Graph

logger = logging.getLogger("pagoda")

_MOST_GRAPHS = 256
"""Each takes memory for its result and its launches, which the KV pools leave free."""


class _Size(NamedTuple):
    """What makes steps replays of one graph.   context: tokens."""

    num_tokens: int
    num_rows: int
    max_query_len: int
    context: int
    has_shared_prefix: bool
    has_adapters: bool
    num_layers: int

    @classmethod
    def of(cls, batch: ForwardBatch) -> "_Size":
        first = batch.metadata[0]
        return cls(
            batch.token_ids.shape[0],
            first.seq_lens.shape[0],
            first.max_query_len,
            first.max_seq_len,
            first.shared_prefix is not None,
            ADAPTERS in batch.inputs,
            batch.num_layers,
        )


class GraphedForward(EagerForward):
    """Runs batches in its `decode_inputs` as graphs, one for each padded number of tokens, of rows, and of context.

    In these steps each row has few new tokens: decodes, drafts to verify, ends of prompts, drafts of the first layers.
    Steps whose rows share a prefix that is attended to once have graphs of their own, and so have steps with adapters;
    these are captured again when an adapter has made a table of weights move.
    Graphs read a step's inputs where its one copy to the device puts them, so that nothing is copied again.
    A graph is captured when its size comes for the second time; the first time, the same padded batch runs op by op,
    which also compiles its kernels. Of too many graphs, the least recently used is dropped. All other steps run op by
    op. Rows that fill a batch up write to the null block.
    Needs ops that neither wait for the device nor depend on the values in their inputs (TritonOps).
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        max_rows: int,
        max_model_len: int,
        device: torch.device,
        capture: "Capture",
        tables: Mapping[int, FillableLowRank] | None = None,
        max_query_len: int = 1,
    ) -> None:
        """max_rows, max_model_len, max_query_len: see DecodeInputs.   capture: not shared with other forwards."""
        super().__init__(model, ops, tables)
        self._inputs = DecodeInputs(max_rows, max_model_len, device, max_query_len)
        self._capture = capture
        self._kv: Sequence[KVLayer] | None = None
        self._adapter_tables = tables if tables is not None else {}
        self._tables_version = 0
        self._graphs: OrderedDict[_Size, Graph] = OrderedDict()  # the least recently used first
        self._seen: set[_Size] = set()  # that have come at least once

    @property
    def num_graphs(self) -> int:
        """Return how many graphs have been captured."""
        return len(self._graphs)

    @property
    def decode_inputs(self) -> DecodeInputs:
        return self._inputs

    def forward(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        if not self._inputs.holds(batch):
            return super().forward(batch, kv)
        if kv is not self._kv:
            self._graphs.clear()
            self._seen.clear()
            self._kv = kv
        size = _Size.of(batch)
        if size.has_adapters:
            self._forget_moved_tables()
        if size not in self._seen:
            self._seen.add(size)
            return super().forward(batch, kv)
        graph = self._graphs.get(size) or self._captured(size, batch, kv)
        if graph is None:
            return super().forward(batch, kv)
        self._graphs.move_to_end(size)
        out, replay = graph
        replay()
        return out

    def _captured(self, size: _Size, batch: ForwardBatch, kv: Sequence[KVLayer]) -> "Graph | None":
        """Capture a graph and keep it. If that fails, use none from now on, and return None."""
        try:
            graph = self._capture(lambda: EagerForward.forward(self, batch, kv))
        except RuntimeError as why:
            message = "the decode steps of %s run op by op, which is slower: no graph could be captured: %s"
            logger.warning(message, self.model.spec.architecture, str(why))  # a record keeps the error's tensors alive
            self._inputs.is_off = True
            self._graphs.clear()
            return None
        logger.debug("captured a graph: %s", size)
        self._graphs[size] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            dropped, _ = self._graphs.popitem(last=False)
            self._seen.discard(dropped)
        return graph

    def _forget_moved_tables(self) -> None:
        """Drop graphs with adapters if tables have moved since they were captured, or there are more of them."""
        version = sum(1 + table.num_moves for table in self._adapter_tables.values())
        if version != self._tables_version:
            self._tables_version = version
            for size in [size for size in self._seen if size.has_adapters]:
                self._seen.discard(size)
                self._graphs.pop(size, None)
