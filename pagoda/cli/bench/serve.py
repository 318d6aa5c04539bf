"""`pagoda bench serve`: open-loop load against any OpenAI-compatible URL."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pagoda.cli.bench.workload import JsonLine, note, random_workload, read_workload, report
from pagoda.cli.remote import without_v1


def bench_serve(
    base_url: Annotated[str, typer.Option(help="URL of the server, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name (default: the first that the server lists).")] = None,
    workload: Annotated[
        Path | None, typer.Option(help="JSON file: a list of objects with prompt_token_ids, max_tokens, arrival_s.")
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(help="Mean requests per second, Poisson arrivals (inf: all at once); overrides arrival_s."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Number of random prompts if no workload is given.")] = 64,
    input_len: Annotated[int, typer.Option(help="Tokens per random prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Output tokens per random prompt.")] = 64,
    vocab: Annotated[int, typer.Option(help="Exclusive upper bound of random token ids.")] = 32000,
    max_concurrency: Annotated[int, typer.Option(help="Maximum concurrent requests (0: no limit, open loop).")] = 0,
    seed: int = 0,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Latency target in ms, such as ttft:500. May be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate exactly max_tokens (a field of vLLM's API and ours).")
    ] = True,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Timeout per request in seconds.")] = 600.0,
    as_json: JsonLine = False,
) -> None:
    """Load a running server; report throughput, TTFT, ITL, TPOT, E2E percentiles and goodput."""
    from pagoda.cli.bench import load
    from pagoda.cli.remote import RemoteSession

    targets = load.parse_goodput(goodput or [])
    if workload is not None:
        requests = read_workload(workload)
    else:
        requests = random_workload(num_prompts, input_len, output_len, vocab, seed)
    if request_rate is not None:
        requests = load.poisson(requests, request_rate, seed)
    base_url = without_v1(base_url)
    target = load.Target(
        base_url, model or RemoteSession(base_url, None, api_key).model_name, api_key, ignore_eos, timeout_s
    )
    records = asyncio.run(load.run_load(target, requests, max_concurrency))
    result = load.summarise(records, targets)
    if as_json:
        print(json.dumps(result))
    else:
        _print_table(result, [r.error for r in records if r.error])
    if requests and not result["ok"]:
        raise typer.Exit(1)  # scripts must not take a run without a single answer for a measurement


def _print_table(result: dict[str, Any], errors: list[str]) -> None:
    """Print the figures, then the distributions of times, then some errors."""
    from pagoda.cli.console import print_table

    report({name: value for name, value in result.items() if not isinstance(value, dict | None)}, False)
    times = {name: result[f"{name}_ms"] for name in ("ttft", "itl", "tpot", "e2e")}
    columns = ("mean", "p50", "p90", "p99")
    rows = [
        (name.upper(), *(f"{row[key]:,.1f}" for key in columns), "ms") for name, row in times.items() if row is not None
    ]
    print()
    print_table(rows, ("", *columns, ""), right=(1, 2, 3, 4))
    for error in sorted(set(errors))[:3]:
        note(error)
