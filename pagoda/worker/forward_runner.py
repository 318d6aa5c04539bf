"""ForwardRunner: from a batch to hidden states and logits.

Op by op is the definition. On a CPU, the same calls are recorded once and run in one native call; on a GPU, steps of
few tokens are replayed as graphs. Both give the same bits.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, cast

import torch

from pagoda.kernels.batch import ForwardBatch, KVLayer
from pagoda.kernels.low_rank.table import FillableLowRank
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.replay.program import Program
from pagoda.kernels.replay.recorder import NotRecordable, record_forward
from pagoda.layers.adapted_ops import ADAPTERS, LOGITS_ADAPTERS, AdaptedOps, adapted_to
from pagoda.models.base import Model
from pagoda.ops.batch import ForwardBatch as AnyBatch
from pagoda.ops.batch import KVLayer as AnyKVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import LowRankTable, Tensor
from pagoda.worker.batch_rows import PaddedSize, Padding
from pagoda.worker.devices import Device
from pagoda.worker.staging import StagingBatch, StepInputs

if TYPE_CHECKING:
    from pagoda.worker.devices.device import Capture, Graph

logger = logging.getLogger("pagoda")

_CPU = torch.device("cpu")

_MOST_GRAPHS = 256
"""Each takes memory for its result and its launches, which the KV pools leave free."""

_WAIT_GROWTH = 8
"""By how much longer a size waits for its next capture each time that one has failed."""

_Results: TypeAlias = tuple[torch.Tensor, ...]
_Compute: TypeAlias = Callable[[ForwardOps, AnyBatch, Sequence[AnyKVLayer]], tuple[Tensor, ...]]


class Computed(NamedTuple):
    """What a forward pass returns.

    hidden: final hidden states of the batch's output rows, [num_outputs, hidden].
    logits: of its logits_index, float32 [num_logits, vocab]; None if that is empty, or the model has none.
    A padded batch has padding at the end of both. Both may be overwritten by the next forward pass.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None = None


class Recorder(Protocol):
    """A faster way to run a forward than op by op."""

    @property
    def padding(self) -> Padding | None:
        """Which batches have to be padded for it; None: none."""
        ...

    def run(
        self, compute: _Compute, batch: ForwardBatch, kv: Sequence[KVLayer], size: PaddedSize | None
    ) -> _Results | None:
        """Return what `compute` gives, from a recording that may be made now; None: this batch has no recording.

        size: to which the batch is padded.
        """
        ...


