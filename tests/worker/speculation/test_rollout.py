"""roll_out: the tokens that decoding step by step gives, which the host reads once, or where penalties need them."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from pagoda.base.sampling_params import SamplingParams
from pagoda.kernels.torch_ops import TorchOps
from pagoda.worker.batch_rows import Padding
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.devices.cpu import CpuDevice
from pagoda.worker.forward_runner import ForwardRunner, Graphs
from pagoda.worker.model_runner import ModelRunner
from pagoda.worker.sampler import Drawn, Sampler
from pagoda.worker.speculation.models import DraftForward, roll_out
from pagoda.worker.table_mirror import TableMirror
from tests.worker.hand_made import GREEDY, PagedSumModel, expected_next, i32, row_init, step
from tests.worker.recalls import Recalls

CPU = torch.device("cpu")
BLOCK = 4
PROMPTS = {0: [3, 1, 4], 1: [9, 2], 2: [5]}
BLOCKS = {row: list(range(1 + 8 * row, 9 + 8 * row)) for row in PROMPTS}
READING = SamplingParams(temperature=0.0, bad_words_token_ids=((45, 30),))
"""Without the bad word, row 0 would go on with it."""
SAMPLED = SamplingParams(temperature=40.0, seed=7)


class Late(Sampler):
    """Notes how many draws had been made when the host read each."""

    def __init__(self) -> None:
        super().__init__()
        self.num_drawn = 0
        self.read_after: list[int] = []

    def draw(self, *args: Any) -> Drawn:
        self.num_drawn += 1
        drawn, late = super().draw(*args), self

        class Noted(torch.Tensor):
            def cpu(self) -> torch.Tensor:  # type: ignore[override]
                late.read_after.append(late.num_drawn)
                return self.as_subclass(torch.Tensor)

        return dataclasses.replace(drawn, best=drawn.best.as_subclass(Noted))


def admitted(params: SamplingParams) -> dict[str, Any]:
    return {"admitted": tuple(row_init(row, tokens, BLOCKS[row], params) for row, tokens in PROMPTS.items())}


def decoded(params: SamplingParams, model: PagedSumModel, count: int) -> dict[int, list[int]]:
    """Each row's next tokens, decoded step by step; fewer if logits are not finite."""
    cache = CacheEngine(model.kv_groups, BLOCK, 60, 0, torch.float32, CpuDevice())
    run = ModelRunner(ForwardRunner(model, TorchOps()), TableMirror(3, 64, BLOCK, 1), cache, CpuDevice())  # type: ignore[arg-type]
    found: dict[int, list[int]] = {row: [] for row in PROMPTS}
    spans, events = [(row, 0, len(tokens)) for row, tokens in PROMPTS.items()], admitted(params)
    for number in range(count):
        out = run.run(step(1 + number, spans, **(events if not number else {})))
        going = [span[0] for span in spans if span[0] not in out.failed]
        for (row, *_), tokens in zip(spans, out.sampled.tolist(), strict=True):
            if row in going:
                found[row].append(tokens[0])
        spans = [(row, len(PROMPTS[row]) + number, 1) for row in going]
    return found


def rolled_out(params: SamplingParams, model: PagedSumModel, most: np.ndarray, is_graphed: bool) -> Any:
    ops: Any = TorchOps()
    graphs = Graphs(ops, Padding(3, 64, max_query_len=2), Recalls()) if is_graphed else None
    forward = ForwardRunner(model, ops, recorder=graphs)  # type: ignore[arg-type]
    cache = CacheEngine(model.kv_groups, BLOCK, 60, 0, torch.float32, CpuDevice())
    target, own = (TableMirror(3, 64, BLOCK, 1) for _ in range(2))
    for table in (target, own):
        table.apply(step(1, [(0, 0, 1)], **admitted(params if table is target else GREEDY)))
    sampler, rows = Late(), i32(0, 1, 2)
    draft = DraftForward(forward, own, cache.layers)
    drawn = roll_out(draft, target, sampler, rows, i32(0, 0, 0), most)
    for row, tokens in enumerate(drawn):
        end = len(PROMPTS[row])
        for table in (target, own):
            assert table.token_ids[row, end : end + len(tokens)].tolist() == tokens.tolist()
    return [tokens.tolist() for tokens in drawn], sampler.read_after


@pytest.mark.parametrize("is_graphed", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, READING], ids=["greedy", "sampled", "reading"])
def test_drawn_as_decoded(params: SamplingParams, is_graphed: bool) -> None:
    most = i32(5, 1, 3)
    expected = decoded(params, PagedSumModel(), 5)
    got, read_after = rolled_out(params, PagedSumModel(), most, is_graphed)
    assert got == [expected[row][:count] for row, count in enumerate(most.tolist())]
    assert read_after == ([1, 2, 3, 4, 5] if params is READING else [5] * 5)
    if params is GREEDY:
        assert got[1] == [expected_next(PROMPTS[1])]
    else:
        assert got[0] != decoded(GREEDY, PagedSumModel(), 5)[0]


def test_a_row_ends_where_logits_are_not_finite() -> None:
    broken = decoded(GREEDY, PagedSumModel(), 3)[0][1]
    expected = decoded(GREEDY, PagedSumModel(broken), 5)
    got, _ = rolled_out(GREEDY, PagedSumModel(broken), i32(5, 5, 5), False)
    assert got == list(expected.values())
    assert len(got[0]) < 5
