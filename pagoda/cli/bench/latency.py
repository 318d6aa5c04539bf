"""`pagoda bench latency`: measure the time of a batch, from arrival to last token."""

import time
from typing import Annotated

import typer

from pagoda.cli.bench.figures import percentile, report
from pagoda.cli.bench.throughput import run_at_once
from pagoda.cli.bench.workload import random_workload
from pagoda.cli.options import engine_options


@engine_options()
def latency(
    options: dict[str, object],
    batch_size: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 1,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each output.")] = 128,
    iterations: Annotated[int, typer.Option(min=1, help="Measured batches.")] = 10,
    warm_up: Annotated[int, typer.Option(min=0, help="Unmeasured batches to run first.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print a single JSON line on standard output.")] = False,
) -> None:
    """Measure the time of a batch of equal requests: median, p90, p99. Prompts are random, so none is cached."""
    from pagoda.cli.session import load

    llm = load(options)
    vocab_size = llm.tokenizer.facts.vocab_size
    times_s: list[float] = []
    for iteration in range(warm_up + iterations):
        items = random_workload(batch_size, input_len, output_len, vocab_size, seed=iteration)
        begin_s = time.perf_counter()
        run_at_once(llm, items)
        if iteration >= warm_up:
            times_s.append(time.perf_counter() - begin_s)
    report(
        {
            "engine": "pagoda",
            "batch_size": batch_size,
            "input_len": input_len,
            "output_len": output_len,
            "iterations": iterations,
            **{f"p{p}_s": round(percentile(times_s, p), 4) for p in (50, 90, 99)},
            "out_tok_s": round(batch_size * output_len / percentile(times_s, 50), 1),
        },
        as_json,
    )
