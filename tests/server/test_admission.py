"""Limits: what is over them waits in line, and is refused with the reason; what leaves makes room."""

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request as HttpRequest

from pagoda.base.errors import RequestError
from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.server_config import ServerLimits
from pagoda.core.request import MediaItem, Request
from pagoda.engine.wire import EngineStats
from pagoda.metrics.observed_requests import ObservedRequests
from pagoda.metrics.prometheus import CACHE_LABELS, ServerMetrics, write_metrics
from pagoda.server.admission import PRIOR_OUTPUT_TOKENS, Admission, Place, Refusal, batch_key
from pagoda.server.errors import ApiError
from pagoda.server.generation import Generation
from pagoda.server.request_starter import RawPrompts, RequestStarter
from pagoda.server.request_state import RequestState
from tests.server.live import FAKE_ENGINE, FAKE_FLAGS, serving
from tests.server.turn_apis import BODIES, Turn, asked, num_output_tokens


@contextlib.contextmanager
def admitted(admission: Admission, requests: int, tokens: int, key: str = "") -> Iterator[Place]:
    with contextlib.closing(admission.enter(requests, tokens, key)) as place:
        yield place


def refuse(admission: Admission, requests: int, tokens: int, key: str = "") -> str:
    with pytest.raises(Refusal) as caught, admitted(admission, requests, tokens, key):
        pass
    assert caught.value.retry_after_s >= 1
    return caught.value.reason


def test_requests_and_tokens_are_bounded_and_released() -> None:
    admission = Admission(ServerLimits(max_queued_requests=2, max_queued_tokens=100), 0.0)
    with admitted(admission, 1, 60, ""):
        assert refuse(admission, 1, 41) == "tokens"
        with admitted(admission, 1, 40, ""):
            assert refuse(admission, 1, 0) == "requests"
        assert (admission.num_requests, admission.num_tokens) == (1, 60)
    assert (admission.num_requests, admission.num_tokens) == (0, 0)


def test_counts_say_how_long_there_was_no_request_but_lines_of_batches() -> None:
    admission = Admission(ServerLimits(), 0.0)
    with admitted(admission, 1, 1, batch_key("a")):
        assert admission.counts.idle_s == math.inf
        with admitted(admission, 1, 1, "a"):
            assert admission.counts.idle_s == 0.0  # as long as it runs
        assert 0 <= admission.counts.idle_s < math.inf
        before_s = admission.counts.idle_s
    assert admission.counts.idle_s >= before_s


def test_bytes_for_encoders_are_bounded_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.server.admission.MAX_HELD_MEDIA_BYTES", 100)
    admission = Admission(ServerLimits(), 0.0)
    with admitted(admission, 1, 1) as first, admitted(admission, 1, 1) as second:
        first.hold(150)  # at any size, if there is no other
        with pytest.raises(Refusal) as caught:
            second.hold(1)
        assert caught.value.reason == "media"
        second.hold(0)  # a text
        first.close()
        second.hold(100)
        assert admission.num_media_bytes == 100
    assert admission.num_media_bytes == 0


def test_log_probabilities_of_all_requests_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.server.admission.MAX_HELD_LOGPROBS", 100)
    admission = Admission(ServerLimits(), 0.0)
    with admitted(admission, 1, 1) as first, admitted(admission, 1, 1) as second:
        first.hold_logprobs(150)  # as many as a request may have, if there is no other
        second.hold_logprobs(0)
        with pytest.raises(Refusal, match="150 log-probabilities, this one to 1, of 100 in all") as caught:
            second.hold_logprobs(1)
        assert caught.value.reason == "logprobs"
        first.close()
        second.hold_logprobs(100)
        assert admission.num_logprobs == 100
    assert admission.num_logprobs == 0


