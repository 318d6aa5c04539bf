"""ReplayModel: a model whose forward is recorded on its first batch and from then on runs in one native call."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from pagoda.base.model_spec import ModelSpec
from pagoda.core.kv_specs import KVGroupSpec
from pagoda.kernels.batch import ForwardBatch, Tail
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import KVLayer, Ops
from pagoda.kernels.replay.program import Program
from pagoda.kernels.replay.recording_ops import NotRecordable, RecordingOps
from pagoda.models.base import Model

logger = logging.getLogger("pagoda")

_RECORDED_TOKENS, _RECORDED_TAIL = 3, 2  # any two numbers: a program holds for all


class ReplayModel:
    """As the model it wraps (see `models.base.Model`), bit for bit, without Python between the ops of a forward.

    A forward that cannot be recorded runs op by op, which is said once in the log. The program holds the addresses of
    the KV cache it was recorded with (`kv`); another cache is recorded anew.
    """

    def __init__(self, model: Model, ops: NativeOps, dtype: torch.dtype) -> None:
        self.model = model
        self.ops: Ops = ops
        self._native, self._dtype = ops, dtype
        self.kv: Sequence[KVLayer] | None = None
        self.program: Program | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return self.model.kv_groups

    def forward(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        if kv is not self.kv:
            self.program = self._record(batch, kv)
            self.kv = kv
        return self.model.forward(batch, kv) if self.program is None else self.program.run(batch)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden)

    def _record(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Program | None:
        # The model gets copies of its own, since groups may share one metadata object and are told apart by identity.
        metadata, tail_metadata = (tuple(map(replace, groups)) for groups in (batch.metadata, batch.tail.metadata))
        # torch.empty and not empty_like: of tensors without data that one imports a computer algebra system, 0.3 s.
        tokens, positions = (torch.empty(_RECORDED_TOKENS, dtype=torch.int32, device="meta") for _ in range(2))
        index = torch.empty(_RECORDED_TAIL, dtype=torch.int64, device="meta")
        stand_in = ForwardBatch(tokens, positions, metadata, Tail(index, tail_metadata), batch.logits_index)
        recorder = RecordingOps(self._native, self._dtype, stand_in)
        before, self.model.ops = self.model.ops, recorder
        try:
            program = recorder.program(self.model.forward(stand_in, kv))
        except NotRecordable as why:
            logger.warning("the model runs op by op, more slowly, since its forward cannot be recorded: %s", why)
            return None
        finally:
            self.model.ops = before
        logger.debug("recorded a forward of %d steps", program.num_steps)
        return program