class ForwardRunner:
    """A loaded model, the ops that it runs on, and its staging batch.

    Models treat tensors as opaque; only here are they known to be torch tensors.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        device: torch.device = _CPU,
        tables: Mapping[int, LowRankTable] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """tables: of adapters, by identity of the weight they adapt; their owner adds to it between steps.

        recorder: None: everything runs op by op.
        """
        self.model, self.ops = model, ops
        self.recorder = recorder
        padding = recorder.padding if recorder is not None else None
        self.staging = StagingBatch(device, model.num_token_types, padding)
        self._tables = tables if tables is not None else {}

    @property
    def program(self) -> Program | None:
        """The recorded program of steps without further inputs, or None if there is none."""
        return self.recorder.plain if isinstance(self.recorder, Programs) else None

    def run(self, batch: ForwardBatch, kv: Sequence[KVLayer], size: PaddedSize | None = None) -> Computed:
        """Compute a batch, and write the K and V of all its tokens to `kv`.   size: to which it is padded."""
        results = None
        if self.recorder is not None:
            has_head = size is None or size.gives_all_logits
            results = self.recorder.run(self._compute if has_head else self._hidden, batch, kv, size)
            if results is not None and not has_head:
                results = cast(_Results, (*results, *self._logits(cast(ForwardOps, self.ops), batch, results[0])))
        return self.run_op_by_op(batch, kv) if results is None else Computed(*results)

    def run_op_by_op(self, batch: ForwardBatch, kv: Sequence[KVLayer], ops: object = None) -> Computed:
        """As `run`, without a recording.   ops: in place of the own, whose results they give."""
        return Computed(*cast(_Results, self._compute(cast(ForwardOps, ops or self.ops), batch, kv)))

    def _compute(self, ops: ForwardOps, batch: AnyBatch, kv: Sequence[AnyKVLayer]) -> tuple[Tensor, ...]:
        (hidden,) = self._hidden(ops, batch, kv)
        return hidden, *self._logits(ops, batch, hidden)

    def _hidden(self, ops: ForwardOps, batch: AnyBatch, kv: Sequence[AnyKVLayer]) -> tuple[Tensor, ...]:
        return (self.model.forward(adapted_to(ops, self._tables, batch), batch, kv),)

    def _logits(self, ops: ForwardOps, batch: AnyBatch, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the logits of a batch, if it has any."""
        if not self.model.generates or not batch.logits_index.shape[0]:
            return ()
        given = batch.inputs.get(LOGITS_ADAPTERS)
        head_ops = self._adapted(ops, None if given is None else given.tensor)
        return (self.model.compute_logits(head_ops, ops.select_rows(hidden, batch.logits_index)),)

    def states_of(self, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that prompt log-probabilities, then pooled rows, need: [num_states, hidden].

        hidden: of `inputs`, see Computed.
        """
        if inputs.states_index is None:
            return hidden
        return cast(torch.Tensor, self.ops.select_rows(hidden, inputs.states_index))

    def compute_logits(self, hidden: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of final hidden states: [S, hidden] -> float32 [S, vocab].

        adapters: int32 [S], the slots of the rows' adapters, if any has one.
        """
        return cast(torch.Tensor, self.model.compute_logits(self._adapted(self.ops, adapters), hidden))

    def embed(self, pooled: torch.Tensor, dtype: torch.dtype, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Return embeddings of pooled states, not yet normalised: float32 [S, hidden] -> [S, size].

        dtype: in which the model computes.   adapters: as in `compute_logits`.
        """
        if not self.model.dense:
            return pooled
        return cast(torch.Tensor, self.model.embed(self._adapted(self.ops, adapters), pooled.to(dtype)))

    def classify(self, pooled: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Return the outputs of the classification head: [S, hidden] in the model's dtype -> float32 [S, labels].

        adapters: as in `compute_logits`.
        """
        return cast(torch.Tensor, self.model.classify(self._adapted(self.ops, adapters), pooled))

    def _adapted(self, ops: ForwardOps, adapters: Tensor | None) -> ForwardOps:
        """Return the ops of a head whose rows use `adapters`."""
        if adapters is None:
            return ops
        return cast(ForwardOps, AdaptedOps(ops, self._tables, {adapters.shape[0]: adapters}))


class Programs:
    """Records the forward with the first batch of each kind; afterwards it runs in one native call.

    A kind is the names and types of further inputs, and the number of layers. A forward that cannot be recorded runs op
    by op, with one warning per kind. A program contains the addresses of the KV cache it was
    recorded with; with another cache, everything is recorded again. The layers that adapters adapt are part of a
    program; when there are more of them, the programs with adapters are recorded again.
    """

    padding = None

    def __init__(self, ops: NativeOps, tables: Mapping[int, LowRankTable] | None = None) -> None:
        """tables: see ForwardRunner."""
        self._ops = ops
        self._tables = tables if tables is not None else {}
        self._num_tables = 0
        self._kv: Sequence[KVLayer] | None = None
        self._programs: dict[object, Program | None] = {}

    @property
    def plain(self) -> Program | None:
        """The program of steps without further inputs, or None if it was not recorded."""
        return self._programs.get(_PLAIN)

    def run(
        self, compute: _Compute, batch: ForwardBatch, kv: Sequence[KVLayer], size: PaddedSize | None
    ) -> _Results | None:
        """See Recorder."""
        if kv is not self._kv:
            self._programs, self._kv = {}, kv
        if len(self._tables) != self._num_tables:
            self._num_tables = len(self._tables)
            self._programs = {key: program for key, program in self._programs.items() if key == _PLAIN}
        key = _kind(batch)
        if key not in self._programs:
            self._programs[key] = self._record(compute, batch, kv)
        program = self._programs[key]
        return None if program is None else program.run(batch)

    def _record(self, compute: _Compute, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Program | None:
        try:
            program = record_forward(self._ops.library, self._ops.threads, compute, batch, kv)
        except NotRecordable as why:
            logger.warning("the model runs op by op, which is slower: its forward cannot be recorded: %s", why)
            return None
        logger.debug("recorded a forward of %d steps", program.num_steps)
        return program


_PLAIN = ((), 0)


def _kind(batch: ForwardBatch) -> object:
    """Return the key of a batch's program: the names and types of further inputs, and the number of layers."""
    if not batch.inputs and not batch.num_layers:
        return _PLAIN
    inputs = (
        (name, given.domain, given.tensor.dtype, tuple(given.tensor.shape[1:])) for name, given in batch.inputs.items()
    )
    return tuple(sorted(inputs, key=lambda entry: entry[0])), batch.num_layers


class _GraphKey(NamedTuple):
    """What makes steps replays of one graph."""

    size: PaddedSize
    has_shared_prefix: bool
    has_adapters: bool
    num_layers: int


class Graphs:
    """Runs padded batches as graphs, so that the host launches one thing, not hundreds.

    These steps have few tokens: decodes, drafts to verify, drafts of the first layers, short prompts and short parts of
    long ones next to all of these. Where not every token gives logits, the head is computed after the graph.
    Steps whose rows share a prefix that is attended to once have graphs of their own, and so have steps with adapters;
    these are captured again when an adapter has made a table of weights move.
    Graphs read a step's inputs where its one copy to the device puts them, so that nothing is copied again.
    A graph is captured when its size comes for the second time; the first time, the same padded batch runs op by op,
    which also compiles its kernels. Where a capture fails, as for want of memory, steps of that size run op by op until
    the next try. Of too many graphs, the least recently used is dropped. All other steps run op by op. Rows that fill a
    batch up write to the null block.
    Needs ops that neither wait for the device nor depend on the values in their inputs (TritonOps).
    """

    def __init__(
        self, ops: Ops, padding: Padding, capture: "Capture", tables: Mapping[int, FillableLowRank] | None = None
    ) -> None:
        """tables: see ForwardRunner.   capture: not shared with other forwards."""
        self.padding = padding
        self._ops, self._capture = ops, capture
        self._kv: Sequence[KVLayer] | None = None
        self._tables = tables if tables is not None else {}
        self._tables_version = 0
        self._graphs: OrderedDict[_GraphKey, Graph] = OrderedDict()  # the least recently used first
        self._waits: dict[_GraphKey, int] = {}  # how often each that has come is still to run op by op
        self._failures: Counter[_GraphKey] = Counter()

    @property
    def num_graphs(self) -> int:
        """Return how many graphs have been captured."""
        return len(self._graphs)

    def run(
        self, compute: _Compute, batch: ForwardBatch, kv: Sequence[KVLayer], size: PaddedSize | None
    ) -> _Results | None:
        """See Recorder."""
        if size is None:
            return None
        if kv is not self._kv:
            self._graphs.clear()
            self._waits.clear()
            self._kv = kv
        has_shared_prefix = batch.metadata[0].shared_prefix is not None
        key = _GraphKey(size, has_shared_prefix, ADAPTERS in batch.inputs, batch.num_layers)
        if key.has_adapters:
            self._forget_moved_tables()
        graph = self._graphs.get(key)
        if graph is None:
            wait = self._waits.setdefault(key, 1)
            if wait:
                self._waits[key] = wait - 1
                return None
            graph = self._captured(key, compute, batch, kv)
        if graph is None:
            return None
        self._graphs.move_to_end(key)
        results, replay = graph
        replay()
        return results

    def _captured(
        self, key: _GraphKey, compute: _Compute, batch: ForwardBatch, kv: Sequence[KVLayer]
    ) -> "Graph | None":
        """Capture a graph and keep it. If that fails, return None, and wait longer with each failure to try again."""
        try:
            graph = self._capture(lambda: cast(_Results, compute(cast(ForwardOps, self._ops), batch, kv)))
        except RuntimeError as why:
            level = logging.DEBUG if self._failures else logging.WARNING
            # A record of the log keeps the error's tensors alive, so it gets its text.
            logger.log(
                level,
                "steps of one size run op by op for now, which is slower: no graph could be captured: %s",
                str(why),
            )
            self._failures[key] += 1
            self._waits[key] = _WAIT_GROWTH ** self._failures[key]
            return None
        logger.debug("captured a graph: %s", key)
        self._graphs[key] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            dropped, _ = self._graphs.popitem(last=False)
            del self._waits[dropped]
        return graph

    def _forget_moved_tables(self) -> None:
        """Drop graphs with adapters if tables have moved since they were captured, or there are more of them."""
        version = sum(1 + table.num_moves for table in self._tables.values())
        if version != self._tables_version:
            self._tables_version = version
            for key in [key for key in self._waits if key.has_adapters]:
                del self._waits[key]
                self._graphs.pop(key, None)


def make_forward(
    model: Model,
    ops: Ops,
    device: Device,
    max_rows: int,
    max_len: int,
    max_query_len: int,
    tables: Mapping[int, FillableLowRank] | None = None,
) -> ForwardRunner:
    """Return a model with the fastest way to run it that there is.

    max_rows, max_len: of the table of its rows.   max_query_len: most new tokens of a row in a step that is small
    enough for a graph.   tables: of LoRA adapters, by the id of the weight they adapt.
    """
    recorder: Recorder | None = None
    capture = device.make_capture(ops)
    if capture is not None and model.kv_groups:
        recorder = Graphs(ops, Padding(max_rows, max_len, max_query_len), capture, tables)
    elif isinstance(ops, NativeOps):
        recorder = Programs(ops, tables)
    return ForwardRunner(model, ops, device.device, tables, recorder)