def test_log_probabilities_that_outputs_may_come_to_are_counted_until_they_end(tmp_path: Path) -> None:
    """As many requests as take 8 million together are admitted, whatever they have so far; streams are not counted."""
    body = {"prompt": "x", "max_tokens": 2000, "n": 64, "logprobs": 20, "ignore_eos": True}  # 2.7 million
    with serving(tmp_path, *FAKE_ENGINE, stepped=True) as server, ThreadPoolExecutor(3) as threads:
        with server.steps.held_after(2):
            asked = [threads.submit(server.post, "/v1/completions", body) for _ in range(3)]
            deadline_s = time.monotonic() + 60
            while server.load()["live_tokens"] != 3 * (1 + 64 * PRIOR_OUTPUT_TOKENS):  # all have been prepared
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            status, answer = server.post("/v1/completions", {**body, "prompt": "y"})
            assert status == 429
            assert "may come to 8064000 log-probabilities, this one to 2688000" in answer["error"]["message"]
            assert server.post("/abort_requests", {})[0] == 200
        assert [one.result()[0] for one in asked] == [200] * 3
        server.wait_idle()
        assert server.post("/v1/completions", {**body, "max_tokens": 2})[0] == 200


def test_what_is_held_is_replaced_by_what_is_known_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.server.admission.MAX_HELD_MEDIA_BYTES", 100)
    admission = Admission(ServerLimits(), 0.0)
    with admitted(admission, 1, 1) as first:
        for size in (150, 170, 140, 60):
            first.hold(size)
            assert admission.num_media_bytes == size
        with admitted(admission, 1, 1) as second:
            second.hold(40)
            first.hold(50)
            with pytest.raises(Refusal, match="it holds 40 bytes"):
                first.hold(61)
            assert admission.num_media_bytes == 90


def test_who_waits_to_hold_bytes_gets_those_that_are_freed_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.server.admission.MAX_HELD_MEDIA_BYTES", 100)

    async def main(timeout_s: float) -> None:
        admission = Admission(ServerLimits(), timeout_s)
        first, second, third = (admission.enter(1, 1, "") for _ in range(3))
        first.hold(80)
        await second.wait_to_hold(10)
        waiting = asyncio.create_task(second.wait_to_hold(60))
        also = asyncio.create_task(third.wait_to_hold(40))
        await asyncio.sleep(0.01)
        assert waiting.done() == also.done() == (timeout_s < 1)
        first.close()
        await asyncio.gather(waiting, also)
        assert admission.num_media_bytes == 100

    asyncio.run(main(60.0))
    with pytest.raises(Refusal, match="the server is full"):
        asyncio.run(main(1e-6))


def test_images_are_counted_before_their_prompt_queues_for_a_thread() -> None:
    admission = Admission(ServerLimits(), 0.0)
    item = MediaItem("a", 0, 1, np.zeros(25, np.float32))
    counted: list[int] = []

    async def prepare_params(params: object) -> object:
        counted.append(admission.num_media_bytes)
        raise RequestError("stop here", "prompt")

    limits = SimpleNamespace(longest_prompt=10, max_model_len=10, of_request=None)
    llm: Any = SimpleNamespace(
        input_processor=SimpleNamespace(limits=limits), text=SimpleNamespace(prepare_params=prepare_params)
    )
    http = HttpRequest({"type": "http", "state": RequestState()}, lambda: asyncio.sleep(60))  # type: ignore[arg-type]
    prompts = RawPrompts([{"prompt_token_ids": [1], "media": (item,)}, [1]], [PoolingParams()] * 2, (), None)
    starter = RequestStarter(llm, admission, ServerMetrics("m", EngineStats, dict.fromkeys(CACHE_LABELS, "")), b"")
    with admitted(admission, 1, 1) as place, pytest.raises(RequestError, match="stop here"):
        asyncio.run(starter.begin(http, place, prompts, "a"))
    assert counted == [100]


