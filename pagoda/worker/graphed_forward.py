"""GraphedForward: decode steps replayed as CUDA graphs, so that the host launches one thing instead of hundreds."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from pagoda.kernels.batch import ForwardBatch, KVLayer
from pagoda.kernels.low_rank.table import FillableLowRank
from pagoda.kernels.ops import Ops
from pagoda.layers.adapted_ops import ADAPTERS
from pagoda.models.base import Model
from pagoda.worker.decode_inputs import DecodeInputs
from pagoda.worker.forward_pass import EagerForward

logger = logging.getLogger("pagoda")


class Capture(Protocol):
    """Record the device's work in a call."""

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], object]]:
        """Return the tensor that `run` gives, and what computes it again from the same inputs."""
        ...


class CudaCapture:
    """Captures CUDA graphs, which share their memory: a result is valid until the next replay of any of them."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], object]]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        self._pool = graph.pool()
        return out, graph.replay


class _Size(NamedTuple):
    """What makes steps replays of one graph.   context: tokens."""

    num_rows: int
    context: int
    has_shared_prefix: bool
    has_adapters: bool

    @classmethod
    def of(cls, batch: ForwardBatch) -> "_Size":
        first = batch.metadata[0]
        return cls(
            batch.token_ids.shape[0], first.max_seq_len, first.shared_prefix is not None, ADAPTERS in batch.inputs
        )


class GraphedForward(EagerForward):
    """Runs batches in its `decode_inputs` as graphs, one for each padded number of rows and length of context.

    Steps whose rows share a prefix that is attended to once have graphs of their own, and so have steps with adapters;
    these are captured again when an adapter has made a table of weights move.
    Graphs read a step's inputs where its one copy to the device puts them, so that nothing is copied again.
    A graph is captured when its size comes for the second time; the first time, the same padded batch runs op by op,
    which also compiles its kernels. All other steps run op by op. Rows that fill a batch up write to the null block.
    Needs ops that neither wait for the device nor depend on the values in their inputs (TritonOps).
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        max_rows: int,
        max_model_len: int,
        device: torch.device,
        tables: Mapping[int, FillableLowRank] | None = None,
        capture: Capture | None = None,
    ) -> None:
        """max_rows: of the scheduler's table.   max_model_len: longest sequence, with positions past its end."""
        super().__init__(model, ops, tables)
        self._inputs = DecodeInputs(max_rows, max_model_len, device)
        self._capture = capture or CudaCapture()
        self._kv: Sequence[KVLayer] | None = None
        self._adapter_tables = tables if tables is not None else {}
        self._tables_version = 0
        self._graphs: dict[_Size, tuple[torch.Tensor, Callable[[], object]] | None] = {}

    @property
    def num_graphs(self) -> int:
        """Return how many graphs have been captured."""
        return sum(graph is not None for graph in self._graphs.values())

    @property
    def decode_inputs(self) -> DecodeInputs:
        return self._inputs

    def forward(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        # A padded batch returns the rows of its logits; in others there may be fewer logits than rows, or more.
        if not self._inputs.holds(batch):
            return super().forward(batch, kv)
        num_rows = batch.logits_index.shape[0]
        if kv is not self._kv:
            self._graphs, self._kv = {}, kv
        size = _Size.of(batch)
        if size.has_adapters:
            self._forget_moved_tables()
        if size not in self._graphs:
            self._graphs[size] = None
            return super().forward(batch, kv)[:num_rows]
        graph = self._graphs[size]
        if graph is None:
            try:
                graph = self._graphs[size] = self._capture(lambda: EagerForward.forward(self, batch, kv))
            except RuntimeError as why:
                logger.warning("decode steps run op by op, which is slower: no graph could be captured: %s", why)
                self._inputs.is_off, self._graphs = True, {}
                return super().forward(batch, kv)[:num_rows]
            logger.debug("captured a graph: %s", size)
        out, replay = graph
        replay()
        return out[:num_rows]

    def _forget_moved_tables(self) -> None:
        """Drop graphs with adapters if tables have moved since they were captured, or there are more of them."""
        version = sum(1 + table.num_moves for table in self._adapter_tables.values())
        if version != self._tables_version:
            self._tables_version = version
            self._graphs = {size: graph for size, graph in self._graphs.items() if not size.has_adapters}
