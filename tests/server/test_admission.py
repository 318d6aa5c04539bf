"""Limits: what is over them is refused at once, with the reason; what leaves makes room."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagoda.base.errors import RequestError
from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.server_config import ServerLimits
from pagoda.core.request import Request
from pagoda.engine.wire import EngineStats
from pagoda.metrics.prometheus import CACHE_LABELS, ServerMetrics
from pagoda.server.admission import HOLD_S, PRIOR_OUTPUT_TOKENS, REFUSED_AT_ONCE, Admission, Place, Refusal
from pagoda.server.errors import ApiError
from pagoda.server.generation import Admitted, Generation
from tests.server.live import FAKE_FLAGS, serving


@contextlib.contextmanager
def admitted(admission: Admission, requests: int, tokens: int, key: str = "") -> Iterator[Place]:
    with contextlib.closing(admission.admit(requests, tokens, key)) as place:
        yield place


def refuse(admission: Admission, requests: int, tokens: int, key: str = "") -> str:
    with pytest.raises(Refusal) as caught, admitted(admission, requests, tokens, key):
        pass
    assert caught.value.retry_after_s >= 1
    return caught.value.reason


def test_requests_and_tokens_are_bounded_and_released() -> None:
    admission = Admission(ServerLimits(max_queued_requests=2, max_queued_tokens=100))
    with admitted(admission, 1, 60, ""):
        assert refuse(admission, 1, 41) == "tokens"
        with admitted(admission, 1, 40, ""):
            assert refuse(admission, 1, 0) == "requests"
        assert (admission.num_requests, admission.num_tokens) == (1, 60)
    assert (admission.num_requests, admission.num_tokens) == (0, 0)


def test_bytes_for_encoders_are_bounded_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.server.admission.MAX_HELD_MEDIA_BYTES", 100)
    admission = Admission(ServerLimits())
    with admitted(admission, 1, 1) as first, admitted(admission, 1, 1) as second:
        first.hold(150)  # at any size, if there is no other
        with pytest.raises(Refusal) as caught:
            second.hold(1)
        assert caught.value.reason == "media"
        monkeypatch.setattr("pagoda.server.admission.REFUSED_AT_ONCE", 0)
        with pytest.raises(Refusal) as caught:
            second.hold(1)
        assert (caught.value.hold_s, caught.value.retry_after_s) == (HOLD_S, 0)
        second.hold(0)  # a text
        first.close()
        second.hold(100)
        assert admission.num_media_bytes == 100
    assert admission.num_media_bytes == 0


def test_a_place_is_released_after_an_error() -> None:
    admission = Admission(ServerLimits(max_queued_requests=1))
    with pytest.raises(KeyError), admitted(admission, 1, 1, ""):
        raise KeyError
    with admitted(admission, 1, 1, ""):
        pass


def test_one_request_larger_than_the_token_limit_runs_alone() -> None:
    admission = Admission(ServerLimits(max_queued_tokens=10))
    with admitted(admission, 1, 50, ""):
        assert refuse(admission, 1, 1) == "tokens"


def test_keys_have_their_own_limits() -> None:
    admission = Admission(ServerLimits(max_requests_per_key=1))
    with admitted(admission, 1, 1, "a"):
        assert refuse(admission, 1, 1, "a") == "key_concurrency"
        with admitted(admission, 1, 1, "b"):
            pass


def test_the_rate_limit_of_a_key_names_the_time_to_retry() -> None:
    admission = Admission(ServerLimits(requests_per_minute_per_key=2))
    for _ in range(2):
        with admitted(admission, 1, 1, "a"):
            pass
    with pytest.raises(Refusal) as caught, admitted(admission, 1, 1, "a"):
        pass
    assert caught.value.reason == "key_rate"
    assert 1 <= caught.value.retry_after_s <= 30
    with admitted(admission, 1, 1, "b"):
        pass


@pytest.mark.parametrize("limit", ["max_queued_requests", "max_requests_per_key", "requests_per_minute_per_key"])
def test_a_request_that_can_never_fit_is_an_error_not_a_refusal(limit: str) -> None:
    admission = Admission(ServerLimits(**{limit: 3}))
    with admitted(admission, 3, 1), pytest.raises(RequestError, match="4 outputs"):
        admission.admit(4, 1, "")


def test_what_has_begun_to_answer_does_not_wait() -> None:
    admission = Admission(ServerLimits(max_queued_requests=1))
    with admitted(admission, 1, 10) as first:
        assert refuse(admission, 1, 10) == "requests"
        first.start()
        first.start()
        with admitted(admission, 1, 10):
            assert (admission.num_requests, admission.num_waiting) == (2, 1)
            assert refuse(admission, 1, 10) == "requests"
    assert (admission.num_requests, admission.num_waiting, admission.num_tokens) == (0, 0, 0)


def test_an_estimate_of_tokens_is_corrected() -> None:
    admission = Admission(ServerLimits(max_queued_tokens=100))
    with admitted(admission, 1, 90) as first:
        assert refuse(admission, 1, 20) == "tokens"
        first.correct(30)
        with admitted(admission, 1, 20):
            assert admission.num_tokens == 50


def test_expected_outputs_follow_the_real_ones() -> None:
    admission = Admission(ServerLimits())
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
    admission = Admission(ServerLimits())

    async def stream(request: Request) -> AsyncIterator[RequestOutput]:
        part = CompletionOutput(0, token_ids=[5], finish_reason=reason)
        yield RequestOutput("a", outputs=[part], finished=True, error="broken" if reason == "error" else None)

    metrics = ServerMetrics("m", EngineStats, dict.fromkeys(CACHE_LABELS, ""))
    generator: Any = SimpleNamespace(admission=admission, metrics=metrics, llm=SimpleNamespace(stream=stream))
    http: Any = SimpleNamespace(scope={"state": {"timings": {}, "key": ""}})
    request = Request("a", np.array([1], np.int32), sampling=SamplingParams())

    async def main() -> None:
        admitted = Admitted(admission.admit(1, 1, ""), contextlib.ExitStack())
        async with Generation(generator, http, "a", [request], admitted).outputs() as outputs:
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


def test_many_refusals_are_held_back_so_that_asking_at_once_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.server.admission.time.monotonic", lambda: 5.0)
    admission = Admission(ServerLimits(max_queued_requests=1))
    with admitted(admission, 1, 1):
        refusals: list[Refusal] = []
        for _ in range(REFUSED_AT_ONCE + 2):
            with pytest.raises(Refusal) as caught:
                admission.admit(1, 1, "")
            refusals.append(caught.value)
        assert [one.hold_s for one in refusals] == [0.0] * REFUSED_AT_ONCE + [HOLD_S] * 2
        assert [one.retry_after_s for one in refusals] == [1] * REFUSED_AT_ONCE + [0] * 2
        monkeypatch.setattr("pagoda.server.admission.time.monotonic", lambda: 6.0)
        with pytest.raises(Refusal) as caught:
            admission.admit(1, 1, "")
        assert caught.value.hold_s == 0.0


def test_a_storm_of_retries_starves_nobody(tmp_path: Path) -> None:
    """48 clients that retry without patience: each of their 96 requests is served in the end."""
    limits = ("--server-limits.max-queued-requests", "4", "--max-num-seqs", "4")
    body = {"messages": [{"role": "user", "content": "Hello " * 200}], "max_tokens": 20, "ignore_eos": True}
    with serving(tmp_path, *FAKE_FLAGS, *limits) as server, ThreadPoolExecutor(48) as threads:

        def insist(_: int) -> int:
            num_refused = 0
            while True:
                status, answer = server.post("/v1/chat/completions", body)
                if status == 200:
                    assert answer["usage"]["completion_tokens"] == 20
                    return num_refused
                assert status == 429
                num_refused += 1
                assert num_refused < 5000

        refused = list(threads.map(insist, range(96)))
        assert sum(refused) > 0
        assert server.wait_idle()["server_load"] == 0