def test_an_abort_between_the_requests_of_a_job_ends_it() -> None:
    async def abort(engine_ids: Sequence[str]) -> list[str]:
        return []

    llm: Any = SimpleNamespace(abort=abort)
    admission = Admission(ServerLimits(), 0.0)
    starter = RequestStarter(llm, admission, ServerMetrics("m", EngineStats, dict.fromkeys(CACHE_LABELS, "")), b"")
    with admission.enter(1, 1, "").at_end as at_end:
        place: Any = SimpleNamespace(at_end=at_end)
        new_id, other = (starter.reserve_job("k", name, place) for name in ("audio-1", "audio-2"))
        new_id()
        assert asyncio.run(starter.abort({"audio-1"}, "another key")) == []
        new_id()
        assert asyncio.run(starter.abort({"audio-1"}, "k")) == ["audio-1"]
        with pytest.raises(RequestError, match="the transcription was aborted"):
            new_id()
        other()
    assert asyncio.run(starter.abort(None, None)) == []


def test_an_abort_of_a_job_ends_no_other_whose_id_begins_alike() -> None:
    async def abort(engine_ids: Sequence[str]) -> list[str]:
        return list(engine_ids)

    llm: Any = SimpleNamespace(abort=abort)
    admission = Admission(ServerLimits(), 0.0)
    starter = RequestStarter(llm, admission, ServerMetrics("m", EngineStats, dict.fromkeys(CACHE_LABELS, "")), b"")
    with admission.enter(1, 1, "").at_end as at_end:
        place: Any = SimpleNamespace(at_end=at_end)
        new_id, other = (starter.reserve_job("k", name, place) for name in ("audio-X", "audio-X-1"))
        assert new_id() != other()
        assert asyncio.run(starter.abort({"audio-X"}, "k")) == ["audio-X"]
        other()
        with pytest.raises(RequestError, match="the transcription was aborted"):
            new_id()


def test_a_place_is_released_after_an_error() -> None:
    admission = Admission(ServerLimits(max_queued_requests=1), 0.0)
    with pytest.raises(KeyError), admitted(admission, 1, 1, ""):
        raise KeyError
    with admitted(admission, 1, 1, ""):
        pass


def test_one_request_larger_than_the_token_limit_runs_alone() -> None:
    admission = Admission(ServerLimits(max_queued_tokens=10), 0.0)
    with admitted(admission, 1, 50, ""):
        assert refuse(admission, 1, 1) == "tokens"


@pytest.mark.parametrize("queue_timeout_s", [0.0, 60.0])
def test_one_request_larger_than_the_token_limit_is_refused_at_once_next_to_others(queue_timeout_s: float) -> None:
    async def main() -> None:
        admission = Admission(ServerLimits(max_queued_tokens=10), queue_timeout_s)
        with admitted(admission, 1, 5):
            with pytest.raises(Refusal, match="about 50 tokens are more than this server's 10"):
                admission.enter(1, 50, "")
            assert admission.num_in_line == 0
            with admitted(admission, 1, 5) as small:
                assert small.turn is None, "nobody waits in front of it"

    asyncio.run(main())


def test_keys_have_their_own_limits() -> None:
    admission = Admission(ServerLimits(max_requests_per_key=1), 0.0)
    with admitted(admission, 1, 1, "a"):
        assert refuse(admission, 1, 1, "a") == "key_concurrency"
        with admitted(admission, 1, 1, "b"):
            pass


def test_the_rate_limit_of_a_key_names_the_time_to_retry() -> None:
    admission = Admission(ServerLimits(requests_per_minute_per_key=2), 0.0)
    for _ in range(2):
        with admitted(admission, 1, 1, "a"):
            pass
    with pytest.raises(Refusal) as caught, admitted(admission, 1, 1, "a"):
        pass
    assert caught.value.reason == "key_rate"
    assert 1 <= caught.value.retry_after_s <= 30
    with admitted(admission, 1, 1, "b"):
        pass


@pytest.mark.parametrize(
    "limit", ["max_queued_requests", "max_queued_tokens", "max_requests_per_key", "requests_per_minute_per_key"]
)
def test_a_refusal_names_the_setting_that_it_comes_from(limit: str) -> None:
    admission = Admission(ServerLimits(**{limit: 1}), 0.0)
    with admitted(admission, 1, 1, "a"), pytest.raises(Refusal) as caught, admitted(admission, 1, 1, "a"):
        pass
    assert f"(--server-limits.{limit.replace('_', '-')})" in str(caught.value)


