"""`pagoda bench throughput` and `bench latency`: the engine in this process, and where the time of its steps went."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from pagoda.base.errors import RequestError
from pagoda.base.outputs import RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.cli.bench.workload import JsonLine, WorkItem, percentile, random_workload, read_workload, report
from pagoda.cli.options import engine_options
from pagoda.ops.forward import OP_TABLE

if TYPE_CHECKING:
    from pagoda.llm import LLM
    from pagoda.worker.worker import StepProfile

_FOLDERS = {"linear": "linear layers", "moe": "mixture of experts", "attention": "attention", "kv_cache": "KV writes"}
"""Rows of the table, by the folder of an op's kernels; the others are elementwise."""


class TimeShare(TypedDict):
    """One line of the table.   share: of the whole run, 0 to 1."""

    part: str
    secs: float
    share: float


def breakdown(profile: "StepProfile", secs: float) -> list[TimeShare]:
    """The parts of a run that took `secs`, largest first; they add up to it.

    barriers: entering and leaving parallel regions, estimated as ops x what an empty region takes, and taken off the
    linear layers, where nearly all regions are. scheduling and output: all that is not the worker's.
    """
    parts, ops = dict(profile.parts), profile.ops
    forward = parts.pop("forward", 0.0)
    barriers = profile.num_steps * profile.num_ops * profile.region_s
    kinds = dict.fromkeys((*_FOLDERS.values(), "elementwise"), 0.0)
    for name, spent in ops.items():
        kinds[_FOLDERS.get(OP_TABLE[name].folder, "elementwise")] += spent
    kinds["linear layers"] -= barriers + ops.get("logits", 0.0)
    rows = {
        **kinds,
        "barriers (estimated)": barriers,
        "forward, the rest": forward - sum(ops.values()),
        "lm_head": ops.get("logits", 0.0),
        "sampling": parts.pop("sampling", 0.0),
        "worker's Python": sum(parts.values()),
    }
    if not ops:
        rows = {"forward": forward, **{name: rows[name] for name in ("sampling", "worker's Python")}}
    rows["scheduling and output"] = secs - sum(rows.values())
    ordered = sorted(rows.items(), key=lambda item: -item[1])
    return [TimeShare(part=name, secs=round(value, 4), share=round(value / secs, 4)) for name, value in ordered]


def print_breakdown(rows: list[TimeShare], num_steps: int) -> None:
    """As a table on standard output."""
    from pagoda.cli.console import print_table

    print()
    print_table(
        [
            (row["part"], f"{row['secs']:.3f}", f"{row['share']:.1%}", f"{row['secs'] / num_steps * 1e3:.3f}")
            for row in rows
        ],
        ("part", "seconds", "share", "ms per step"),
        right=(1, 2, 3),
    )


WARM_UP_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
"""All tokens that were asked for, and no text, as from the engines compared with."""


@engine_options()
def throughput(
    options: dict[str, object],
    workload: Annotated[
        Path | None,
        typer.Option("--workload", help="JSON file: a list of objects with prompt_token_ids, max_tokens, arrival_s."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of random prompts if no workload is given.")] = 64,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens per random prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Output tokens per random prompt.")] = 64,
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
    as_json: JsonLine = False,
) -> None:
    """Output tokens per second on a workload. Outputs have exactly max_tokens tokens: all engines do the same work.

    secs counts from the first request to the last token; cold_start_s from the start of the process until the model
    has answered a short request. On a GPU, kernels are compiled and graphs captured while first used: --warm-up leaves
    that out of secs.
    """
    from pagoda.cli.session import load, seconds_since_start

    items = read_workload(workload) if workload is not None else []
    params = replace(GREEDY, temperature=temperature, top_p=top_p, top_k=top_k)
    llm = load(options)
    if not items:
        items = random_workload(num_prompts, input_len, output_len, llm.get_tokenizer().facts.vocab_size, seed=0)
    run_at_once(llm, [WorkItem(list(range(10, 40)), WARM_UP_TOKENS)])
    cold_start_s = seconds_since_start()
    if warm_up:
        run_at_once(llm, with_other_tokens(items), params)
    if profile:
        llm.llm_engine.core.begin_profile()
    begin_s = time.perf_counter()
    num_output = run_at_arrivals(llm, items, params) if arrivals else run_at_once(llm, items, params, True)
    secs = time.perf_counter() - begin_s
    measured = llm.llm_engine.core.profile() if profile else None
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


def run_at_once(
    llm: "LLM", items: Sequence[WorkItem], params: SamplingParams = GREEDY, shows_progress: bool = False
) -> int:
    """All requests together; the number of output tokens. Raises RequestError when one was refused.

    shows_progress: on a terminal, for work that takes long.
    """
    prompts = [item.prompt_token_ids for item in items]
    outputs = llm.generate(prompts, [replace(params, max_tokens=item.max_tokens) for item in items], shows_progress)
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


@engine_options()
def latency(
    options: dict[str, object],
    batch_size: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 1,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each output.")] = 128,
    iterations: Annotated[int, typer.Option(min=1, help="Measured batches.")] = 10,
    warm_up: Annotated[int, typer.Option(min=0, help="Unmeasured batches to run first.")] = 2,
    as_json: JsonLine = False,
) -> None:
    """Measure the time of a batch of equal requests: median, p90, p99. Prompts are random, so none is cached."""
    from pagoda.cli.session import load

    llm = load(options)
    vocab_size = llm.get_tokenizer().facts.vocab_size
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
