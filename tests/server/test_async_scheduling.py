"""Asynchronous scheduling in a live server: the numbers are those without it, in streams, searches and after kills."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engine.byte_llama import write_byte_llama
from tests.engine.test_structured_output import SCHEMA
from tests.server.live import LiveServer, serving
from tests.server.test_faults import gauges
from tests.server.test_replay import Ask, ask_all

DRAFTS = '{"method": "suffix", "num_speculative_tokens": 4, "adaptive": false}'
SHORT = ("--pipeline-depth", "3", "--num-blocks", "80", "--num-host-blocks", "100")
MODES: dict[str, tuple[tuple[str, ...], str]] = {
    "two steps": ((), "generation_tokens_total"),
    "three steps, short of blocks": (SHORT, "num_preemptions_total"),
    "drafts": (("--speculative-config", DRAFTS), "spec_decode_num_accepted_tokens_total"),
}
"""Flags, and the counter of what they are there for."""


def asks() -> list[Ask]:
    """Streams, several outputs, stops, penalties, grammars, and beam searches with and without a grammar."""
    plain: dict[str, Any] = {"max_tokens": 90, "return_token_ids": True, "ignore_eos": True}
    search: dict[str, Any] = {"use_beam_search": True, "n": 3, "temperature": 0, "stream": False, "max_tokens": 40}
    kinds: list[dict[str, Any]] = [
        {**plain, "temperature": 0},
        {**plain, "n": 3, "logprobs": 2, "top_p": 0.9},
        {**plain, "frequency_penalty": 1.0, "stop_token_ids": [40, 41, 42], "min_tokens": 30},
        {"max_tokens": 90, "guided_json": SCHEMA, "n": 2, "logprobs": 3},
        {"max_tokens": 90, "guided_regex": "([a-d]{3} ){30}", "temperature": 0.7},
        {**plain, "stream": False, "n": 2, "max_tokens": 90},
        {**search, "ignore_eos": True, "logprobs": 1},
        {**search, "guided_json": SCHEMA},
    ]
    return [
        ("/v1/completions", {"prompt": [3 + (i * 7 + k * k) % 250 for k in range(10 + i)], "seed": i, **kinds[i % 8]})
        for i in range(16)
    ]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = write_byte_llama(tmp_path_factory.mktemp("model"))
    return ("--model", str(folder), "--max-model-len", "512", "--num-blocks", "600", "--block-size", "8")


@pytest.fixture(scope="module")
def expected(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The answers without asynchronous scheduling."""
    with serving(tmp_path_factory.mktemp("off"), *flags, "--no-async-scheduling") as live:
        answers = asyncio.run(ask_all(live, asks()))
    assert all(one["status"] == 200 for one in answers)
    tops = [top.values() for _, _, top, _ in answers[3][0]["logprobs"]]
    assert {value for top in tops for value in top if value < -100} == {-9999.0}  # what the grammar forbids
    return answers


@pytest.mark.parametrize("mode", [*(pytest.param(mode, marks=pytest.mark.slow) for mode in list(MODES)[:-1]), "drafts"])
def test_every_number_is_that_of_one_step_at_a_time(
    flags: tuple[str, ...], expected: list[dict[str, Any]], mode: str, tmp_path: Path
) -> None:
    more, counter = MODES[mode]
    with serving(tmp_path, *flags, "--async-scheduling", *more, stepped=True) as server:
        check(server, expected, counter)


def check(server: LiveServer, expected: list[dict[str, Any]], counter: str) -> None:
    assert asyncio.run(ask_all(server, asks())) == expected
    assert gauges(server, counter)[0] > 0
    asyncio.run(leave(server))
    abort(server)
    server.wait_idle()
    assert asyncio.run(ask_all(server, asks(), kill_after=(400,))) == expected
    load = server.wait_idle()
    assert (load["engine_restarts"], load["live_tokens"]) == (1, 0)


async def leave(server: LiveServer) -> None:
    """Begin to read every stream, and go."""
    streams = [(path, {**body, "stream": True}) for path, body in asks() if body.get("stream", True)]

    async def one(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> None:
        async with session.post(path, json=body) as response:
            await response.content.readline()

    async with aiohttp.ClientSession(server.url) as session:
        await asyncio.gather(*(one(session, *ask) for ask in streams))


def abort(server: LiveServer) -> None:
    """Abort a search and an answer of several outputs while they run."""
    server.wait_idle()
    long = {"max_tokens": 450, "ignore_eos": True, "temperature": 0, "prompt": [5] * 9, "n": 3}
    bodies = [{**long, "request_id": "search", "use_beam_search": True}, {**long, "request_id": "several"}]
    with ThreadPoolExecutor(2) as pool, server.steps.held_after(20):
        asked = [pool.submit(server.post, "/v1/completions", body) for body in bodies]
        pending = {f"cmpl-{body['request_id']}" for body in bodies}
        server.steps.wait_held()
        end = time.monotonic() + 20
        while pending:
            assert time.monotonic() < end, f"not aborted: {pending}"
            pending -= set(server.post("/abort_requests", {"request_ids": sorted(pending)})[1]["aborted"])
        server.steps.release()
        answers = [one.result() for one in asked]
    for _, answer in answers:
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"abort"}, json.dumps(answer)[:500]