@pytest.mark.parametrize("queue_timeout_s", [0.0, 60.0])
def test_a_full_server_uses_up_nothing_of_a_keys_rate(queue_timeout_s: float) -> None:
    async def main() -> None:
        admission = Admission(ServerLimits(max_queued_requests=1, requests_per_minute_per_key=2), queue_timeout_s)
        with admitted(admission, 1, 1, "b"):
            for _ in range(10):
                with contextlib.suppress(Refusal), admitted(admission, 1, 1, "a") as place:
                    assert place.turn is not None
        for _ in range(2):
            with admitted(admission, 1, 1, "a") as place:
                assert place.turn is None
        assert refuse(admission, 1, 1, "a") == "key_rate"

    asyncio.run(main())


@pytest.mark.parametrize("limit", ["max_queued_requests", "max_requests_per_key", "requests_per_minute_per_key"])
def test_a_request_that_can_never_fit_is_an_error_not_a_refusal(limit: str) -> None:
    admission = Admission(ServerLimits(**{limit: 3}), 0.0)
    with admitted(admission, 3, 1), pytest.raises(RequestError, match="4 outputs"):
        admission.enter(4, 1, "")


def test_what_has_begun_to_answer_does_not_wait() -> None:
    admission = Admission(ServerLimits(max_queued_requests=1), 0.0)
    with admitted(admission, 1, 10) as first:
        assert refuse(admission, 1, 10) == "requests"
        first.start()
        first.start()
        with admitted(admission, 1, 10):
            assert (admission.num_requests, admission.num_waiting) == (2, 1)
            assert refuse(admission, 1, 10) == "requests"
    assert (admission.num_requests, admission.num_waiting, admission.num_tokens) == (0, 0, 0)


def test_an_estimate_of_tokens_is_corrected() -> None:
    admission = Admission(ServerLimits(max_queued_tokens=100), 0.0)
    with admitted(admission, 1, 90) as first:
        assert refuse(admission, 1, 20) == "tokens"
        first.correct(30)
        with admitted(admission, 1, 20):
            assert admission.num_tokens == 50


def test_expected_outputs_follow_the_real_ones() -> None:
    admission = Admission(ServerLimits(), 0.0)
    assert admission.expected_output(None) == PRIOR_OUTPUT_TOKENS
    assert admission.expected_output(7) == 7
    for _ in range(500):
        admission.note_output(40)
    assert 40 <= admission.expected_output(None) <= 60
    assert admission.expected_output(100_000) == admission.expected_output(None)
    for _ in range(5000):
        admission.note_output(3000)
    assert 2900 <= admission.expected_output(None) <= 3000


@pytest.mark.parametrize(("reason", "is_noted"), [("stop", True), ("length", True), ("error", False), ("abort", False)])
def test_only_outputs_that_came_to_their_end_are_expected_again(reason: str, is_noted: bool) -> None:
    admission = Admission(ServerLimits(), 0.0)

    async def stream(request: Request) -> AsyncIterator[RequestOutput]:
        part = CompletionOutput(0, token_ids=[5], finish_reason=reason)
        yield RequestOutput("a", outputs=[part], finished=True, error="broken" if reason == "error" else None)

    metrics = ServerMetrics("m", EngineStats, dict.fromkeys(CACHE_LABELS, ""))
    starter: Any = SimpleNamespace(
        admission=admission, observed=ObservedRequests(metrics), llm=SimpleNamespace(stream=stream)
    )
    http: Any = {"state": RequestState()}
    request = Request("a", np.array([1], np.int32), sampling=SamplingParams())

    async def main() -> None:
        async with Generation(starter, http, "a", [request], admission.enter(1, 1, "")).outputs() as outputs:
            async for _ in outputs:
                pass

    with contextlib.suppress(ApiError):
        asyncio.run(main())
    assert (admission.expected_output(None) < PRIOR_OUTPUT_TOKENS) == is_noted


