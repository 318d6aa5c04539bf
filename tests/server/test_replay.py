"""Kill the engine in mid-stream: every client receives exactly what it would have received without the kill.

Many requests and kills, with the fake executor; test_real_model.py does this with a real model.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from tests.server.live import LiveServer, serving

FLAGS = ("--distributed-executor-backend", "fake", "--num-blocks", "2048", "--max-model-len", "2048")
Ask = tuple[str, dict[str, Any]]
_STEPS_AT_ONCE = 3


def strict_json(text: str) -> Any:
    """Parse JSON, which has no NaN and no Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


async def told(session: aiohttp.ClientSession, ask: Ask, so_far: Counter[str]) -> dict[Any, Any]:
    """Send a request and return its whole answer, with chunks joined; `so_far` counts tokens as they arrive."""
    path, body = ask
    if not body.get("stream", True):
        async with session.post(path, json=body) as response:
            answer = strict_json(await response.text())
            return {"status": response.status, "choices": answer["choices"], "usage": _counts(answer["usage"])}
    whole: dict[Any, Any] = {"usage": None}
    async with session.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}}) as response:
        whole["status"] = response.status
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = strict_json(line[6:].decode())
            assert "error" not in chunk, chunk
            whole["usage"] = _counts(chunk.get("usage")) or whole["usage"]
            for choice in chunk["choices"]:
                _add(whole.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": []}), choice)
                so_far["tokens"] += len(choice.get("token_ids") or choice.get("logprobs") or ())
    return whole


def _counts(usage: dict[str, Any] | None) -> dict[str, Any]:
    """Return usage without the cached tokens, which depend on timing."""
    return {name: count for name, count in (usage or {}).items() if name != "prompt_tokens_details"}


def _add(whole: dict[Any, Any], choice: dict[str, Any]) -> None:
    whole["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    whole["token_ids"] += choice.get("token_ids") or []
    logprobs = choice.get("logprobs") or {}
    # One entry per token: how tokens are grouped into chunks depends on timing.
    columns = [
        logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset") if name in logprobs
    ]
    whole["logprobs"] += logprobs.get("content") or [
        list(row) for row in zip(*(c or [] for c in columns), strict=False)
    ]
    if choice.get("prompt_logprobs"):
        assert "prompt_logprobs" not in whole, "told twice"
        whole["prompt_logprobs"] = choice["prompt_logprobs"]
    if choice.get("finish_reason"):
        assert "finish_reason" not in whole, "it ended twice"
        whole["finish_reason"], whole["stop_reason"] = choice["finish_reason"], choice.get("stop_reason")


async def ask_all(server: LiveServer, asks: Sequence[Ask], kill_after: Sequence[int] = ()) -> list[dict[Any, Any]]:
    """Send all requests at once; kill the engine when clients have received each of these total numbers of tokens.

    The engine is held after every few steps, so that it cannot end the requests before the test looks.
    """
    so_far: Counter[str] = Counter()
    if not kill_after:
        return await _ask_at_once(server, asks, so_far)
    num_restarts = (await asyncio.to_thread(server.wait_idle))["engine_restarts"]
    server.steps.hold_after(_STEPS_AT_ONCE)
    asked = asyncio.create_task(_ask_at_once(server, asks, so_far))
    try:
        for number, count in enumerate(kill_after, 1):
            await asyncio.to_thread(server.steps.wait_held)
            while so_far["tokens"] < count:
                server.steps.hold_after(_STEPS_AT_ONCE)
                await asyncio.to_thread(server.steps.wait_held)
                await asyncio.sleep(0.02)  # for what is on its way to the clients
            assert not asked.done(), "no stream was interrupted"
            await asyncio.to_thread(server.kill_engine)
            server.steps.hold_next_engine_after(_STEPS_AT_ONCE)
            if number == len(kill_after):
                server.steps.release()
            await asyncio.to_thread(server.wait_restarts, num_restarts + number)
    finally:
        server.steps.release()
    return await asked


async def _ask_at_once(server: LiveServer, asks: Sequence[Ask], so_far: Counter[str]) -> list[dict[Any, Any]]:
    async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(told(session, ask, so_far) for ask in asks))


def asks_that_end_in_many_ways(told_without: Sequence[dict[Any, Any]]) -> list[Ask]:
    """Return requests that end by length, stop string (also of one sequence), stop token, or later due to `min_tokens`.

    told_without: answers of the same requests when all end by length, from which the stops are taken.
    """
    asks: list[Ask] = []
    for i, whole in enumerate(told_without):
        body = plain(i)
        texts, ids = [whole[sequence]["text"] for sequence in range(body["n"])], whole[0]["token_ids"]
        if i % 6 == 1:
            body["stop"] = texts[0][600:604]
        elif i % 6 == 2:
            body["stop"] = [text[400 + 400 * j : 405 + 400 * j] for j, text in enumerate(texts)]
            body["include_stop_str_in_output"] = True
        elif i % 6 == 3:
            body |= {"stop": [texts[0][50:54], texts[0][1500:1504]], "min_tokens": 60}
        elif i % 6 == 4:
            body |= {"stop_token_ids": [ids[30], ids[250]], "min_tokens": 60}
        elif i % 6 == 5:
            body |= {"max_tokens": 200 + i, "stream": i % 4 == 1}
        asks.append(("/v1/completions", body))
    return asks


def plain(number: int) -> dict[str, Any]:
    sampling = {"max_tokens": 400, "seed": number, "n": 1 + number % 3, "ignore_eos": True}
    return {"prompt": [10 + number] * 12, "return_token_ids": True, **sampling}


def num_computed(server: LiveServer) -> float:
    """Tokens in all steps so far, of all lives of the engine."""
    lines = server.get("/metrics")[1].splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("vllm:iteration_tokens_total_sum"))


def test_kills_do_not_change_the_outputs(tmp_path: Path) -> None:
    with serving(tmp_path, *FLAGS, stepped=True) as server:
        without = asyncio.run(ask_all(server, [("/v1/completions", plain(i)) for i in range(12)]))
        asks = asks_that_end_in_many_ways(without)
        before = num_computed(server)
        undisturbed = asyncio.run(ask_all(server, asks))
        needed = num_computed(server) - before
        parts = [part for whole in undisturbed for part in whole.values() if isinstance(part, dict)]
        ends = Counter(part["finish_reason"] for part in parts if "finish_reason" in part)
        assert min(ends["length"], ends["stop"]) > 5
        before = num_computed(server)
        assert asyncio.run(ask_all(server, asks, kill_after=(1, 1500, 3000))) == undisturbed
        again = num_computed(server) - before
        # Most of the 1500 tokens of the second kill, and of the 3000 of the third, are of requests that have not ended.
        assert again > needed + 1500, f"{again} of {needed}: too little was computed again"
        load = server.wait_idle()
        assert (load["engine_restarts"], load["live_tokens"]) == (3, 0)
