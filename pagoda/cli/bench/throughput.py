"""`pagoda bench throughput`: a workload through one engine, all requests at once."""

import time
from pathlib import Path
from typing import Annotated

import typer

from pagoda.cli.bench.figures import report
from pagoda.cli.bench.workload import read_workload
from pagoda.cli.options import engine_options

WARM_UP_TOKENS = 8


@engine_options()
def throughput(
    options: dict[str, object],
    workload: Annotated[Path, typer.Option("--workload", help="Requests as benchmarks/workload.py writes them.")],
    arrivals: Annotated[
        bool, typer.Option("--arrivals", help="Let requests come at their arrival_s instead of all at once.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line on standard output, nothing else.")] = False,
) -> None:
    """Output tokens per second on a workload. Outputs have exactly max_tokens tokens: all engines do the same work.

    secs counts from the first request to the last token; cold_start_s from the start of the process until the model
    has answered a short request.
    """
    from pagoda.cli.session import Session, seconds_since_start

    items = read_workload(workload)
    session = Session.start(options)
    session.run_batch([(list(range(10, 40)), WARM_UP_TOKENS)])
    cold_start_s = seconds_since_start()
    begin_s = time.perf_counter()
    if arrivals:
        num_output = session.run_arrivals(items)
    else:
        num_output = session.run_batch([(item.prompt_token_ids, item.max_tokens) for item in items])
    secs = time.perf_counter() - begin_s
    report(
        {
            "engine": "pagoda",
            "requests": len(items),
            "in": sum(len(item.prompt_token_ids) for item in items),
            "out": num_output,
            "secs": round(secs, 3),
            "out_tok_s": round(num_output / secs, 1),
            "cold_start_s": round(cold_start_s, 1),
        },
        as_json,
    )
