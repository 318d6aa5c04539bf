"""The loop around scheduler and executor, on executors that compute nothing."""

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagoda.base.config import CacheConfig, PreemptionMode, SchedulingMode
from pagoda.base.errors import PagodaError, RequestError, WorkerDied
from pagoda.base.sampling_params import SamplingParams, SpeechRules
from pagoda.core.events import Admitted, Ended, FirstToken, Queued
from pagoda.core.request import LoraRef, Reason, Request, RequestKey, RequestStatus
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.preparations import ExecutorPreparations
from pagoda.engine.step_strip import StepNote
from pagoda.executors.fake import FakeExecutor, fake_token
from tests.engine.driver import Answers, drive, make_core, request

MAX_LEN = 256


def fake(rows: int) -> FakeExecutor:
    return FakeExecutor(rows, MAX_LEN + 1, 4, vocab_size=1000)


def expected(prompt: list[int], count: int, seed: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_token(np.array(tokens), seed, 1000))
    return tokens[len(prompt) :]


def prompts(count: int, shared: int = 9) -> list[list[int]]:
    rng = np.random.default_rng(count)
    head = rng.integers(0, 1000, shared).tolist()
    return [[*head, *rng.integers(0, 1000, rng.integers(1, 25)).tolist()] for _ in range(count)]


