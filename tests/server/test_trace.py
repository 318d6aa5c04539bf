"""/trace: what a server's engine does, for whoever may see all requests."""

import itertools
import json
import threading
import time
from pathlib import Path

import pytest

from tests.chrome_format import check_trace
from tests.server.live import FAKE_ENGINE, LiveServer, serving
from tests.server.test_requests import get

SHORT_OF_BLOCKS = ("--num-blocks", "24", "--max-num-seqs", "8")


def test_a_trace_shows_requests_steps_and_preemptions(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE_ENGINE, *SHORT_OF_BLOCKS, stepped=True) as server:
        is_over = threading.Event()

        def ask(index: int) -> None:
            for round_ in itertools.count():
                if is_over.is_set():
                    return
                body = {"prompt": [index + 3] * 60, "max_tokens": 90, "ignore_eos": True}
                server.post("/v1/completions", {**body, "request_id": f"r{index}-{round_}"})

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        try:
            num_before = server.metric("num_preemptions_total")
            deadline_s = time.monotonic() + 30
            while True:  # a preemption of the trace's time may be missed on a busy machine
                status, text = server.get("/trace?seconds=1")
                assert status == 200
                trace = json.loads(text)
                check_trace(trace)
                kinds = {one["ph"] for one in trace["traceEvents"]}
                if {"X", "s", "f"} <= kinds or time.monotonic() > deadline_s:
                    break
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert server.metric("num_preemptions_total") > num_before
        assert kinds == {"X", "C", "i", "M", "s", "f"}
        found = trace["traceEvents"]
        assert any(one["name"].startswith("step ") for one in found)
        assert any(one["name"].startswith("waits: ") for one in found)
        assert any(one["ph"] == "M" and str(one["args"]["name"]).startswith("cmpl-r") for one in found)


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "x", "nan", "%D9%A3", "1_0"])
def test_a_trace_of_another_length_is_refused(fake_server: LiveServer, seconds: str) -> None:
    status, text = fake_server.get(f"/trace?seconds={seconds}")
    assert (status, json.loads(text)["error"]["param"]) == (400, "seconds")


def test_one_trace_is_made_at_a_time_and_ends_with_its_client(fake_server: LiveServer) -> None:
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(fake_server.get("/trace?seconds=1")[0])) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [200, 429]


def test_only_the_admin_key_may_trace(keyed_server: LiveServer) -> None:
    status, answer = get(keyed_server, "/trace", "one")
    assert (status, "admin" in answer["error"]["message"]) == (403, True)


def test_a_server_writes_its_trace_when_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with serving(tmp_path, *FAKE_ENGINE, "--trace", str(file), stepped=True) as server:
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 20})[0] == 200
        assert server.get("/trace")[0] == 429
        assert not file.exists()
    trace = json.loads(file.read_text())
    check_trace(trace)
    assert {"admitted", "first token", "runs", "steps"} <= {
        name
        for one in trace["traceEvents"]
        for name in (one["name"], one["args"].get("name", "") if "args" in one else "")
    }
