"""DraftModelDrafter: how much it reads per step, without a model."""

import numpy as np
import torch

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import AdmitKind
from pagoda.core.scheduler_output import RowInit, SchedulerOutput
from pagoda.worker.sampler import Sampler
from pagoda.worker.speculation.drafter import MAX_DRAFT_STEP_TOKENS
from pagoda.worker.speculation.models import DraftForward, DraftModelDrafter
from pagoda.worker.staging import LastTokens
from pagoda.worker.table_mirror import TableMirror

VOCAB = 16
MAX_LEN = 1024


class CountingForward(DraftForward):
    """Notes what it computes; its logits always favour token 3."""

    device = torch.device("cpu")

    def __init__(self, table: TableMirror) -> None:
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "calls", [])

    def compute(self, rows: np.ndarray, start: np.ndarray, num_new: np.ndarray) -> None:
        self.calls.append((rows.tolist(), start.tolist(), num_new.tolist()))  # type: ignore[attr-defined]

    def logits(
        self, rows: np.ndarray, start: np.ndarray, num_new: np.ndarray, last_tokens: LastTokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.compute(rows, start, num_new)
        logits = torch.nn.functional.one_hot(torch.full((len(rows),), 3), VOCAB).float()
        return logits, torch.from_numpy(rows.astype(np.int64))


def admit(table: TableMirror, row: int, length: int) -> None:
    none = np.empty(0, np.int32)
    tokens = np.arange(length, dtype=np.int32) % VOCAB
    init = RowInit(
        row, f"r{row}", 0, AdmitKind.NEW, tokens, length, 0, (none,), row, sampling=SamplingParams(temperature=0.0)
    )
    table.apply(SchedulerOutput(1, none, none, none, none, none, 0, admitted=(init,)))


def test_a_step_reads_a_bounded_number_of_tokens() -> None:
    target, own = TableMirror(4, MAX_LEN, 8, 1), TableMirror(4, MAX_LEN, 8, 1)
    forward = CountingForward(own)
    drafter = DraftModelDrafter(forward, Sampler(), 400)
    lengths = {0: 700, 1: 20, 2: 900}
    for row, length in lengths.items():
        admit(target, row, length)
    rows, most = np.array([0, 1, 2], np.int32), np.full(3, 2, np.int32)
    first_draft: dict[int, int] = {}
    for step in range(1, 12):
        forward.calls.clear()  # type: ignore[attr-defined]
        drafts = drafter.propose(target, rows, most)
        for row, draft in enumerate(drafts):
            if len(draft.tokens):
                first_draft.setdefault(row, step)
                assert draft.tokens.tolist() == [3, 3]
        calls = forward.calls  # type: ignore[attr-defined]
        assert all(sum(num_new) <= MAX_DRAFT_STEP_TOKENS for _, _, num_new in calls)
        reads = [sum(num_new) for called, _, num_new in calls if num_new != [1] * len(called)]
        assert sum(reads) <= MAX_DRAFT_STEP_TOKENS
        for row in rows:  # every row emits a token, which is not the drafted one
            target.record_tokens(np.array([row]), target.num_tokens[[row]], np.array([5]))
    assert first_draft[1] == 1, "a short text does not wait for long ones"
    assert first_draft[0] in (3, 4)
    assert first_draft[2] in (7, 8)


def test_every_token_is_read_once() -> None:
    target, own = TableMirror(2, MAX_LEN, 8, 1), TableMirror(2, MAX_LEN, 8, 1)
    forward = CountingForward(own)
    drafter = DraftModelDrafter(forward, Sampler(), 400)
    admit(target, 0, 600)
    for _ in range(3):
        drafter.propose(target, np.array([0], np.int32), np.ones(1, np.int32))
    spans = [(start[0], start[0] + count[0]) for _, start, count in forward.calls]  # type: ignore[attr-defined]
    assert spans == [(0, 256), (256, 512), (512, 600)]
    assert own.token_ids[0, :600].tolist() == target.token_ids[0, :600].tolist()
