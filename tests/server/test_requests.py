"""/requests: what runs, what waits and why; each key sees its own requests, others are counts."""

import dataclasses
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
    assert "step" not in timeline[0]
    steps = [one["step"] for one in timeline[1:-1]]
    assert steps == sorted(steps)
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
        behind = threading.Thread(
            target=server.post, args=("/v1/completions", {"prompt": [8], "request_id": "behind"}), kwargs=KEY
        )
        behind.start()
        path, turn = "/requests/cmpl-behind", f"waits for its turn in the queue: 2nd, first is {waiting[0]['id']}"
        while (found := get(server, path, "one")[1]).get("reason", "").partition(";")[0] != turn:
            assert time.monotonic() < end_s, found
    thread.join(30)
    behind.join(30)
    reason = waiting[0]["reason"]
    assert re.match(r"waits for \d+ blocks: it takes 9\d, \d+ are free; held by cmpl-large \(\d+\), 1 other", reason)
    assert "1 other request" in reason
    assert "small" not in reason


def test_it_says_where_a_prompt_differs_from_one_of_the_same_key_only(server: LiveServer) -> None:
    def ask(name: str, key: str, prompt: list[int], **fields: Any) -> Any:
        asked = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True, "request_id": name}
        status, answer = server.post("/v1/completions", {**asked, **fields}, Authorization=f"Bearer {key}")
        assert status == 200
        seen = get(server, f"/requests/cmpl-{name}", key)[1]
        assert seen["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return seen.get("prefix_miss"), seen["cached_tokens"], answer["choices"][0]["token_ids"]

    system, monday, tuesday = list(range(500, 538)), [1000] * 15, [1001] * 15
    assert server.post("/reset_prefix_cache", {}, Authorization="Bearer root")[0] == 200
    _, _, output = ask("m0", "one", system + monday)
    miss, num_cached, _ = ask("m1", "one", system + tuesday)
    assert num_cached == 32
    where = f"(block 2): {miss['token']!r} here, {miss['like_token']!r} there"
    assert miss.pop("what") == f"it differs from cmpl-m0 from token 38 on {where}"
    assert miss.pop("token") != miss.pop("like_token")
    assert miss.pop("before")
    ids = {"token_id": 1001, "like_token_id": 1000}
    assert miss == {"like": "cmpl-m0", "position": 38, "block": 2, "kind": "differs", **ids}
    # Equal tokens of another key are neither shared nor told; with the admin key, each key's are its own.
    assert ask("m2", "two", system + tuesday)[:2] == (None, 0)
    assert ask("m3", "one", system + tuesday)[:2] == (None, 48)
    assert get(server, "/requests/2/cmpl-m2", "root")[1].get("prefix_miss") is None
    assert get(server, "/requests/1/cmpl-m1", "root")[1]["prefix_miss"]["like"] == "1/cmpl-m0"
    # Its own requests the admin key also finds by the id that their answers have.
    ask("r0", "root", system + monday)
    assert ask("r1", "root", system + tuesday)[0]["like"] == "admin/cmpl-r0"
    assert get(server, "/requests/admin/cmpl-r1", "root")[1]["id"] == "admin/cmpl-r1"
    assert get(server, "/requests/cmpl-m1", "root")[0] == 404
    # What a request has answered is part of what it is compared with; another cache salt is not.
    assert ask("m4", "one", system + monday, cache_salt="x")[:2] == (None, 0)
    miss, num_cached, _ = ask("m5", "one", system + monday + output + [7] * 20)
    assert (miss["what"], num_cached) == ("it goes on where cmpl-m0 ends, at token 73 (block 4)", 64)
    assert miss["kind"] == "continues"
    assert server.post("/reset_prefix_cache", {}, Authorization="Bearer root")[0] == 200
    miss, _, _ = ask("m6", "one", system + monday)
    assert miss["what"].startswith("its first 53 tokens are those of cmpl-m5, of which 0 were cached")


def test_blocks_in_host_memory_are_shown_with_whose_they_are(tmp_path: Path) -> None:
    small = ("--num-blocks", "24", "--num-host-blocks", "32", "--preemption-mode", "swap", "--max-model-len", "300")
    body = {"prompt": [5] * 60, "max_tokens": 200}
    with (
        serving(tmp_path, *FAKE_ENGINE[:2], *small, stepped=True) as server,
        slowed(server),
        streaming(server, "a", **body),
        streaming(server, "b", **{**body, "prompt": [6] * 60}),
    ):
        end_s = time.monotonic() + 20
        while not {4, 5} & set((last := frames(server, 1)[0])["host_cells"][::2]):
            assert time.monotonic() < end_s, last
        assert sum(last["host_cells"][1::2]) == 32
        (kind,) = {4, 5} & set(last["host_cells"][::2])
        rows = {row[0]: row for row in last["requests"]}
        swapped = rows[last["owners"][kind - 4]]
        assert (swapped[0], swapped[1]) == ("cmpl-b", "preempted")
        assert swapped[6] == dict(zip(last["host_cells"][::2], last["host_cells"][1::2], strict=True))[kind]
        assert swapped[8].startswith(("waits for ", "preempted for cmpl-a: its KV moved to host memory"))


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


def test_during_a_long_step_what_is_shown_says_how_old_it_is_and_what_came_since_waits(
    server: LiveServer,
) -> None:
    server = dataclasses.replace(server, key="root")
    server.wait_idle()
    assert server.load()["as_of_s"] == 0.0

    def wait_for(running: int, waiting: int, as_of_s: float) -> None:
        end_s = time.monotonic() + 30
        while (load := server.load())["running"] != running or load["waiting"] != waiting or load["as_of_s"] < as_of_s:
            assert time.monotonic() < end_s, load
            time.sleep(0.02)

    def ask(name: str) -> threading.Thread:
        body = {"prompt": [5] * 9, "max_tokens": 60, "ignore_eos": True, "return_timings": True}
        thread = threading.Thread(
            target=lambda: answers.update({name: server.post("/v1/completions", {**body, "request_id": name})[1]})
        )
        thread.start()
        return thread

    answers: dict[str, Any] = {}
    get(server, "/requests", "root")
    with server.steps.held_after(30):  # of which some are reported
        threads = [ask("before")]
        wait_for(1, 0, 0.0)
        server.steps.wait_held()
        threads.append(ask("since"))
        wait_for(1, 1, 0.5)
        assert server.metric("num_requests_waiting") == 1
        assert server.metric("engine_report_age_seconds") >= 0.5
        seen = get(server, "/requests", "root")[1]
        assert seen["as_of_s"] >= 0.3
        reasons = {one["id"]: one["reason"] for one in seen["data"] if one["state"] == "waiting"}
        assert reasons == {"admin/cmpl-since": "waits for the engine to see it, between two steps"}
    for thread in threads:
        thread.join()
    waits = {name: answer["timings"]["queue_reasons"] for name, answer in answers.items()}
    assert waits["since"]["the engine to see it"] > 300 > waits["since"]["admission and tokenizing"]
    assert waits["before"]["the engine to see it"] < 300
