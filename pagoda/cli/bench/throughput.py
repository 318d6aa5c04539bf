"""`pagoda bench throughput`: a workload through one engine, all requests at once."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda.base.errors import RequestError
from pagoda.base.outputs import RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.cli.bench.figures import report
from pagoda.cli.bench.profile import breakdown, load_profiled, print_breakdown
from pagoda.cli.bench.workload import WorkItem, read_workload
from pagoda.cli.options import engine_options

if TYPE_CHECKING:
    from pagoda.llm import LLM

WARM_UP_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
"""All tokens that were asked for, and no text, as from the engines compared with."""


@engine_options()
def throughput(
    options: dict[str, object],
    workload: Annotated[Path, typer.Option("--workload", help="Workload file written by benchmarks/workload.py.")],
    arrivals: Annotated[
        bool, typer.Option("--arrivals", help="Send requests at their arrival_s instead of all at once.")
    ] = False,
    warm_up: Annotated[
        bool,
        typer.Option("--warm-up", help="Run the workload once before, not measured, with other tokens in its prompts."),
    ] = False,
    temperature: Annotated[float, typer.Option("--temperature", help="0: always the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Draw from the most likely tokens of this share.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Draw from so many tokens; 0: from all.")] = 0,
    profile: Annotated[bool, typer.Option("--profile", help="Show how much time each part of a step takes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a single JSON line on standard output.")] = False,
) -> None:
    """Output tokens per second on a workload. Outputs have exactly max_tokens tokens: all engines do the same work.

    secs counts from the first request to the last token; cold_start_s from the start of the process until the model
    has answered a short request. On a GPU, kernels are compiled and graphs captured while first used: --warm-up leaves
    that out of secs.
    """
    from pagoda.cli.session import load, seconds_since_start

    items = read_workload(workload)
    params = replace(GREEDY, temperature=temperature, top_p=top_p, top_k=top_k)
    llm, worker = load_profiled(options) if profile else (load(options), None)
    run_at_once(llm, [WorkItem(list(range(10, 40)), WARM_UP_TOKENS)])
    cold_start_s = seconds_since_start()
    if warm_up:
        run_at_once(llm, with_other_tokens(items), params)
    if worker is not None:
        worker.measure()
    begin_s = time.perf_counter()
    num_output = run_at_arrivals(llm, items, params) if arrivals else run_at_once(llm, items, params)
    secs = time.perf_counter() - begin_s
    measured = worker.profile() if worker is not None else None
    rows = breakdown(measured, secs) if measured is not None else []
    report(
        {
            "engine": "pagoda",
            "requests": len(items),
            "in": sum(len(item.prompt_token_ids) for item in items),
            "out": num_output,
            "secs": round(secs, 3),
            "out_tok_s": round(num_output / secs, 1),
            "cold_start_s": round(cold_start_s, 1),
            **({"profile": rows} if as_json and profile else {}),
        },
        as_json,
    )
    if measured is not None and not as_json:
        print_breakdown(rows, measured.num_steps)


def with_other_tokens(items: Sequence[WorkItem]) -> list[WorkItem]:
    """Return requests to warm up with.

    They have the same lengths and share the same prefixes, and none of their blocks serves `items`.
    """
    return [replace(item, prompt_token_ids=[token ^ 1 for token in item.prompt_token_ids]) for item in items]


def run_at_once(llm: "LLM", items: Sequence[WorkItem], params: SamplingParams = GREEDY) -> int:
    """All requests together; the number of output tokens. Raises RequestError when one was refused."""
    prompts = [item.prompt_token_ids for item in items]
    outputs = llm.generate(prompts, [replace(params, max_tokens=item.max_tokens) for item in items], use_tqdm=False)
    return _count_tokens(outputs)


def run_at_arrivals(llm: "LLM", items: Sequence[WorkItem], params: SamplingParams = GREEDY) -> int:
    """Each request when its time has come; the number of output tokens."""
    begin_s = time.perf_counter()
    calls: list[Future[list[RequestOutput]]] = []
    with ThreadPoolExecutor(max(len(items), 1)) as pool:
        for item in sorted(items, key=lambda item: item.arrival_s):
            time.sleep(max(0.0, begin_s + item.arrival_s - time.perf_counter()))
            asked = replace(params, max_tokens=item.max_tokens)
            calls.append(pool.submit(llm.generate, item.prompt_token_ids, asked, use_tqdm=False))
    return _count_tokens([output for call in calls for output in call.result()])


def _count_tokens(outputs: Sequence[RequestOutput]) -> int:
    for output in outputs:
        if output.error is not None:
            raise RequestError(f"request {output.request_id} of the workload was not served: {output.error}")
    return sum(len(output.outputs[0].token_ids) for output in outputs)