def test_256_chats_without_a_limit_run_although_their_contexts_exceed_the_token_limit(tmp_path: Path) -> None:
    """As on a model of 128k tokens with the default of 2 million: 16 times 128k, and here 16 times 8k."""
    limits = ("--max-model-len", "8192", "--server-limits.max-queued-tokens", str(320_000))
    body = {"messages": [{"role": "user", "content": "Hello"}], "stop": ["e"], "seed": 1}
    with serving(tmp_path, *FAKE_FLAGS, *limits) as server, ThreadPoolExecutor(256) as threads:
        answers = list(threads.map(lambda _: server.post("/v1/chat/completions", body)[0], range(256)))
        assert answers == [200] * 256


def test_nobody_overtakes_those_who_wait_in_line() -> None:
    async def main() -> None:
        admission = Admission(ServerLimits(max_queued_tokens=100), 60.0)
        first, large, small = (admission.enter(1, tokens, "") for tokens in (90, 80, 5))
        assert (first.turn, admission.num_in_line, admission.num_requests) == (None, 2, 1)
        assert large.turn is not None
        assert small.turn is not None
        waiting = [asyncio.create_task(one.wait_for_turn()) for one in (small, large)]
        first.correct(70)
        assert not small.turn.done(), "it would fit, but the one before it does not"
        first.close()
        await asyncio.gather(*waiting)
        assert (admission.num_in_line, admission.num_tokens) == (0, 85)
        for one in (large, small):
            one.close()
        assert (admission.num_requests, admission.num_waiting, admission.num_tokens) == (0, 0, 0)

    asyncio.run(main())


def test_who_leaves_the_line_lets_the_next_one_pass() -> None:
    async def main() -> None:
        admission = Admission(ServerLimits(max_queued_tokens=100, max_requests_per_key=2), 60.0)
        first, large, small = (admission.enter(1, *asked) for asked in ((90, "a"), (80, "a"), (5, "b")))
        with pytest.raises(Refusal, match="this key has 2"):  # one of them in line
            admission.enter(1, 1, "a")
        large.close()  # its client left
        assert small.turn is not None
        assert small.turn.done()
        assert (admission.num_in_line, admission.num_requests, admission.num_tokens) == (0, 2, 95)
        first.close()
        admission.enter(1, 1, "a")

    asyncio.run(main())


def test_who_waits_too_long_is_refused_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        admission = Admission(ServerLimits(max_queued_requests=1), 1e-6)
        first, second = admission.enter(1, 1, ""), admission.enter(1, 1, "")
        with contextlib.closing(second), pytest.raises(Refusal, match="1 requests wait, of 1"):
            await second.wait_for_turn()
        assert (admission.num_in_line, admission.num_requests) == (0, 1)
        first.close()
        assert admission.enter(1, 1, "").turn is None

    asyncio.run(main())


@pytest.mark.parametrize(("key", "num_left"), [(None, 0), ("a", 1)])
def test_the_wait_in_line_can_be_ended_with_an_error(key: str | None, num_left: int) -> None:
    async def main() -> None:
        admission = Admission(ServerLimits(max_queued_requests=1), 60.0)
        first, mine, other = (admission.enter(1, 1, one) for one in ("c", "a", "b"))
        admission.end_line(ApiError(503, "it ends"), key)
        assert admission.num_in_line == num_left
        first.close()
        with contextlib.closing(mine), pytest.raises(ApiError, match="it ends"):
            await mine.wait_for_turn()
        with contextlib.closing(other), contextlib.nullcontext() if num_left else pytest.raises(ApiError):
            await other.wait_for_turn()
        assert (admission.num_in_line, admission.num_requests, admission.num_tokens) == (0, 0, 0)

    asyncio.run(main())


