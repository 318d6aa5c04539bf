#!/usr/bin/env python3
"""What streams keep of their speed while long prompts come in.

usage: interference.py WORKLOAD.json [--rounds 3] [--json] [any flag of `pagoda generate`]

The requests that arrive first (all at second 0) are run alone, and then with those that come later, alternately. Their
speed is output tokens per second, from each one's first token to its last; `kept` 0.7 says that they kept 70 % of it.
"""

import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda.base.outputs import RequestOutputKind
from pagoda.base.sampling_params import SamplingParams
from pagoda.cli.bench.workload import WorkItem, read_workload
from pagoda.cli.options import engine_options

if TYPE_CHECKING:
    from pagoda.engine.text_engine import TextEngine


def decode_speed(engine: "TextEngine", items: list[WorkItem]) -> tuple[float, float]:
    """Return the mean output tokens per second of the first arrivals, and when the last request ended, in s."""
    waiting = sorted(items, key=lambda item: item.arrival_s)
    first = {f"early{i}" for i, item in enumerate(waiting) if item.arrival_s == 0.0}
    speeds: list[float] = []
    begin_s = time.perf_counter()
    submitted = 0
    while submitted < len(waiting) or engine.has_unfinished_requests():
        now_s = time.perf_counter() - begin_s
        while submitted < len(waiting) and waiting[submitted].arrival_s <= now_s:
            item = waiting[submitted]
            params = SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True, detokenize=False)
            request = engine.prepare(f"early{submitted}", item.prompt_token_ids, params)
            engine.add(request, RequestOutputKind.FINAL_ONLY)
            submitted += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting[submitted].arrival_s - now_s))
            continue
        for output in engine.step():
            times = output.metrics
            assert output.error is None, output.error
            assert times is not None
            assert times.first_token_time is not None
            assert times.finished_time is not None
            if output.request_id in first:
                num_tokens = len(output.outputs[0].token_ids)
                speeds.append((num_tokens - 1) / (times.finished_time - times.first_token_time))
    return statistics.mean(speeds), time.perf_counter() - begin_s


@engine_options()
def main(
    options: dict[str, object],
    workload: Annotated[Path, typer.Argument(help="Requests as workload.py writes them, some of which arrive later.")],
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of runs.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
) -> None:
    """What streams keep of their speed while long prompts come in."""
    from pagoda.assembly.assemble import build_llm_engine
    from pagoda.base.config import EngineConfig

    items = read_workload(workload)
    early = [item for item in items if item.arrival_s == 0.0]
    pairs: list[tuple[float, float]] = []
    seconds: list[float] = []
    engine = build_llm_engine(EngineConfig.for_engine(**{"enable_prefix_caching": False, **options}))
    decode_speed(engine, early[:2])
    for _ in range(rounds):
        alone, _ = decode_speed(engine, early)
        next_to_prompts, all_s = decode_speed(engine, items)
        pairs.append((alone, next_to_prompts))
        seconds.append(all_s)
    engine.shutdown()
    kept = statistics.median(kept / alone for alone, kept in pairs)
    figures = {
        "kept": round(kept, 3),
        "alone_tok_s": round(statistics.median(alone for alone, _ in pairs), 2),
        "with_prompts_tok_s": round(statistics.median(kept for _, kept in pairs), 2),
        "all_done_s": round(statistics.median(seconds), 2),
    }
    print(json.dumps(figures) if as_json else "  ".join(f"{key} {value}" for key, value in figures.items()))


if __name__ == "__main__":
    typer.run(main)
