"""roll_out: draw tokens one after the other from a model that drafts, for several rows at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagoda.core.scheduler_output import NO_INTS, SchedulerOutput
from pagoda.kernels.batch import KVLayer
from pagoda.worker.adapters import Adapters
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.forward_pass import ForwardPass
from pagoda.worker.inputs import build_inputs
from pagoda.worker.sampler import Sampler


@dataclass(frozen=True, slots=True, eq=False)
class DraftForward:
    """A forward pass that drafts.

    table: the token ids and block tables that it reads.   kv: its caches.
    num_layers: number of first layers to run; 0 for all.   adapters: of the rows, which `forward` adapts; or None.
    """

    forward: ForwardPass
    table: DeviceTable
    kv: Sequence[KVLayer]
    device: torch.device
    num_layers: int = 0
    adapters: Adapters | None = None

    def compute(self, rows: np.ndarray, start: np.ndarray, num_new: np.ndarray) -> None:
        """Write the KV of tokens start .. start + num_new - 1 of each row; int32 [num_rows] each."""
        self._run(rows, start, num_new, NO_INTS)

    def logits(self, rows: np.ndarray, start: np.ndarray, num_new: np.ndarray) -> torch.Tensor:
        """As `compute`; return the logits after the last token of each row, float32 [num_rows, V]."""
        logits = self._run(rows, start, num_new, np.arange(len(rows), dtype=np.int32))
        assert logits is not None
        return logits

    def _run(
        self, rows: np.ndarray, start: np.ndarray, num_new: np.ndarray, samples: np.ndarray
    ) -> torch.Tensor | None:
        step = SchedulerOutput(0, rows, start, num_new, rows[samples], samples, int(num_new.sum()))
        slots = self.adapters.slots_of(rows) if self.adapters is not None else None
        inputs = build_inputs(self.table, step, self.device, slots, decode_inputs=self.forward.decode_inputs)
        hidden = inputs.run(self.forward, self.kv, self.num_layers)
        if not len(samples):
            return None
        of_logits = inputs.logits_adapters
        return self.forward.compute_logits(
            hidden[: inputs.num_logits], None if of_logits is None else of_logits[: inputs.num_logits]
        )


def roll_out(
    draft: DraftForward, target: DeviceTable, sampler: Sampler, rows: np.ndarray, start: np.ndarray, most: np.ndarray
) -> list[np.ndarray]:
    """Return most[i] tokens (int32) for each of `rows`, drawn one after the other.

    start: int32 [num_rows], first position whose KV `draft` does not have; all tokens up to the end are known.
    Draws use the row's own parameters and random numbers, by position: where both models agree on the probabilities,
    they draw the same tokens. Tokens are written to `target` after its known ones, where a step's drafts belong.
    """
    ends = target.num_tokens[rows].copy()
    drawn_of: list[list[int]] = [[] for _ in range(len(rows))]
    active = np.arange(len(rows))
    num_new = ends - start
    while active.size:
        at = rows[active]
        drawn = sampler.sample(draft.logits(at, start, num_new), target, at, ends[active])
        continues = drawn.finite & (most[active] > 1 + ends[active] - target.num_tokens[at])
        for i, token, finite in zip(active.tolist(), drawn.tokens.tolist(), drawn.finite.tolist(), strict=True):
            if finite:
                drawn_of[i].append(token)
        for table in (target, draft.table):
            table.token_ids[at, ends[active]] = drawn.tokens
        active = active[continues]
        start = ends[active]
        ends[active] += 1
        num_new = np.ones(len(active), np.int32)
    return [np.array(tokens, np.int32) for tokens in drawn_of]
