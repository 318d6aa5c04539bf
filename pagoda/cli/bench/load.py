"""Open-loop load on an OpenAI-compatible server, and what a run comes to.

Requests start at their times, whatever became of the earlier ones. The numbers are the field's: TTFT (time to first
token), ITL (gap between two chunks of a stream), TPOT ((end - first token) / (tokens - 1)), E2E. All times are taken at
the client, from the moment a request was due.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from tqdm import tqdm

from pagoda.base.errors import ConfigError
from pagoda.cli.bench.workload import WorkItem


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to load.   base_url: without /v1.   ignore_eos: ask for exactly max_tokens (engines that know the field)."""

    base_url: str
    model: str
    api_key: str | None = None
    ignore_eos: bool = True
    timeout_s: float = 600.0


@dataclass(slots=True)
class RequestRecord:
    """What one request met. Times in seconds after the load's start; None where it never came."""

    due_s: float
    num_prompt_tokens: int
    first_s: float | None = None
    end_s: float | None = None
    num_output_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    status: int | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.first_s is not None and self.end_s is not None

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.due_s

    @property
    def e2e_s(self) -> float:
        assert self.end_s is not None
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float:
        assert self.first_s is not None
        assert self.end_s is not None
        return (self.end_s - self.first_s) / max(1, self.num_output_tokens - 1)


def poisson(requests: Sequence[WorkItem], rate_per_s: float, seed: int) -> list[WorkItem]:
    """The same requests with Poisson arrivals; an infinite rate sends all at once. Raises ConfigError for no rate."""
    if not rate_per_s > 0:
        raise ConfigError(f"--request-rate {rate_per_s}: it must be above 0 (inf sends all at once)")
    if rate_per_s == float("inf"):
        return [WorkItem(r.prompt_token_ids, r.max_tokens) for r in requests]
    rng = random.Random(seed)
    times = itertools.accumulate(rng.expovariate(rate_per_s) for _ in requests)
    return [WorkItem(r.prompt_token_ids, r.max_tokens, at) for r, at in zip(requests, times, strict=True)]


async def run_load(target: Target, requests: Sequence[WorkItem], max_concurrency: int = 0) -> list[RequestRecord]:
    """Send them all; returns one record each, in order. Bounded in count, and in time by the target's timeout.

    Shows on a terminal how many have ended, if it takes long.
    """
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    slots = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(target.base_url, headers=headers, timeout=timeout, connector=connector) as session:
        start_s = time.perf_counter()
        tasks = [asyncio.create_task(_send(session, target, r, start_s, slots)) for r in requests]
        with tqdm(total=len(tasks), unit="request", disable=None, delay=1.0, leave=False) as bar:
            for task in tasks:
                task.add_done_callback(lambda _: bar.update())
            return list(await asyncio.gather(*tasks))


async def _send(
    session: aiohttp.ClientSession, target: Target, request: WorkItem, start_s: float, slots: asyncio.Semaphore
) -> RequestRecord:
    await asyncio.sleep(max(0.0, start_s + request.arrival_s - time.perf_counter()))
    record = RequestRecord(request.arrival_s, len(request.prompt_token_ids))
    body: dict[str, object] = {
        "model": target.model,
        "prompt": request.prompt_token_ids,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    async with slots:
        try:
            async with session.post("/v1/completions", json=body) as response:
                record.status = response.status
                if response.status != 200:
                    record.error = (await response.text())[:300]
                else:
                    await _read_stream(response, record, start_s)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ValueError: what came was no event
            record.error = f"{type(error).__name__}: {error}"
    return record


async def _read_stream(response: aiohttp.ClientResponse, record: RequestRecord, start_s: float) -> None:
    last_s: float | None = None
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            break
        chunk = json.loads(data)
        if "error" in chunk:
            record.error = str(chunk["error"])
            return
        now_s = time.perf_counter() - start_s
        if chunk.get("usage"):
            record.num_output_tokens = chunk["usage"]["completion_tokens"]
        if chunk.get("choices"):
            if last_s is None:
                record.first_s = now_s
            else:
                record.gaps_s.append(now_s - last_s)
            last_s = record.end_s = now_s
    if record.end_s is None:
        record.error = "the stream ended without a token"


PERCENTILES = (50, 90, 99)


def parse_goodput(targets: Sequence[str]) -> dict[str, float]:
    """["ttft:500", "tpot:50"] -> {"ttft": 500.0, "tpot": 50.0} in ms. Raises ConfigError."""
    parsed: dict[str, float] = {}
    for target in targets:
        name, _, value = target.partition(":")
        if name not in _MEASURES:
            raise ConfigError(f"--goodput {target!r}: the metric must be one of {', '.join(_MEASURES)}, as in ttft:500")
        try:
            parsed[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput {target!r}: {value!r} is not a number of milliseconds") from None
    return parsed


_MEASURES: dict[str, Callable[[RequestRecord], float]] = {
    "ttft": lambda r: r.ttft_s * 1e3,
    "tpot": lambda r: r.tpot_s * 1e3,
    "e2e": lambda r: r.e2e_s * 1e3,
}


def summarise(records: Sequence[RequestRecord], goodput_ms: dict[str, float]) -> dict[str, Any]:
    """The report of one run.

    duration_s: from the first due time to the last token.   *_ms: mean and percentiles, None where there are none.
    goodput_requests_s: ok requests per second that met every target; None without targets.
    """
    ok = [r for r in records if r.ok]
    duration_s = max((r.end_s or 0.0 for r in ok), default=0.0) - min((r.due_s for r in records), default=0.0)
    out_tokens = sum(r.num_output_tokens for r in ok)
    refused = sum(r.status == 429 for r in records)
    good = [r for r in ok if all(_MEASURES[name](r) <= limit for name, limit in goodput_ms.items())]
    per_s = (lambda count: round(count / duration_s, 2)) if duration_s > 0 else (lambda count: 0.0)
    return {
        "requests": len(records),
        "ok": len(ok),
        "refused": refused,
        "failed": len(records) - len(ok) - refused,
        "duration_s": round(duration_s, 3),
        "in_tokens": sum(r.num_prompt_tokens for r in ok),
        "out_tokens": out_tokens,
        "out_tok_s": per_s(out_tokens),
        "requests_s": per_s(len(ok)),
        "ttft_ms": _distribution([r.ttft_s for r in ok]),
        "itl_ms": _distribution([gap for r in ok for gap in r.gaps_s]),
        "tpot_ms": _distribution([r.tpot_s for r in ok if r.num_output_tokens > 1]),
        "e2e_ms": _distribution([r.e2e_s for r in ok]),
        "goodput_requests_s": per_s(len(good)) if goodput_ms else None,
    }


def _distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ms = np.asarray(seconds) * 1e3
    p50, p90, p99 = np.percentile(ms, PERCENTILES).round(2).tolist()
    return {"mean": round(float(ms.mean()), 2), "p50": p50, "p90": p90, "p99": p99}
