"""API keys are tenants: ids, aborts and caches of one do not reach another; the admin key operates the server."""

import concurrent.futures
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.live import FAKE_ENGINE, LiveServer, serving

SLOW = "tests.engine.slow_engine"
NEVER_ENDING = {"ENGINE_STEP_S": "0.02"}  # of LONG: the tests end it before its 38 s
LONG = {"prompt": [9] * 50, "max_tokens": 1900, "ignore_eos": True}
KEYS = ("--api-key", "one", "--api-key", "two")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    own_templates = "--trust-request-chat-template"
    with serving(
        tmp_path_factory.mktemp("tenants"), *FAKE_ENGINE, *KEYS, own_templates, env=NEVER_ENDING, engine=SLOW
    ) as server:
        yield server


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("operated")
    with serving(folder, *FAKE_ENGINE, *KEYS, "--admin-api-key", "root", env=NEVER_ENDING, engine=SLOW) as server:
        yield server


def post(server: LiveServer, key: str, path: str, body: Any) -> tuple[int, Any]:
    return server.post(path, body, Authorization=f"Bearer {key}")


def load(server: LiveServer, key: str) -> int:
    import urllib.request

    request = urllib.request.Request(f"{server.url}/load", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)["server_load"]


@contextlib.contextmanager
def running(server: LiveServer, *requests: tuple[str, dict[str, Any]]) -> Iterator[list[tuple[int, Any] | None]]:
    """Completions of these keys that run while the block does; their answers, complete after it."""
    answers: list[tuple[int, Any] | None] = [None] * len(requests)

    def ask(index: int, key: str, body: dict[str, Any]) -> None:
        answers[index] = post(server, key, "/v1/completions", {**LONG, **body})

    threads = [threading.Thread(target=ask, args=(i, key, body)) for i, (key, body) in enumerate(requests)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 20
    while load(server, "one") < len(requests):
        assert time.monotonic() < end
        time.sleep(0.01)
    yield answers
    for key in ("one", "two", "root"):
        post(server, key, "/abort_requests", {})
    for thread in threads:
        thread.join(30)


def finish_reason(answer: tuple[int, Any] | None) -> str:
    assert answer is not None
    assert answer[0] == 200, answer
    return answer[1]["choices"][0]["finish_reason"]


def test_two_keys_may_use_one_id_and_abort_only_their_own(shared: LiveServer) -> None:
    same = {"request_id": "same"}
    with running(shared, ("one", same), ("two", same)) as answers:
        status, refused = post(shared, "one", "/v1/completions", {**LONG, **same})
        assert (status, refused["error"]["message"]) == (400, "request id 'cmpl-same' is in use")
        assert post(shared, "two", "/abort_requests", {"request_ids": ["cmpl-same"]}) == (
            200,
            {"aborted": ["cmpl-same"]},
        )
        while answers[1] is None:
            time.sleep(0.01)
        assert answers[0] is None, "the other tenant's request was aborted"
        assert post(shared, "two", "/abort_requests", {"request_ids": ["cmpl-same"]})[1] == {"aborted": []}
    assert [answer[1]["id"] for answer in answers if answer is not None] == ["cmpl-same"] * 2
    assert finish_reason(answers[1]) == "abort"


def test_abort_without_ids_reaches_only_the_callers_requests(shared: LiveServer) -> None:
    with running(shared, ("one", {}), ("two", {"request_id": "a"}), ("two", {"request_id": "b"})) as answers:
        aborted = post(shared, "two", "/abort_requests", {})[1]["aborted"]
        assert sorted(aborted) == ["cmpl-a", "cmpl-b"]
        while answers[1] is None or answers[2] is None:
            time.sleep(0.01)
        assert answers[0] is None
    assert post(shared, "one", "/abort_requests", {"request_ids": []}) == (200, {"aborted": []})


def test_a_request_with_several_prompts_is_aborted_by_its_answers_id(shared: LiveServer) -> None:
    body = {"prompt": ["a", "b"], "request_id": "pair"}
    with running(shared, ("one", body)) as answers:
        assert post(shared, "one", "/abort_requests", {"request_ids": ["cmpl-pair-1"]})[1]["aborted"] == ["cmpl-pair-1"]
        assert post(shared, "one", "/abort_requests", {"request_ids": ["cmpl-pair"]})[1]["aborted"] == ["cmpl-pair"]
    assert answers[0] is not None
    assert [choice["finish_reason"] for choice in answers[0][1]["choices"]] == ["abort"] * 2


def test_with_an_admin_key_only_its_holder_operates_the_server(operated: LiveServer) -> None:
    for path, body in (
        ("/reset_prefix_cache", b""),
        ("/restart_engines", {}),
        ("/abort_requests", {}),
        ("/abort_requests", {"request_ids": []}),
        ("/v1/load_lora_adapter", {"lora_name": "x"}),
        ("/v1/unload_lora_adapter", {"lora_name": "x"}),
    ):
        status, answer = post(operated, "one", path, body)
        assert (status, answer["error"]["type"]) == (403, "permission_error"), path
        assert post(operated, "wrong", path, body)[0] == 401
    assert post(operated, "root", "/reset_prefix_cache", b"")[0] == 200
    assert post(operated, "root", "/v1/unload_lora_adapter", {"lora_name": "x"})[0] == 404
    assert post(operated, "root", "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_the_admin_may_abort_all_requests(operated: LiveServer) -> None:
    with running(operated, ("one", {"request_id": "a"}), ("two", {"request_id": "a"}), ("two", {})) as answers:
        assert post(operated, "two", "/abort_requests", {})[0] == 403
        assert post(operated, "root", "/abort_requests", {"request_ids": ["cmpl-a"]})[1]["aborted"] == ["cmpl-a"] * 2
        assert len(post(operated, "root", "/abort_requests", {})[1]["aborted"]) == 1
    assert [finish_reason(answer) for answer in answers] == ["abort"] * 3


def test_with_only_an_admin_key_the_other_routes_stay_open(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE_ENGINE, "--admin-api-key", "root") as server:
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        assert server.post("/reset_prefix_cache", b"")[0] == 403
        assert post(server, "root", "/reset_prefix_cache", b"")[0] == 200


@pytest.mark.parametrize("flags", [("--admin-api-key", ""), ("--api-key", ""), (*KEYS, "--admin-api-key", "two")])
def test_empty_keys_are_refused(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match="key"), serving(tmp_path, *FAKE_ENGINE, *flags):
        pass


def test_concurrent_chats_may_carry_the_same_request_id_header(shared: LiveServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}{% for i in range(20000) %}{% endfor %}",
        "max_tokens": 1900,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Authorization": "Bearer one", "X-Request-Id": "same"}
    ids: list[str] = []
    # No stream is left before each has its id: an id is free again once its request has ended.
    all_named = threading.Barrier(6, timeout=60)

    def ask() -> None:
        with httpx.stream("POST", f"{shared.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status_code == 200
            lines = response.iter_lines()  # kept: the stream is closed with its iterator
            ids.append(json.loads(next(lines).removeprefix("data: "))["id"])
            all_named.wait()

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for asked in [pool.submit(ask) for _ in range(6)]:
            asked.result()
    assert len(set(ids)) == 6
