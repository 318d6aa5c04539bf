"""/requests: what runs, what waits and why; each key sees its own requests, others are counts."""

import itertools
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import FAKE_ENGINE, LiveServer, serving

KEY = {"Authorization": "Bearer one"}
LONG = {"prompt": [7] * 40, "max_tokens": 1900, "ignore_eos": True, "stream": True}


def get(server: LiveServer, path: str, key: str | None = None) -> tuple[int, Any]:
    request = urllib.request.Request(server.url + path)
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextmanager
def streaming(server: LiveServer, request_id: str, key: str | None = None, **fields: Any) -> Iterator[None]:
    """A stream of which one event was read; the connection is closed at the end of the block."""
    body = json.dumps({**LONG, "request_id": request_id, **fields}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=30) as response:
        response.readline()
        yield


@contextmanager
def slowed(server: LiveServer, pause_s: float = 0.01) -> Iterator[None]:
    """During the block, the engine rests after each step."""
    is_over = threading.Event()

    def run() -> None:
        server.steps.hold_after(1)
        while not is_over.wait(pause_s):
            server.steps.allow_one_more()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        server.steps.release()


def frames(server: LiveServer, count: int, key: str | None = None) -> list[dict[str, Any]]:
    """The first frames of the dashboard's stream, after what comes once."""
    request = urllib.request.Request(f"{server.url}/dashboard/stream")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=30) as response:
        lines = (line for line in response if line.startswith(b"data: "))
        return [json.loads(next(lines)[6:]) for _ in range(count + 1)][1:]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """With two keys and an admin key; a pool in which two long prompts do not fit."""
    keys = ("--api-key", "one", "--api-key", "two", "--admin-api-key", "root")
    small = ("--distributed-executor-backend", "fake", "--num-blocks", "130", "--max-model-len", "2048")
    folder: Path = tmp_path_factory.mktemp("requests")
    with serving(folder, *small, *keys, stepped=True) as served:
        yield served


def test_a_key_sees_its_own_requests_and_counts_of_others(server: LiveServer) -> None:
    with slowed(server), streaming(server, "mine", "one"), streaming(server, "theirs", "two"):
        for key, ids in (("one", ["cmpl-mine"]), ("two", ["cmpl-theirs"]), ("root", ["1/cmpl-mine", "2/cmpl-theirs"])):
            status, seen = get(server, "/requests", key)
            assert status == 200
            live = [one for one in seen["data"] if one["state"] != "ended"]
            assert [one["id"] for one in live] == ids
            assert seen["others"]["running"] + seen["others"]["waiting"] == 2 - len(ids)
            assert all(one["prompt_tokens"] == 40 and one["output_tokens"] > 0 for one in live)
        assert get(server, "/requests")[0] == 401
        # Nothing of another key's request: not its id, not its blocks, not that it is there.
        hidden = json.dumps([get(server, "/requests", "one")[1], frames(server, 3, "one")])
        assert "theirs" not in hidden
        assert get(server, "/requests/cmpl-theirs", "one")[0] == 404
        assert get(server, "/requests/2/cmpl-theirs", "one")[0] == 404
        assert get(server, "/requests/2/cmpl-theirs", "root")[0] == 200
        last = frames(server, 2, "one")[-1]
        assert last["owners"] == ["cmpl-mine"]
        assert {3, 4} <= set(last["cells"][::2])  # what others have, and its own
    end_s = time.monotonic() + 20
    while (seen := get(server, "/requests/cmpl-mine", "one")[1])["state"] != "ended":  # its client has just left
        assert time.monotonic() < end_s, seen
    timeline = seen["timeline"]
    what = [one["what"] for one in timeline]
    assert what[:2] == ["arrived", "queued"]
    assert "runs: 40 tokens, 40 of them in this step; it has 3 blocks" in what
    assert what.index("first token") == 3
    assert what[-1].startswith("ended: ")
    times = [one["at_ms"] for one in timeline]
    assert times == sorted(times)


def test_what_waits_says_who_has_the_blocks(server: LiveServer) -> None:
    big = {"prompt": [5] * 1500, "max_tokens": 400}
    with slowed(server), streaming(server, "large", "one", **big), streaming(server, "small", "two"):
        thread = threading.Thread(target=server.post, args=("/v1/completions", {"prompt": [9] * 1500}), kwargs=KEY)
        thread.start()
        waiting: list[Any] = []
        end_s = time.monotonic() + 20
        while not (waiting and "cmpl-large" in waiting[0]["reason"]):
            assert time.monotonic() < end_s, waiting
            waiting = [one for one in get(server, "/requests", "one")[1]["data"] if one["state"] == "waiting"]
    thread.join(30)
    reason = waiting[0]["reason"]
    assert re.match(r"waits for \d+ blocks: it takes 9\d, \d+ are free; held by cmpl-large \(\d+\), 1 other", reason)
    assert "1 other request" in reason
    assert "small" not in reason


def test_streams_are_bounded_and_send_only_what_changes(fake_server: LiveServer) -> None:
    with slowed(fake_server), streaming(fake_server, "s"):
        seen = frames(fake_server, 4)
    rows = {row[0]: row for frame in seen for row in frame["requests"]}
    assert rows["cmpl-s"][1] == "running"
    assert all(frame["engine"] == "up" for frame in seen)
    steps = [step for frame in seen for step in frame["steps"]]
    assert len(steps) > 2
    assert all(one[1] <= one[2] for one in steps)
    assert all(before[0] < after[0] for before, after in itertools.pairwise(steps))
    opened = []
    try:
        for _ in range(16):
            opened.append(urllib.request.urlopen(f"{fake_server.url}/dashboard/stream", timeout=10))
        status, answer = get(fake_server, "/dashboard/stream")
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    finally:
        for one in opened:
            one.close()


def test_without_keys_a_server_that_others_reach_shows_counts(tmp_path: Path) -> None:
    flags = ("--host", "0.0.0.0")
    with serving(tmp_path, *FAKE_ENGINE, *flags, stepped=True) as server, slowed(server), streaming(server, "secret"):
        seen = get(server, "/requests")[1]
        assert (seen["data"], seen["others"]["running"] + seen["others"]["waiting"]) == ([], 1)
        assert get(server, "/requests/cmpl-secret")[0] == 404
        assert "secret" not in json.dumps(frames(server, 2))
