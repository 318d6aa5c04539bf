"""ForwardPass: a model together with the ops it runs on, as called by the model runner."""

import logging
from collections.abc import Sequence
from typing import Protocol, cast

import torch

from pagoda.base.model_spec import ModelSpec
from pagoda.core.kv_specs import KVGroupSpec
from pagoda.kernels.batch import ForwardBatch, KVLayer
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.replay.program import Program
from pagoda.kernels.replay.recorder import NotRecordable, record_forward
from pagoda.models.base import Model

logger = logging.getLogger("pagoda")


class ForwardPass(Protocol):
    """A loaded model that can be run."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]: ...

    def forward(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        """Return the final hidden states of the batch's tail, [num_tail, hidden]; write all tokens' K and V to `kv`."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows of `forward`'s result: [S, hidden] -> float32 [S, vocab]."""
        ...

    def select_rows(self, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return rows of `forward`'s result: index int64 [S] -> [S, hidden]."""
        ...


class EagerForward:
    """Runs a model op by op. Models treat tensors as opaque; only here are they known to be torch tensors."""

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
    """Records the forward with the first batch of each variant; afterwards it runs in one native call, bit-identically.

    A forward that cannot be recorded runs op by op, with one warning per variant. A program contains the addresses of
    the KV cache it was recorded with; with another cache, everything is recorded again.
    """

    def __init__(self, model: Model, ops: NativeOps) -> None:
        super().__init__(model, cast(Ops, ops))
        self._native = ops
        self._kv: Sequence[KVLayer] | None = None
        self._programs: dict[object, Program | None] = {}

    @property
    def program(self) -> Program | None:
        """The program of the plain variant, or None if it was not recorded."""
        return self._programs.get(_PLAIN)

    def forward(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        if kv is not self._kv:
            self._programs, self._kv = {}, kv
        key = _variant(batch)
        if key not in self._programs:
            self._programs[key] = self._record(batch, kv)
        program = self._programs[key]
        return super().forward(batch, kv) if program is None else program.run(batch)[0]

    def _record(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Program | None:
        native = self._native
        try:
            program = record_forward(native.library, native.threads, self.model.forward, batch, kv)
        except NotRecordable as why:
            logger.warning("the model runs op by op, which is slower: its forward cannot be recorded: %s", why)
            return None
        logger.debug("recorded a forward of %d steps", program.num_steps)
        return program


_PLAIN = ("", (), 0)


def _variant(batch: ForwardBatch) -> object:
    """Return the key of a batch's program: variant, the names and types of further inputs, and the number of layers."""
    if not batch.inputs and not batch.variant and not batch.num_layers:
        return _PLAIN
    inputs = (
        (name, given.domain, given.tensor.dtype, tuple(given.tensor.shape[1:])) for name, given in batch.inputs.items()
    )
    return batch.variant, tuple(sorted(inputs, key=lambda entry: entry[0])), batch.num_layers
