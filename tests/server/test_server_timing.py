"""Server-Timing: the durations of a whole answer in a header, and durations of requests with several prompts."""

import json
import re
import urllib.request

import numpy as np
import pytest

from pagoda.base.outputs import RequestMetrics
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import Request
from pagoda.engine.wire import EngineStats
from pagoda.metrics.prometheus import ServerMetrics, write_metrics
from pagoda.server.generation import RequestFigures, _together
from pagoda.server.server_timing import server_timing
from tests.server.live import LiveServer

PROMPTS = {"prompt": [[5] * 40, [6] * 30], "max_tokens": 4, "ignore_eos": True}


def header_of(server: LiveServer, path: str, body: object, **headers: str) -> str | None:
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.headers["Server-Timing"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", PROMPTS),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
        ("/v1/embeddings", {"input": "Hello"}),
    ],
)
def test_who_asks_gets_a_header_and_the_same_answer(fake_server: LiveServer, path: str, body: object) -> None:
    found = header_of(fake_server, path, body, **{"X-Return-Timings": "1"})
    assert found is not None
    metrics = dict(re.findall(r"(?:^|, )(\w+);dur=([\d.]+)", found))
    expected = {"queue", "scheduler"} | ({"prefill", "decode"} if "embed" not in path else set())
    assert metrics.keys() == expected
    waits = r"admission and tokenizing [\d.]+ ms, the engine to see it [\d.]+ ms, its turn [\d.]+ ms"
    assert re.match(rf'queue;dur=[\d.]+;desc="{waits}"', found)
    assert header_of(fake_server, path, body) is None
    assert header_of(fake_server, path, body, **{"X-Return-Timings": "0"}) is None


def test_a_stream_and_other_routes_have_no_such_header(fake_server: LiveServer) -> None:
    asks = {"X-Return-Timings": "1"}
    assert header_of(fake_server, "/v1/completions", {**PROMPTS, "stream": True}, **asks) is None
    assert header_of(fake_server, "/tokenize", {"prompt": "x"}, **asks) is None


def test_the_header_says_what_preemptions_and_drafts_came_to() -> None:
    known = RequestFigures("a", 9, 5, 4, queue_ms=1.0, prefill_ms=2.0, decode_ms=3.0, scheduler_ms=0.5)
    known.preemptions, known.lost_tokens, known.preempted_ms = 2, 30, 7.5
    known.draft_tokens, known.accepted_draft_tokens = 8, 6
    assert server_timing(known, {"not enough free blocks": 0.001}).decode() == (
        'queue;dur=1.0;desc="not enough free blocks 1.0 ms", prefill;dur=2.0;desc="4 of 9 tokens cached", '
        'decode;dur=3.0;desc="5 tokens, 6 of 8 drafts accepted", '
        'preempted;dur=7.5;desc="preempted 2 times, 30 tokens lost", scheduler;dur=0.5'
    )


def test_the_time_of_decoding_ends_with_the_last_token_in_metrics_as_in_the_log() -> None:
    aborted = RequestMetrics(1.0, 2.0, 4.0, 9.0)
    assert (aborted.time_to_first_token, aborted.time_in_prefill, aborted.time_in_decode) == (3.0, 2.0, 5.0)
    metrics = ServerMetrics("m", EngineStats, {})
    metrics.on_end(Request("r", np.zeros(3, np.int32), sampling=SamplingParams(), arrival_time_s=1.0), 6, aborted, 20.0)
    shown = write_metrics([(metrics, metrics.counts())], 0).decode()
    sums = re.findall(r"vllm:request_(decode|inference)_time_seconds_sum\S* (\S+)", shown)
    assert sums == [("decode", "5.0"), ("inference", "7.0")]


def test_times_of_several_prompts_are_those_of_all_together() -> None:
    early = RequestMetrics(1.0, 2.0, 5.0, 6.0, 7.0, 0.1, {"a": 1.0}, 1, 10, 0.5, 4, 2)
    late = RequestMetrics(1.0, 3.0, 4.0, 9.0, 9.5, 0.2, {"b": 2.0}, 2, 20, 1.0, 4, 1)
    expected = RequestMetrics(1.0, 2.0, 4.0, 9.0, 9.5, 0.2, {"a": 1.0}, 3, 30, 1.5, 8, 3)
    assert _together([early, late]) == _together([late, early]) == expected
    waits = RequestMetrics(1.0)
    assert _together([waits, early]).first_scheduled_time == 2.0
    assert _together([waits, early]).finished_time is None
    assert _together([waits, waits]) == waits


def test_the_phases_of_several_prompts_add_up(fake_server: LiveServer) -> None:
    timings = fake_server.post("/v1/completions", {**PROMPTS, "return_timings": True})[1]["timings"]
    assert timings["predicted_n"] == 8
    assert timings["queue_ms"] + timings["prefill_ms"] + timings["decode_ms"] > 0
    assert sum(timings["queue_reasons"].values()) == pytest.approx(timings["queue_ms"], abs=0.2)
