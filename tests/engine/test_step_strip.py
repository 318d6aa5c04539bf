"""Steps are noted while somebody looks: none is lost because a step took long, and none is noted for nobody."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagoda.base.config import CacheConfig, PreemptionMode
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine import step_strip
from pagoda.engine.flight_recorder import FlightRecorder, packed_key
from pagoda.engine.step_strip import LOOK_S, StepStrip
from pagoda.executors.fake import FakeExecutor
from tests.engine.driver import make_core, request


class Executed:
    """An executor whose steps take as long as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.step_s = 0.0
        monkeypatch.setattr(step_strip, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def submit(self, output: SchedulerOutput) -> "Future[Any]":
        future: Future[ModelRunnerOutput | None] = Future()
        self.now_s += self.step_s
        future.set_result(None)
        return future

    def run(self, strip: StepStrip, step: int, step_s: float, num_rows: int = 1) -> None:
        rows = np.zeros(num_rows, np.int32)
        self.step_s = step_s
        strip.submit(SchedulerOutput(step, rows, rows, rows + 1, rows, rows, num_rows))


def test_long_steps_use_up_nothing_of_the_time_for_which_steps_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executed(monkeypatch)
    strip = StepStrip(executor)  # type: ignore[arg-type]
    executor.run(strip, 1, 0.1)  # nobody has looked
    strip.after(0.0)
    for step, step_s in enumerate((0.1, 1.5 * LOOK_S, 0.1, 0.9 * LOOK_S, 0.9 * LOOK_S, 0.1), start=2):
        executor.run(strip, step, step_s)
    assert [note.step for note in strip.after(0.0)] == [2, 3, 4, 5, 6, 7]


def test_steps_are_no_longer_noted_when_nobody_looks_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executed(monkeypatch)
    strip = StepStrip(executor)  # type: ignore[arg-type]
    strip.after(0.0)
    for step in range(1, 101):
        executor.run(strip, step, 0.1, num_rows=step % 2)
    noted = strip.after(0.0)
    assert [(note.step, note.number) for note in noted][:3] == [(1, 1), (3, 2), (5, 3)]  # of no rows: none, not counted
    assert 10 < len(noted) < 20


def test_the_tokens_of_steps_are_those_of_prompts_and_those_sampled(tmp_path: Path) -> None:
    """Also in a forked row whose last request ended its prompt where this one is now."""
    recorder = FlightRecorder(tmp_path / "flight", 8, 2, create=True)
    core = make_core(
        lambda rows: FakeExecutor(rows, 257, 4, vocab_size=1000),
        cache=CacheConfig(block_size=4, enable_prefix_caching=False),
    )
    core.strip = StepStrip(core.strip._executor, recorder)
    for number, (num_prompt, num_seqs, max_tokens) in enumerate([(12, 1, 2), (12, 1, 2), (5, 2, 20)]):
        params = SamplingParams(n=num_seqs, max_tokens=max_tokens, ignore_eos=True)
        core.add_request(request(number, list(range(num_prompt)), params))
        if number != 0:
            while core.has_unfinished_requests():
                core.step()
    assert sum(core.strip.take_step_tokens()) == 2 * (12 + 2) + (5 + 2 * 20)
    assert core.strip.take_step_tokens() == ()
    record = recorder.read()
    assert record.keys == {packed_key((0, 2))}
    assert 0 < record.steps_begun == record.steps_ended


def test_a_token_is_counted_once_though_its_row_comes_back_from_host_memory(tmp_path: Path) -> None:
    """Nothing of a request that was swapped is computed again: as many tokens as in a pool with room for both."""
    counts: list[int] = []
    for num_blocks in (40, 6):
        core = make_core(
            lambda rows: FakeExecutor(rows, 257, 4, vocab_size=1000),
            cache=CacheConfig(block_size=4, enable_prefix_caching=False, watermark=0.0),
            num_blocks=num_blocks,
            num_host_blocks=20,
            preemption_mode=PreemptionMode.SWAP,
        )
        core.strip = StepStrip(core.strip._executor, FlightRecorder(tmp_path / str(num_blocks), 8, 2, create=True))
        for number in range(2):
            core.add_request(request(number, [number] * 7, SamplingParams(max_tokens=12, ignore_eos=True)))
        while core.has_unfinished_requests():
            core.step()
        assert (core.make_stats().swap_outs > 0) == (num_blocks == 6)
        counts.append(sum(core.strip.take_step_tokens()))
    assert counts == [2 * (7 + 12)] * 2
