"""`pagoda top`: what a server does, in a terminal; of other servers, what vLLM's metrics say."""

import json
import re
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from pagoda.base.errors import ConfigError, RequestError
from pagoda.cli.console import for_stream, human_count
from pagoda.cli.help_format import LOCAL_SERVER, ApiKey, Url
from pagoda.cli.remote import ServerConnection

_MOST_ROWS = 1000
_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{[^}]*\})? ([0-9.eE+-]+|NaN)$", re.MULTILINE)
_GAUGES = ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc")
_COUNTERS = ("prompt_tokens_total", "generation_tokens_total", "num_preemptions_total")
_TIMES = ("time_to_first_token_seconds", "inter_token_latency_seconds")


@dataclass(frozen=True, slots=True)
class Look:
    """What a server said at one moment.   values: of vLLM's metrics, summed over their labels, without "vllm:".

    requests: the answer of /requests; None of a server that has no such route.
    """

    at_s: float
    values: dict[str, float]
    requests: dict[str, Any] | None


def top(
    url: Url = LOCAL_SERVER,
    api_key: ApiKey = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once: two looks, an interval apart.")] = False,
) -> None:
    """Show what a server does: rates, times, the KV cache, and its requests with what they wait for.

    Any server with vLLM's metric names works; requests are shown of a pagoda server. Until Ctrl-C.
    """
    server = ServerConnection(url, api_key)
    before = look_at(server)
    if once or not sys.stdout.isatty():
        time.sleep(interval)
        print("\n".join(for_stream(line, sys.stdout) for line in lines_of(look_at(server), before)))
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        while True:
            time.sleep(interval)
            now = look_at(server)
            shown = lines_of(now, before)[: console.height - 1]
            screen.update(Text("\n".join(for_stream(line, sys.stdout) for line in shown), no_wrap=True), refresh=True)
            before = now


def look_at(server: ServerConnection) -> Look:
    """Return what a server says now. Raises ConfigError if it does not answer, or has no metrics of these names."""
    try:
        with server.open("/metrics") as answer:
            text = answer.read().decode()
    except RequestError as error:
        raise ConfigError(f"{server.url}/metrics: {error}") from None
    values: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        name, had = name.removeprefix("vllm:"), values.get(name.removeprefix("vllm:"), 0.0)
        # Of several models, or engines: what they do together, and the fullest cache.
        values[name] = max(had, float(value)) if name.endswith("_perc") else had + float(value)
    if not values:
        raise ConfigError(f"{server.url}/metrics has no metrics of vLLM's names (vllm:...)")
    try:
        with server.open("/requests") as answer:
            return Look(time.monotonic(), values, json.load(answer))
    except (RequestError, ValueError):  # another server's
        return Look(time.monotonic(), values, None)


def lines_of(now: Look, before: Look) -> list[str]:
    """Return what is shown of a look, with rates since the one before."""
    seconds = max(now.at_s - before.at_s, 1e-9)
    values = now.values

    def more(name: str) -> float:
        return max(0.0, values.get(name, 0.0) - before.values.get(name, 0.0))  # less, after a restart

    def mean(name: str) -> str:
        count = more(f"{name}_count")
        return f"{more(f'{name}_sum') / count * 1e3:,.1f} ms" if count else "-"

    running, waiting, swapped, usage = (values.get(name, 0.0) for name in _GAUGES)
    prompt, output, preempted = (more(name) / seconds for name in _COUNTERS)
    first, gap = map(mean, _TIMES)
    lines = [
        f"{human_count(output)} output and {human_count(prompt)} prompt tokens/s; "
        f"first token {first}, between two {gap}",
        f"{human_count(running)} running, {human_count(waiting)} waiting, {human_count(swapped)} swapped; "
        f"KV cache {usage:.1%} full; {preempted:.1f} preemptions/s",
    ]
    if now.requests is None:
        return [*lines, "requests: this server has no /requests"]
    live = [one for one in now.requests["data"] if one["state"] != "ended"]
    others = now.requests["others"]
    if num_others := others["running"] + others["waiting"]:
        lines.append(f"{num_others} other requests, of keys whose requests you do not see")
    lines += [
        "",
        f"{'state':<10}{'prompt':>8}{'cached':>8}{'output':>8}{'blocks':>8}{'age s':>8}  id, and why it waits",
    ]
    for one in live[:_MOST_ROWS]:
        counts = (one["prompt_tokens"], one["cached_tokens"], one["output_tokens"], one["blocks"])
        cells = "".join(f"{human_count(count):>8}" for count in counts)
        why = f"  {one['reason']}" if one["reason"] else ""
        lines.append(f"{one['state']:<10}{cells}{one['age_s']:>8.1f}  {one['id']}{why}")
    return lines