SETTINGS = [
    {},
    {"max_num_seqs": 2},
    {"max_num_seqs": 3, "max_num_batched_tokens": 5},
    {"scheduling_mode": SchedulingMode.PHASED},
    {"num_blocks": 24, "preemption_mode": PreemptionMode.RECOMPUTE},
    {"num_blocks": 24, "preemption_mode": PreemptionMode.SWAP, "num_host_blocks": 40},
    {"pipeline_depth": 2},
    {"pipeline_depth": 2, "async_scheduling": True},
    {"pipeline_depth": 3, "async_scheduling": True, "num_blocks": 24},
    {"cache": CacheConfig(block_size=4, enable_prefix_caching=False)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_any_schedule_gives_each_request_its_own_tokens(settings: dict[str, object]) -> None:
    core = make_core(fake, **settings)  # type: ignore[arg-type]
    texts = prompts(7)
    requests = [
        request(i, text, SamplingParams(max_tokens=5 + 3 * i, n=1 + (i % 3 == 0)), seed=10 * i)
        for i, text in enumerate(texts)
    ]
    answers = drive(core, requests)
    for i, text in enumerate(texts):
        for sequence in range(1 + (i % 3 == 0)):
            assert answers.tokens[f"r{i}", sequence] == expected(text, 5 + 3 * i, 10 * i + sequence)
            assert answers.finishes[f"r{i}", sequence].status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert not core.has_unfinished_requests()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sequences_go_on_from_what_each_has_emitted(settings: dict[str, object]) -> None:
    """As after the death of an engine: one had ended at a stop string, and one has no token yet."""
    core = make_core(fake, **{**settings, "max_num_seqs": 3})  # type: ignore[arg-type]
    (text,) = prompts(1)
    whole = [expected(text, 12, 40 + sequence) for sequence in range(3)]
    emitted = (tuple(whole[0][:7]), tuple(whole[1][:3]), ())
    core.add_request(replace(request(0, text, SamplingParams(max_tokens=12, n=3), seed=40), prior_output=emitted))
    core.finish_sequence((0, 0), 1)
    answers = Answers()
    while core.has_unfinished_requests():
        for outputs in core.step().values():
            answers.take(outputs, ["r0"])
    assert answers.tokens == {("r0", 0): whole[0][7:], ("r0", 2): whole[2]}
    assert answers.finishes.keys() == {("r0", 0), ("r0", 1), ("r0", 2)}
    core.shutdown()


def test_sequences_end_by_stop_token_eos_and_from_outside() -> None:
    text = prompts(1)[0]
    truth = expected(text, 30, 0)
    core = make_core(fake)
    requests = [
        request(0, text, SamplingParams(max_tokens=30, stop_token_ids=(truth[4],))),
        request(1, text, SamplingParams(max_tokens=30), eos=(truth[6],)),
        request(2, text, SamplingParams(max_tokens=30)),
    ]

    def stop_third(num_steps: int, answers: Answers) -> None:
        if len(answers.tokens.get(("r2", 0), ())) == 10:
            core.finish_sequence((0, 2), 0, RequestStatus.FINISHED_STOPPED)

    answers = drive(core, requests, stop_third)
    assert answers.tokens["r0", 0] == truth[:5]
    assert answers.finishes["r0", 0].stop_reason == truth[4]
    assert answers.tokens["r1", 0] == truth[:7]
    assert answers.finishes["r1", 0].status is RequestStatus.FINISHED_STOPPED
    assert answers.tokens["r2", 0] == truth[:10]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_request_ends_without_output_and_others_continue(depth: int) -> None:
    core = make_core(fake, pipeline_depth=depth, async_scheduling=depth > 1)
    texts = prompts(3)
    requests = [request(i, text, SamplingParams(max_tokens=12)) for i, text in enumerate(texts)]
    seen: list[int] = []

    def abort(num_steps: int, answers: Answers) -> None:
        if num_steps == 5:
            core.abort([(0, 1), (0, 99)])
            seen.append(len(answers.tokens["r1", 0]))

    answers = drive(core, requests, abort)
    assert len(answers.tokens["r1", 0]) == seen[0]
    for i in (0, 2):
        assert answers.tokens[f"r{i}", 0] == expected(texts[i], 12, 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_are_told_apart_by_client_and_handle_whatever_their_ids(depth: int) -> None:
    """Two clients use the same ids and handles, and one an id again whose first request still runs."""
    core = make_core(fake, pipeline_depth=depth, async_scheduling=depth > 1)
    text = prompts(1)[0]
    sampling = SamplingParams(max_tokens=12)
    asked = [(client, handle) for client in (0, 1) for handle in (5, 6)]
    for seed, (client, handle) in enumerate(asked):
        core.add_request(replace(request(handle, text, sampling, seed), request_id="same", client_index=client))
    found: dict[tuple[int, int], list[int]] = {key: [] for key in asked}
    ended: list[tuple[int, int]] = []
    num_aborted = -1
    while core.has_unfinished_requests():
        for client, outputs in core.step().items():
            for handle, token in zip(outputs.handles.tolist(), outputs.token_ids.tolist(), strict=True):
                found[client, handle].append(token)
            ended += [(client, finish.handle) for finish in outputs.ends]
        if num_aborted < 0 and len(found[0, 5]) == 4:
            core.abort([(0, 6), (2, 5)])
            core.finish_sequence((1, 5), 0)
            num_aborted = len(found[0, 6])
    assert found[0, 5] == expected(text, 12, 0)
    assert found[1, 6] == expected(text, 12, 3)
    assert 0 < len(found[0, 6]) == num_aborted < 12
    assert len(found[1, 5]) < 12
    assert sorted(ended) == asked


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    core = make_core(fake)
    good = SamplingParams(max_tokens=2)
    for number, (prompt, sampling, what) in enumerate(
        [
            ([], good, "empty"),
            ([5, 1000], good, "prompt token id 1000"),
            ([-1], good, "prompt token id -1"),
            ([5], SamplingParams(allowed_token_ids=(1, 1000)), "allowed_token_ids: id 1000"),
            ([5], SamplingParams(logit_bias=((2000, 1.0),)), "logit_bias: id 2000"),
            ([5], SamplingParams(bad_words_token_ids=((1, 3000),)), "bad_words_token_ids: id 3000"),
            ([5], SamplingParams(stop_token_ids=(4000,)), "stop_token_ids: id 4000"),
            ([5], SamplingParams(logprob_token_ids=(1, 4500)), "logprob_token_ids: id 4500"),
            ([5], SamplingParams(forced_eos_token_id=5000), "forced_eos_token_id: id 5000"),
            ([5], SamplingParams(speech=SpeechRules(suppressed=(1, 6000))), "speech: id 6000"),
        ]
    ):
        with pytest.raises(RequestError, match=what):
            core.add_request(request(number, prompt, sampling))
    assert not core.has_unfinished_requests()
    core.add_request(request(9, [5], good))
    with pytest.raises(PagodaError):
        core.add_request(request(9, [6], good))


class FailingExecutor(FakeExecutor):
    """The step that runs a row which ends with `bad_token` raises; or, where `fail_rows`, that row alone fails."""

    def __init__(self, rows: int, bad_token: int, fail_rows: bool = False, error: Exception | None = None) -> None:
        super().__init__(rows, MAX_LEN + 1, 4, vocab_size=1000)
        self.bad_token = bad_token
        self.fail_rows = fail_rows
        self.error = error or ValueError("kernel fell over")

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        done = super().submit(output)
        result = done.result()
        ends = (output.start + output.num_new)[output.sample_index] - 1
        bad = self._table.token_ids[output.sample_rows, ends] == self.bad_token
        if not bad.any():
            return done
        future: Future[ModelRunnerOutput] = Future()
        if self.fail_rows:
            failed = dict.fromkeys(output.sample_rows[bad].tolist(), "not finite")
            sampled = np.where(bad[:, None], -1, result.sampled)
            future.set_result(
                ModelRunnerOutput(output.step, sampled, np.where(bad, 0, 1).astype(np.int32), failed=failed)
            )
        else:
            future.set_exception(self.error)
        return future


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_that_fails_ends_alone(depth: int) -> None:
    core = make_core(
        lambda rows: FailingExecutor(rows, 7, fail_rows=True), pipeline_depth=depth, async_scheduling=depth > 1
    )
    texts = [[1, 2, 3], [4, 5, 7], [6, 7, 8]]
    answers = drive(core, [request(i, text, SamplingParams(max_tokens=6)) for i, text in enumerate(texts)])
    finish = answers.finishes["r1", 0]
    assert finish.status is RequestStatus.FINISHED_ERROR
    assert finish.message == "not finite"
    assert ("r1", 0) not in answers.tokens
    for i in (0, 2):
        assert answers.tokens[f"r{i}", 0] == expected(texts[i], 6, 0)


@pytest.mark.parametrize("error", [ValueError, MemoryError])
@pytest.mark.parametrize(("depth", "n"), [(1, 1), (2, 1), (3, 2)])
def test_a_step_that_raises_ends_its_requests_and_no_other(depth: int, n: int, error: type[Exception]) -> None:
    fails = error("kernel fell over")
    core = make_core(
        lambda rows: FailingExecutor(rows, 7, error=fails),
        max_num_seqs=2 * n,
        pipeline_depth=depth,
        async_scheduling=depth == 3,
    )
    texts = [[1, 2, 3], [4, 5, 7], [6, 7, 8], [9, 9, 9]]
    answers = drive(core, [request(i, text, SamplingParams(max_tokens=6, n=n)) for i, text in enumerate(texts)])
    for sequence in range(n):
        for i in (0, 1):
            assert answers.finishes[f"r{i}", sequence].status is RequestStatus.FINISHED_ERROR
            assert "kernel fell over" in (answers.finishes[f"r{i}", sequence].message or "")
            assert (f"r{i}", sequence) not in answers.tokens
        for i in (2, 3):
            assert answers.tokens[f"r{i}", sequence] == expected(texts[i], 6, sequence)
    # What the failed step should have put into the cache is not there.
    again = drive(core, [request(0, [1, 2, 3, 4, 5, 6, 8, 8, 8], SamplingParams(max_tokens=3))])
    assert again.tokens["r0", 0] == expected([1, 2, 3, 4, 5, 6, 8, 8, 8], 3, 0)


def test_the_outputs_of_a_step_that_raises_say_what_the_scheduler_has_taken() -> None:
    core = make_core(lambda rows: FailingExecutor(rows, 7))
    core.add_request(request(0, [1, 2, 7], SamplingParams(max_tokens=6)))
    (outputs,) = core.step().values()
    assert [end.status for end in outputs.ends] == [RequestStatus.FINISHED_ERROR]
    assert outputs.scheduler_s == core.scheduler_s > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prompt_len", [3, 40], ids=["whole", "chunked"])
def test_a_step_that_raises_while_a_request_forks_ends_all_its_sequences(depth: int, prompt_len: int) -> None:
    core = make_core(
        lambda rows: FailingExecutor(rows, 7), max_num_seqs=8, max_num_batched_tokens=16, pipeline_depth=depth
    )
    texts = [[*[5] * (prompt_len - 1), 7], [6, 7, 8]]
    answers = drive(core, [request(i, text, SamplingParams(max_tokens=6, n=3)) for i, text in enumerate(texts)])
    for sequence in range(3):
        assert answers.finishes["r0", sequence].status is RequestStatus.FINISHED_ERROR
        assert ("r0", sequence) not in answers.tokens
        assert answers.finishes["r1", sequence].status is not RequestStatus.FINISHED_ABORTED
    assert not core.has_unfinished_requests()


def test_after_a_step_that_raises_in_mid_prompt_the_sequences_without_a_row_start_over() -> None:
    core = make_core(lambda rows: FailingExecutor(rows, 7), max_num_seqs=8, max_num_batched_tokens=16)
    texts = [[6, 5, 7], [5] * 40]
    answers = drive(core, [request(i, text, SamplingParams(max_tokens=6, n=3)) for i, text in enumerate(texts)])
    for key in (("r0", 0), ("r0", 1), ("r0", 2), ("r1", 0)):
        assert answers.finishes[key].status is RequestStatus.FINISHED_ERROR
        assert key not in answers.tokens
    for sequence in (1, 2):
        assert answers.tokens["r1", sequence] == expected(texts[1], 6, sequence)


def test_sequences_that_fork_from_a_failed_prefix_are_computed_again() -> None:
    core = make_core(lambda rows: FailingExecutor(rows, 7), pipeline_depth=2, async_scheduling=True)
    head = list(range(10, 30))
    core.add_request(request(0, [*head, 7], SamplingParams(max_tokens=6)))
    assert core.step() == {}
    core.add_request(request(1, [*head, 8], SamplingParams(max_tokens=6, n=3)))
    answers = Answers()
    while core.has_unfinished_requests():
        for outputs in core.step().values():
            answers.take(outputs, ["r0", "r1"])
    assert answers.finishes["r0", 0].status is RequestStatus.FINISHED_ERROR
    for sequence in range(3):
        assert answers.tokens["r1", sequence] == expected([*head, 8], 6, sequence)


def test_requests_that_shared_a_prefix_with_a_failed_step_are_computed_again() -> None:
    core = make_core(lambda rows: FailingExecutor(rows, 7), pipeline_depth=2, async_scheduling=True)
    head = list(range(10, 30))
    core.add_request(request(0, [*head, 7], SamplingParams(max_tokens=6)))
    assert core.step() == {}
    core.add_request(request(1, [*head, 8], SamplingParams(max_tokens=6)))  # finds the blocks of the step in flight
    core.add_request(request(2, [5, 6, 8], SamplingParams(max_tokens=6)))
    answers = Answers()
    while core.has_unfinished_requests():
        for outputs in core.step().values():
            answers.take(outputs, ["r0", "r1", "r2"])
    assert answers.finishes["r0", 0].status is RequestStatus.FINISHED_ERROR
    assert "kernel fell over" in (answers.finishes["r0", 0].message or "")
    assert ("r0", 0) not in answers.tokens
    assert answers.tokens["r1", 0] == expected([*head, 8], 6, 0)
    assert answers.tokens["r2", 0] == expected([5, 6, 8], 6, 0)


def test_a_dead_worker_is_reported_to_the_caller() -> None:
    core = make_core(lambda rows: FailingExecutor(rows, 7, error=WorkerDied("gone")))
    with pytest.raises(WorkerDied, match="gone"):
        drive(core, [request(0, [5, 7], SamplingParams(max_tokens=6))])


def test_shutdown_with_steps_in_flight() -> None:
    core = make_core(fake, pipeline_depth=2, async_scheduling=True)
    core.add_request(request(0, [1, 2, 3], SamplingParams(max_tokens=50)))
    assert core.step() == {}
    core.shutdown()
    core.shutdown()


def test_stats_and_cache_reset() -> None:
    core = make_core(fake)
    drive(core, [request(0, list(range(20)), SamplingParams(max_tokens=3))])
    drive(core, [request(0, list(range(20)), SamplingParams(max_tokens=3))])
    assert core.make_stats().prefix_hits > 0  # type: ignore[attr-defined]
    assert core.reset_prefix_cache()
    core.add_request(request(1, list(range(20)), SamplingParams(max_tokens=9)))
    core.step()
    assert not core.reset_prefix_cache()


def test_the_decision_log_can_be_read_when_it_is_enabled() -> None:
    core = make_core(fake, decision_log_steps=4)
    drive(core, [request(0, [5, 6, 7], SamplingParams(max_tokens=2, temperature=0))])
    assert {type(event) for event in core.explain} == {Queued, Admitted, FirstToken, Ended}
    assert core.explain.of_request("r0")
    without_log = make_core(fake)
    drive(without_log, [request(0, [5, 6, 7], SamplingParams(max_tokens=2, temperature=0))])
    assert list(without_log.explain) == []


def test_the_decision_log_tells_requests_apart_that_had_the_same_handle() -> None:
    core = make_core(fake, decision_log_steps=3)
    greedy = SamplingParams(max_tokens=2, temperature=0)
    for name in ("first", "second"):
        core.add_request(replace(request(7, [5, 6, 7], greedy), request_id=name))
        while core.has_unfinished_requests():
            core.step()
    assert [type(event) for event in core.explain.of_request("first")] == [Ended]
    assert [type(event) for event in core.explain.of_request("second")] == [Queued, Admitted, FirstToken, Ended]
    core.add_request(request(1, [5, 6, 7], SamplingParams(max_tokens=9)))
    while core.has_unfinished_requests():
        core.step()
    assert not core.explain.of_request("second")


def test_steps_are_noted_with_the_prompt_tokens_of_requests_that_ran_before() -> None:
    core, notes = make_core(fake, max_num_seqs=4, max_num_batched_tokens=8), list[StepNote]()
    core.add_request(request(0, list(range(20)), SamplingParams(max_tokens=3, n=2, ignore_eos=True)))
    core.step()
    core.strip.on_step = notes.append
    core.step()
    core.step()
    core.step()
    core.strip.on_step = None
    core.step()
    assert [(note.num_prompt_tokens, note.num_sampled) for note in notes] == [(8, 0), (4, 2), (0, 2)]


@pytest.mark.parametrize("call", ["load", "unload"])
def test_an_adapter_that_is_loaded_or_unloaded_takes_no_events_from_clients(call: str) -> None:
    core = make_core(fake)
    core._preparations = ExecutorPreparations(core._executor, 4, 2)
    lora = LoraRef("a", "/a", "a")
    core.add_request(request(0, [5, 6, 7], SamplingParams(max_tokens=9)))
    core.step()
    core.abort([(0, 0)])
    (core.begin_load_adapter if call == "load" else core.unload_adapter)(lora)
    assert core.has_unfinished_requests(), "its client does not know yet"
    (ended,) = core.step()[0].ends
    assert (ended.request_id, ended.status) == ("r0", RequestStatus.FINISHED_ABORTED)
    assert not core.has_unfinished_requests()


class LoadsAdapter:
    """Preparations that are ready when the test says so."""

    def __init__(self) -> None:
        self.is_ready = False

    def why_not_ready(self, request: Request) -> Reason | None:
        return None if self.is_ready else Reason.ADAPTER

    def take_woken(self) -> list[RequestKey]:
        return [(0, 0)] if self.is_ready else []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_what_computes_nothing_is_no_step_and_takes_no_time_of_steps() -> None:
    """Rounds while a request waits for its adapter: the time of a step would come out too low."""
    core, loads = make_core(fake), LoadsAdapter()
    core._preparations = core._scheduler._state.preparations = loads  # type: ignore[attr-defined,assignment]
    core.add_request(request(0, [5, 6, 7], SamplingParams(max_tokens=3)))
    for _ in range(5):
        core.step()
    idle_s = core.idle_s
    assert (core.strip.num_steps, idle_s > 0) == (0, True)
    loads.is_ready = True
    while core.has_unfinished_requests():
        core.step()
    assert (core.strip.num_steps, core.idle_s) == (3, idle_s)