def test_what_waits_in_line_is_among_the_waiting_requests_of_the_metrics() -> None:
    metrics = ServerMetrics("m", lambda: EngineStats(num_waiting=3, num_deferred=1), dict.fromkeys(CACHE_LABELS, ""))
    shown = write_metrics([(metrics, metrics.counts())], 3).decode()
    assert 'vllm:num_requests_waiting{engine="0",model_name="m"} 6.0' in shown
    for reason, count in (("capacity", 2.0), ("deferred", 1.0), ("admission", 3.0)):
        labels = f'engine="0",model_name="m",reason="{reason}"'
        assert f"vllm:num_requests_waiting_by_reason{{{labels}}} {count}" in shown


def test_times_begin_in_line_and_an_abort_of_all_reaches_those_in_it(tmp_path: Path) -> None:
    body = {"prompt": [9] * 50, "max_tokens": 1000, "ignore_eos": True, "return_timings": True}
    limits = ("--server-limits.max-queued-tokens", "1500")
    with serving(tmp_path, *FAKE_ENGINE, *limits, stepped=True) as server, ThreadPoolExecutor(2) as threads:

        def ask(request_id: str, num_held: int) -> "Future[tuple[int, Any]]":
            asked = threads.submit(server.post, "/v1/completions", {**body, "request_id": request_id})
            server.wait_load(num_held)
            return asked

        with server.steps.held_after(5):
            first, in_line = ask("a", 1), ask("b", 2)
            time.sleep(0.3)
            server.steps.release()
            assert in_line.result()[1]["timings"]["queue_ms"] >= 300
            assert first.result()[0] == 200
        server.wait_idle()
        assert server.metric("request_queue_time_seconds_sum") >= 0.3
        assert server.metric("time_to_first_token_seconds_sum") >= 0.3
        with server.steps.held_after(5):
            first, in_line = ask("a", 1), ask("b", 2)
            assert server.post("/abort_requests", {})[1] == {"aborted": ["cmpl-a"]}
            status, answer = in_line.result()
            assert (status, answer["error"]["message"]) == (400, "the request was aborted while it waited in line")
            assert first.result()[1]["choices"][0]["finish_reason"] == "abort"
            server.steps.release()
        server.wait_idle()


def test_a_storm_beyond_the_line_serves_each_client() -> None:
    """60 clients of a server for 2 at a time, each of whom waits for less than it takes to serve all."""

    async def main() -> list[int]:
        admission = Admission(ServerLimits(max_queued_requests=2), 0.02)
        num_served = [0] * 60
        until_s = asyncio.get_running_loop().time() + 30

        async def keep_asking(client: int) -> None:
            while not all(num_served) and asyncio.get_running_loop().time() < until_s:
                place = admission.enter(1, 1, "")
                with contextlib.closing(place), contextlib.suppress(Refusal):
                    if place.turn is not None:
                        await place.wait_for_turn()
                    await asyncio.sleep(0.002)
                    num_served[client] += 1

        await asyncio.gather(*map(keep_asking, range(60)))
        return num_served

    assert min(asyncio.run(main())) > 0


def test_a_storm_of_retries_starves_nobody(tmp_path: Path) -> None:
    """48 clients of all APIs that retry without patience: each of their 96 requests is served in the end."""
    limits = (
        "--server-limits.max-queued-requests",
        "4",
        "--max-num-seqs",
        "4",
        "--server-timeouts.queue-timeout-s",
        "0.1",
    )
    turn, paths = Turn("Hello " * 200, 20, seed=2), itertools.cycle(BODIES)
    with serving(tmp_path, *FAKE_FLAGS, "--ollama", *limits) as server, ThreadPoolExecutor(48) as threads:

        def insist(path: str) -> int:
            num_refused = 0
            while True:
                status, answer = server.post(path, asked(path, turn))
                if status == 200:
                    assert num_output_tokens(answer) == 20
                    return num_refused
                assert status == 429
                num_refused += 1
                assert num_refused < 5000

        refused = list(threads.map(insist, itertools.islice(paths, 96)))
        assert sum(refused) > 0
        assert server.wait_idle()["server_load"] == 0
