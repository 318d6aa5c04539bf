"""ForwardPass: a model together with the ops it runs on, as called by the model runner."""

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch

from pagoda.base.model_spec import ModelSpec
from pagoda.base.pooling import PoolingPlan
from pagoda.core.kv_specs import KVGroupSpec
from pagoda.kernels.batch import ForwardBatch, KVLayer
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.replay.program import Program
from pagoda.kernels.replay.recorder import NotRecordable, record_forward
from pagoda.layers.adapted_ops import AdaptedOps, adapted_to
from pagoda.models.base import Model
from pagoda.ops.batch import ForwardBatch as AnyBatch
from pagoda.ops.batch import KVLayer as AnyKVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import LowRankTable, Tensor
from pagoda.worker.decode_inputs import DecodeInputs

logger = logging.getLogger("pagoda")


class ForwardPass(Protocol):
    """A loaded model that can be run."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]: ...

    @property
    def pooling(self) -> PoolingPlan: ...

    @property
    def generates(self) -> bool:
        """Whether the model has logits."""
        ...

    @property
    def num_token_types(self) -> int:
        """See Model."""
        ...

    @property
    def decode_inputs(self) -> DecodeInputs | None:
        """Where the inputs of steps of few tokens per row belong; None: anywhere."""
        ...

    def forward(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        """Return the final hidden states of the batch's tail, [num_tail, hidden]; write all tokens' K and V to `kv`.

        A batch in `decode_inputs` ends with padding tokens, and so does the result.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of rows of `forward`'s result: [S, hidden] -> float32 [S, vocab].

        adapters: int32 [S], the slots of the rows' adapters, if any has one.
        """
        ...

    def select_rows(self, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return rows of `forward`'s result: index int64 [S] -> [S, hidden]."""
        ...

    def embed(self, pooled: torch.Tensor, dtype: torch.dtype, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Return embeddings of pooled states, not yet normalised: float32 [S, hidden] -> [S, size].

        dtype: in which the model computes.   adapters: as in `compute_logits`.
        """
        ...

    def classify(self, pooled: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Return the outputs of the classification head: [S, hidden] in the model's dtype -> float32 [S, labels].

        adapters: as in `compute_logits`.
        """
        ...


class EagerForward:
    """Runs a model op by op. Models treat tensors as opaque; only here are they known to be torch tensors."""

    def __init__(self, model: Model, ops: Ops, tables: Mapping[int, LowRankTable] | None = None) -> None:
        """tables: of adapters, by identity of the weight they adapt; their owner adds to it between steps."""
        self.model = model
        self.ops = ops
        self._tables = tables if tables is not None else {}

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return self.model.kv_groups

    @property
    def pooling(self) -> PoolingPlan:
        return self.model.pooling

    @property
    def generates(self) -> bool:
        return self.model.generates

    @property
    def num_token_types(self) -> int:
        return self.model.num_token_types

    @property
    def decode_inputs(self) -> DecodeInputs | None:
        return None

    def forward(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        return cast(torch.Tensor, self._compute(self.ops, batch, kv))

    def _compute(self, ops: ForwardOps, batch: AnyBatch, kv: Sequence[AnyKVLayer]) -> Tensor:
        return self.model.forward(adapted_to(ops, self._tables, batch), batch, kv)

    def compute_logits(self, hidden: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        return cast(torch.Tensor, self.model.compute_logits(self._adapted(adapters), hidden))

    def select_rows(self, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.ops.select_rows(hidden, index))

    def embed(self, pooled: torch.Tensor, dtype: torch.dtype, adapters: torch.Tensor | None = None) -> torch.Tensor:
        if not self.model.dense:
            return pooled
        return cast(torch.Tensor, self.model.embed(self._adapted(adapters), pooled.to(dtype)))

    def classify(self, pooled: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        return cast(torch.Tensor, self.model.classify(self._adapted(adapters), pooled))

    def _adapted(self, adapters: torch.Tensor | None) -> ForwardOps:
        """Return the ops of a head whose rows use `adapters`."""
        if adapters is None:
            return self.ops
        return cast(ForwardOps, AdaptedOps(self.ops, self._tables, {adapters.shape[0]: adapters}))


class ReplayedForward(EagerForward):
    """Records the forward with the first batch of each kind; afterwards it runs in one native call, bit-identically.

    A forward that cannot be recorded runs op by op, with one warning per kind. A program contains the addresses of
    the KV cache it was recorded with; with another cache, everything is recorded again. The layers that adapters adapt
    are part of a program; when there are more of them, the programs with adapters are recorded again.
    """

    def __init__(self, model: Model, ops: NativeOps, tables: Mapping[int, LowRankTable] | None = None) -> None:
        super().__init__(model, cast(Ops, ops), tables)
        self._native = ops
        self._num_tables = 0
        self._kv: Sequence[KVLayer] | None = None
        self._programs: dict[object, Program | None] = {}

    @property
    def program(self) -> Program | None:
        """The program of batches without further inputs, or None if it was not recorded."""
        return self._programs.get(_PLAIN)

    def forward(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        if kv is not self._kv:
            self._programs, self._kv = {}, kv
        if len(self._tables) != self._num_tables:
            self._num_tables = len(self._tables)
            self._programs = {key: program for key, program in self._programs.items() if key == _PLAIN}
        key = _program_key(batch)
        if key not in self._programs:
            self._programs[key] = self._record(batch, kv)
        program = self._programs[key]
        return super().forward(batch, kv) if program is None else program.run(batch)[0]

    def _record(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Program | None:
        native = self._native
        try:
            program = record_forward(native.library, native.threads, self._compute, batch, kv)
        except NotRecordable as why:
            logger.warning("the model runs op by op, which is slower: its forward cannot be recorded: %s", why)
            return None
        logger.debug("recorded a forward of %d steps", program.num_steps)
        return program


_PLAIN = ((), 0)


def _program_key(batch: ForwardBatch) -> object:
    """Return the key of a batch's program: the names and types of further inputs, and the number of layers."""
    if not batch.inputs and not batch.num_layers:
        return _PLAIN
    inputs = (
        (name, given.domain, given.tensor.dtype, tuple(given.tensor.shape[1:])) for name, given in batch.inputs.items()
    )
    return tuple(sorted(inputs, key=lambda entry: entry[0])), batch.num_layers
