"""A model together with the ops it runs on: what the model runner calls."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, cast

import torch

from pagoda.base.model_spec import ModelSpec
from pagoda.core.kv_specs import KVGroupSpec
from pagoda.kernels.batch import ForwardBatch, KVLayer, Tail
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.replay.program import Program
from pagoda.kernels.replay.recording_ops import NotRecordable, RecordingOps
from pagoda.models.base import Model
from pagoda.ops.forward import ForwardOps

logger = logging.getLogger("pagoda")

_RECORDED_TOKENS, _RECORDED_TAIL = 3, 2  # any two numbers: a program holds for all


class ForwardPass(Protocol):
    """A loaded model that can be run."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]: ...

    def forward(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        """Final hidden states of the batch's tail, [num_tail, hidden]; K and V of all its tokens go to `kv`."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result [S, hidden] -> float32 [S, vocab]."""
        ...

    def select_rows(self, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result, int64 [S] -> [S, hidden]."""
        ...


class EagerForward:
    """Runs a model op by op. The one place where the opaque tensors of a model turn out to be torch's."""

    def __init__(self, model: Model, ops: Ops) -> None:
        self.model = model
        self.ops = ops

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return self.model.kv_groups

    def forward(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        return cast(torch.Tensor, self.model.forward(self.ops, batch, kv))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.model.compute_logits(self.ops, hidden))

    def select_rows(self, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.ops.select_rows(hidden, index))


class ReplayedForward(EagerForward):
    """Records the forward with its first batch; from then on it runs in one native call, with the same bits.

    A forward that cannot be recorded runs op by op, and the log says so once. The program holds the addresses of the
    KV cache it was recorded with (`kv`); with another cache it is recorded again.
    """

    def __init__(self, model: Model, ops: NativeOps, dtype: torch.dtype) -> None:
        super().__init__(model, cast(Ops, ops))
        self._native, self._dtype = ops, dtype
        self.kv: Sequence[KVLayer] | None = None
        self.program: Program | None = None

    def forward(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        if kv is not self.kv:
            self.program = self._record(batch, kv)
            self.kv = kv
        return super().forward(batch, kv) if self.program is None else self.program.run(batch)

    def _record(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Program | None:
        # The model gets its own copies: groups may share one metadata object, and the recorder tells them apart by
        # identity.
        metadata, tail_metadata = (tuple(map(replace, groups)) for groups in (batch.metadata, batch.tail.metadata))
        # torch.empty and not empty_like, which for tensors without data imports a computer algebra system (0.3 s).
        tokens, positions = (torch.empty(_RECORDED_TOKENS, dtype=torch.int32, device="meta") for _ in range(2))
        index = torch.empty(_RECORDED_TAIL, dtype=torch.int64, device="meta")
        stand_in = ForwardBatch(tokens, positions, metadata, Tail(index, tail_metadata), batch.logits_index)
        recorder = RecordingOps(self._native, self._dtype, stand_in)
        try:
            result = self.model.forward(cast(ForwardOps, recorder), stand_in, kv)
            program = recorder.program(cast(torch.Tensor, result))
        except NotRecordable as why:
            logger.warning("the model runs op by op, more slowly, since its forward cannot be recorded: %s", why)
            return None
        logger.debug("recorded a forward of %d steps", program.num_steps)
        return program
