"""roll_out: draw tokens one after the other from a model that drafts, for several rows at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagoda.core.scheduler_output import NO_INTS, SchedulerOutput
from pagoda.kernels.batch import KVLayer
from pagoda.worker.adapters import Adapters
from pagoda.worker.forward_runner import ForwardRunner
from pagoda.worker.sampler import Drawn, Sampler
from pagoda.worker.staging import LastTokens, StepInputs, draw_params
from pagoda.worker.table_mirror import TableMirror


@dataclass(frozen=True, slots=True, eq=False)
class DraftForward:
    """A forward pass that drafts.

    table: the token ids and block tables that it reads.   kv: its caches.
    num_layers: run only so many of the first layers; 0: all.   adapters: of the rows, which `forward` adapts; or None.
    """

    forward: ForwardRunner
    table: TableMirror
    kv: Sequence[KVLayer]
    num_layers: int = 0
    adapters: Adapters | None = None

    @property
    def device(self) -> torch.device:
        return self.forward.staging.device

    def compute(self, rows: np.ndarray, start: np.ndarray, num_new: np.ndarray) -> None:
        """Write the KV of tokens start .. start + num_new - 1 of each row; int32 [num_rows] each."""
        self._run(rows, start, num_new, NO_INTS, None)

    def logits(
        self, rows: np.ndarray, start: np.ndarray, num_new: np.ndarray, last_tokens: LastTokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `compute`; return the logits after the last token of each row, float32 [num_rows, V].

        Return also `rows` on the device, int64.   last_tokens: may have tokens that `table` does not have yet.
        """
        inputs, logits = self._run(rows, start, num_new, np.arange(len(rows), dtype=np.int32), last_tokens)
        assert logits is not None
        return logits[: len(rows)], inputs.draw_index

    def _run(
        self,
        rows: np.ndarray,
        start: np.ndarray,
        num_new: np.ndarray,
        samples: np.ndarray,
        last_tokens: LastTokens | None,
    ) -> tuple[StepInputs, torch.Tensor | None]:
        step = SchedulerOutput(0, rows, start, num_new, rows[samples], samples, int(num_new.sum()))
        slots = self.adapters.slots_of(rows) if self.adapters is not None else None
        inputs = self.forward.staging.fill(self.table, step, slots, last_tokens=last_tokens, num_layers=self.num_layers)
        return inputs, self.forward.run(inputs.batch, self.kv, inputs.size).logits


def roll_out(
    draft: DraftForward, target: TableMirror, sampler: Sampler, rows: np.ndarray, start: np.ndarray, most: np.ndarray
) -> list[np.ndarray]:
    """Return most[i] tokens (int32), at least 1, for each of `rows`, drawn one after the other.

    There are fewer if logits are not finite.
    start: int32 [num_rows], first position whose KV `draft` does not have; all tokens up to the end are known.
    Draws use the row's own parameters and random numbers, by position: where both models agree on the probabilities,
    they draw the same tokens. Tokens are written to `target` after its known ones, where a step's drafts belong.
    They stay on the device until the last is drawn, unless the host needs earlier ones: for penalties, bad words.
    """
    drawn = _RolledOut(draft, target, rows, most)
    last_tokens = LastTokens(len(target.num_tokens), draft.device)
    for number in range(int(most.max())):
        active = np.flatnonzero(most > number)
        at = rows[active]
        ends = target.num_tokens[at] + number
        begin = ends - 1 if number else start[active]
        logits, on_device = draft.logits(at, begin, ends - begin, last_tokens)
        tokens = sampler.draw(logits, target, at, ends, None, draw_params(target, at, ends))
        last_tokens.keep(at, ends, on_device, tokens.tokens)
        drawn.add(active, tokens)
        if target.reads_output[at].any():
            drawn.collect()
    drawn.collect()
    return drawn.tokens


class _RolledOut:
    """Tokens that are drawn step by step, and collected when the host needs them."""

    def __init__(self, draft: DraftForward, target: TableMirror, rows: np.ndarray, most: np.ndarray) -> None:
        self._tables = target, draft.table
        self._rows = rows
        self._ends = target.num_tokens[rows]
        self._tokens = np.zeros((len(rows), int(most.max())), np.int32)
        self._num_finite = most.copy()  # tokens up to the first whose logits were not
        self._number = 0  # tokens of each row that have been collected
        self._pending: list[tuple[np.ndarray, Drawn]] = []

    def add(self, active: np.ndarray, drawn: Drawn) -> None:
        """Add a token for some of the rows.   active: indices of those."""
        self._pending.append((active, drawn))

    def collect(self) -> None:
        """Wait for the tokens, and write them to the tables."""
        for active, drawn in self._pending:
            tokens, finite = (tensor.cpu().numpy() for tensor in (drawn.tokens, drawn.finite))
            self._tokens[active, self._number] = tokens
            self._num_finite[active] = np.where(
                finite, self._num_finite[active], np.minimum(self._num_finite[active], self._number)
            )
            for table in self._tables:
                table.token_ids[self._rows[active], self._ends[active] + self._number] = tokens
            self._number += 1
        self._pending.clear()

    @property
    def tokens(self) -> list[np.ndarray]:
        return [row[:count] for row, count in zip(self._tokens, self._num_finite.tolist(), strict=True)]
