"""GraphedForward: decode steps replayed as CUDA graphs, so that the host launches one thing instead of hundreds."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from pagoda.kernels.batch import AttentionMetadata, ForwardBatch, KVLayer, Tail
from pagoda.kernels.ops import Ops
from pagoda.models.base import Model
from pagoda.ops.tensor import LowRankTable
from pagoda.worker.forward_pass import EagerForward

logger = logging.getLogger("pagoda")

_SHORTEST_CONTEXT = 1024  # tokens: shorter contexts share a graph
_MOST_ROWS = 512


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


def padded_rows(num_rows: int) -> int:
    """Return the rows of the graph for a batch: 1, 2, 4, then multiples of 8 to 64, of 16 to 256, and of 32."""
    if num_rows <= 4:
        return 4 if num_rows == 3 else num_rows
    step = 8 if num_rows <= 64 else 16 if num_rows <= 256 else 32
    return -(-num_rows // step) * step


def padded_context(seq_len: int, longest: int) -> int:
    """Return the context of the graph for a batch whose longest row has `seq_len` tokens: a power of two, or all."""
    return min(max(_SHORTEST_CONTEXT, 1 << (seq_len - 1).bit_length()), longest)


class GraphedForward(EagerForward):
    """Runs steps that only decode as graphs, one for each padded number of rows and length of context.

    Steps whose rows share a prefix that is attended to once have graphs of their own.
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
        tables: Mapping[int, LowRankTable] | None = None,
        capture: Capture | None = None,
    ) -> None:
        """max_rows: of the scheduler's table.   max_model_len: longest sequence, with positions past its end."""
        super().__init__(model, ops, tables)
        self._most_rows = min(padded_rows(max_rows), _MOST_ROWS)
        self._longest = max_model_len
        self._device = device
        self._capture = capture or CudaCapture()
        self._inputs: _DecodeInputs | None = None
        self._kv: Sequence[KVLayer] | None = None
        self._graphs: dict[tuple[int, int, bool], tuple[torch.Tensor, Callable[[], object]] | None] = {}
        self._is_off = False

    @property
    def num_graphs(self) -> int:
        """Return how many graphs have been captured."""
        return sum(graph is not None for graph in self._graphs.values())

    def forward(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        num_rows = batch.token_ids.shape[0]
        if self._is_off or num_rows > self._most_rows or not _only_decodes(batch):
            return super().forward(batch, kv)
        if kv is not self._kv:
            self._graphs, self._kv = {}, kv
        first = batch.metadata[0]
        if self._inputs is None:
            self._inputs = _DecodeInputs(
                self._most_rows, -(-self._longest // first.block_size), len(batch.metadata), self._device
            )
        shares = first.shared_prefix is not None
        size = padded_rows(num_rows), padded_context(first.max_seq_len, self._longest), shares
        self._inputs.fill(batch, size[0])
        padded = self._inputs.batch(*size, first.block_size)
        if size not in self._graphs:
            self._graphs[size] = None
            return super().forward(padded, kv)[:num_rows]
        graph = self._graphs[size]
        if graph is None:
            try:
                graph = self._graphs[size] = self._capture(lambda: EagerForward.forward(self, padded, kv))
            except RuntimeError as why:
                logger.warning("decode steps run op by op, which is slower: no graph could be captured: %s", why)
                self._is_off, self._graphs = True, {}
                return super().forward(batch, kv)
            logger.debug("captured a graph of %d rows and %d tokens of context, with a shared prefix: %s", *size)
        out, replay = graph
        replay()
        return out[:num_rows]


def _only_decodes(batch: ForwardBatch) -> bool:
    """Return whether every row has one token, whose logits are needed, and nothing else is special about the batch."""
    is_plain = not batch.inputs and not batch.variant and not batch.num_layers
    return is_plain and batch.metadata[0].max_query_len == 1 and batch.tail.metadata is batch.metadata


class _DecodeInputs:
    """The tensors that all graphs read: each uses the first of their rows."""

    def __init__(self, num_rows: int, num_blocks: int, num_groups: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._token_ids, self._positions = zeros(num_rows), zeros(num_rows)
        self._seq_lens = torch.ones_like(self._positions)
        self._slots = [zeros(num_rows, dtype=torch.int64) for _ in range(num_groups)]
        self._tables = [zeros(num_rows, num_blocks) for _ in range(num_groups)]
        self._shared = zeros(num_groups, 2)
        self._query_start = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._index = torch.arange(num_rows, device=device)

    def fill(self, batch: ForwardBatch, num_rows: int) -> None:
        """Copy a batch, and give the rows from its end to `num_rows` one token in the null block."""
        count = batch.token_ids.shape[0]
        self._token_ids[:count].copy_(batch.token_ids)
        self._positions[:count].copy_(batch.positions)
        self._seq_lens[:count].copy_(batch.metadata[0].seq_lens)
        for metadata, slots, table in zip(batch.metadata, self._slots, self._tables, strict=True):
            slots[:count].copy_(metadata.slot_mapping)
            table[:count, : metadata.block_table.shape[1]].copy_(metadata.block_table)
            slots[count:num_rows].zero_()
        for metadata, shared in zip(batch.metadata, self._shared, strict=True):
            if metadata.shared_prefix is not None:
                shared.copy_(metadata.shared_prefix)
        self._positions[count:num_rows].zero_()
        self._seq_lens[count:num_rows].fill_(1)

    def batch(self, num_rows: int, context: int, shares: bool, block_size: int) -> ForwardBatch:
        """Return the first `num_rows` rows, with tables for `context` tokens.   shares: rows share a prefix."""
        num_blocks = -(-context // block_size)
        metadata = tuple(
            AttentionMetadata(
                query_start=self._query_start[: num_rows + 1],
                seq_lens=self._seq_lens[:num_rows],
                block_table=table[:num_rows, :num_blocks],
                slot_mapping=slots[:num_rows],
                block_size=block_size,
                max_query_len=1,
                max_seq_len=context,
                shared_prefix=shared if shares else None,
            )
            for slots, table, shared in zip(self._slots, self._tables, self._shared, strict=True)
        )
        index = self._index[:num_rows]
        return ForwardBatch(
            self._token_ids[:num_rows], self._positions[:num_rows], metadata, Tail(index, metadata), index
        )
