"""What a server logs: its start, requests, load and end, in one form for all of its processes."""

import ast
import asyncio
import http.client
import json
import logging
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagoda
from pagoda import SamplingParams
from pagoda.core.request import Request
from pagoda.engine.wire import EngineStats
from pagoda.metrics.counts import ModelCounts
from pagoda.metrics.observed_requests import ObservedRequests, RequestObserver
from pagoda.metrics.prometheus import CACHE_LABELS, ServerMetrics
from pagoda.server.load_report import report_load
from tests.server.live import FAKE_FLAGS, LiveServer, serving

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "seed": 1}
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING|ERROR) (api|engine)\[\d+\] .+")


def leave_a_stream(server: LiveServer) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    body = json.dumps({**CHAT, "max_tokens": 1500, "ignore_eos": True, "stream": True})
    connection.request(
        "POST", "/v1/chat/completions", body, {"Content-Type": "application/json", "x-request-id": "gone"}
    )
    assert connection.getresponse().read(10)
    connection.close()


def test_all_processes_log_in_one_form(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE_FLAGS, "--log-format", "json", stepped=True) as server:
        chat = {**CHAT, "request_id": "whole"}
        assert server.post("/v1/chat/completions", chat)[0] == 200
        assert server.get("/health")[0] == 200
        with server.steps.held_after(20):
            leave_a_stream(server)
        server.wait_idle()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    messages = [line["message"] for line in lines]
    assert {"api", "engine"} == {line["process"] for line in lines}
    assert all(line["time"] and line["level"] and line["pid"] for line in lines)
    for part in ("model: ", "KV cache: ", "scheduler: "):  # the engine's start
        assert any(line["process"] == "engine" and line["message"].startswith(part) for line in lines)
    assert any("ready at http" in message for message in messages)
    whole, left = [line for line in lines if line["logger"] == "pagoda.access" and line["method"] == "POST"]
    assert (whole["status"], whole["model"], whole["finish_reason"]) == (200, "smollm2-135m", "length")
    assert whole["output_tokens"] == 4
    assert whole["prompt_tokens"] > 0
    assert (left["status"], left["request_id"], left["finish_reason"]) == (499, "gone", "abort")
    assert not any("/health" in message for message in messages)
    assert any(message.startswith("shutting down") for message in messages)
    assert messages[-1].startswith("drained")


def test_every_line_of_text_has_time_level_and_process(fake_server: LiveServer) -> None:
    assert fake_server.post("/v1/chat/completions", {**CHAT, "request_id": "a-line"})[0] == 200
    end_s = time.monotonic() + 10  # the line is written when the answer has been sent
    while "id=chatcmpl-a-line" not in fake_server.log.read_text() and time.monotonic() < end_s:
        time.sleep(0.01)
    lines = fake_server.log.read_text().splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    (line,) = [line for line in lines if "id=chatcmpl-a-line" in line]
    assert "POST /v1/chat/completions 200 in " in line
    assert "model=smollm2-135m" in line
    assert "finish_reason=length" in line


async def reporting(observed: ObservedRequests, interval_s: float) -> None:
    async def read_counts() -> ModelCounts:
        return {"m": observed.metrics.counts()}

    await report_load("m", observed.metrics.stats, read_counts, observed.oldest, interval_s)


def test_a_line_tells_the_load_while_there_is_any(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pagoda")
    stats = EngineStats()
    metrics = ServerMetrics("m", lambda: stats, dict.fromkeys(CACHE_LABELS, ""))

    async def main() -> None:
        nonlocal stats
        task = asyncio.create_task(reporting(ObservedRequests(metrics), 0.05))
        await asyncio.sleep(0.2)
        assert caplog.messages == []  # idle
        metrics.num_output_tokens += 10
        stats = EngineStats(
            prefix_queries=8,
            prefix_hits=4,
            num_running=2,
            num_waiting=1,
            num_swapped=3,
            num_blocks=4,
            num_free_blocks=3,
        )
        while not caplog.messages:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert caplog.messages[0].startswith("load: 0.0 prompt and 200.0 output tokens/s, 2 running, 1 waiting, 3 swapped")
    assert caplog.messages[0].endswith("KV cache 25.0% full, prefix hits 50.0%")


@pytest.mark.parametrize(
    ("first", "shown"), [("cmpl-first", "cmpl-first"), ('x,"' * 85, r'"(x,\\"){40}\.\.\. \(255 characters\)"')]
)
def test_the_line_of_the_load_names_a_request_that_runs_for_long(
    caplog: pytest.LogCaptureFixture, first: str, shown: str
) -> None:
    caplog.set_level(logging.INFO, logger="pagoda")
    metrics = ServerMetrics("m", lambda: EngineStats(num_running=2), dict.fromkeys(CACHE_LABELS, ""))
    observed = ObservedRequests(metrics)
    now_s = time.perf_counter()
    for request_id, age_s in ((first, 540), ("cmpl-second", 1)):
        params = SamplingParams(max_tokens=5)
        ids = np.asarray([1], np.int32)
        request = Request(request_id, ids, params, arrival_time_s=now_s - age_s, handle=age_s)
        RequestObserver(observed, request).__enter__()

    async def main() -> None:
        task = asyncio.create_task(reporting(observed, 0.01))
        while not caplog.messages:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert re.search(rf"; the oldest request, {shown}, has 0 tokens after 5\d\d s$", caplog.messages[0])


def test_no_log_line_has_a_requests_id_as_its_caller_wrote_it() -> None:
    found: list[str] = []
    for path in Path(pagoda.__path__[0]).rglob("*.py"):
        text = path.read_text()
        calls = ast.walk(ast.parse(text)) if "logger." in text and "request_id" in text else ()
        for call in calls:
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("logger."):
                names = [ast.unparse(arg) for arg in call.args]
                found += [f"{path}:{call.lineno}" for name in names if name.endswith("request_id")]
    assert found == []
