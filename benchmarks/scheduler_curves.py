"""Draws what planning a step costs: over running sequences, waiting requests and the size of the pool.

python benchmarks/scheduler_curves.py [--vllm FILE]      measure, write results/scheduler.jsonl and scheduler.svg
python benchmarks/scheduler_curves.py --draw-only        draw results/scheduler.jsonl again

--vllm takes JSON lines of vLLM's figures (`python benchmarks/peers/vllm_scheduler.py MODEL_DIR 8 64 256 1024`, by a
Python that has vLLM, on the same machine in the same sitting); they are kept in the results and drawn next to ours.
"""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pagoda.cli.bench.scheduler import NUM_SEQS, measure, measure_curves

RESULTS = Path(__file__).parent / "results"
WIDTH, HEIGHT, MARGIN = 360, 240, 52
COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8d6a9f")

Line = tuple[str, list[tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="JSON lines of vLLM's figures")
    parser.add_argument("--draw-only", action="store_true")
    options = parser.parse_args()
    results = RESULTS / "scheduler.jsonl"
    if not options.draw_only:
        records: list[dict[str, Any]] = [
            asdict(measure(size, caching)) for size in NUM_SEQS for caching in (False, True)
        ]
        lines = options.vllm.read_text().splitlines() if options.vllm else []
        records += [json.loads(line) for line in lines if line.startswith("{") and '"engine"' in line]
        records += [asdict(point) for point in measure_curves()]
        RESULTS.mkdir(exist_ok=True)
        results.write_text("".join(json.dumps(record) + "\n" for record in records))
    records = [json.loads(line) for line in results.read_text().splitlines()]
    (RESULTS / "scheduler.svg").write_text(draw(records))


def draw(records: list[dict[str, Any]]) -> str:
    """Four small charts, both axes logarithmic."""
    cases = [record for record in records if "engine" in record]
    points = [record for record in records if "num_waiting" in record]
    smallest = min(point["num_blocks"] for point in points)
    waiting = [point for point in points if point["num_blocks"] == smallest and point["num_waiting"]]
    pools = [point for point in points if not point["num_waiting"]]

    def by_engine(field: str) -> list[Line]:
        return [
            (f"{engine.split('-')[0]}, caching {'on' if caching else 'off'}", sorted(line))
            for engine in sorted({case["engine"] for case in cases})
            for caching in (False, True)
            if (
                line := [
                    (case["num_seqs"], case[field])
                    for case in cases
                    if (case["engine"], case["prefix_caching"]) == (engine, caching)
                ]
            )
        ]

    charts = [
        ("µs per running sequence and step", "running sequences", by_engine("per_seq_us")),
        ("µs to add a 512-token request", "running sequences", by_engine("add_request_us")),
        (
            "µs per step, 64 running",
            "waiting requests",
            [("step", [(p["num_waiting"], p["step_us"]) for p in waiting])],
        ),
        (
            "64 running, none waiting",
            "blocks in the pool",
            [
                ("step, µs", sorted((p["num_blocks"], p["step_us"]) for p in pools)),
                ("construction, ms", sorted((p["num_blocks"], p["construct_ms"]) for p in pools)),
            ],
        ),
    ]
    body = "".join(
        f'<g transform="translate({index % 2 * WIDTH},{index // 2 * HEIGHT})">{chart(*content)}</g>'
        for index, content in enumerate(charts)
    )
    size = f'width="{2 * WIDTH}" height="{2 * HEIGHT}"'
    style = 'font-family="sans-serif" font-size="10" fill="#333"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}><rect {size} fill="white"/>{body}</svg>\n'


def chart(title: str, axis: str, lines: list[Line]) -> str:
    """One chart: powers of ten as grid, a legend in the upper left."""
    everything = [point for _, line in lines for point in line]
    left, right = _decades([x for x, _ in everything])
    low, high = _decades([y for _, y in everything])

    def at(x: float, y: float) -> tuple[float, float]:
        across = MARGIN + (math.log10(x) - left) / (right - left) * (WIDTH - MARGIN - 16)
        up = HEIGHT - 40 - (math.log10(y) - low) / (high - low) * (HEIGHT - 74)
        return round(across, 1), round(up, 1)

    parts = [f'<text x="{MARGIN}" y="18" font-size="12">{title}</text>']
    parts.append(f'<text x="{WIDTH - 16}" y="{HEIGHT - 10}" text-anchor="end">{axis}</text>')
    for power in range(low, high + 1):
        x, y = at(10**left, 10**power)
        parts.append(f'<path d="M{x} {y}H{WIDTH - 16}" stroke="#ddd"/><text x="{x - 6}" y="{y + 3}" text-anchor="end">')
        parts.append(f"{10**power:g}</text>")
    for power in range(left, right + 1):
        x, y = at(10**power, 10**low)
        parts.append(f'<text x="{x}" y="{y + 14}" text-anchor="middle">{10**power:,}</text>')
    for number, (name, line) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        path = "L".join("{} {}".format(*at(x, y)) for x, y in line)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += ['<circle cx="{}" cy="{}" r="2.5" fill="{}"/>'.format(*at(x, y), colour) for x, y in line]
        parts.append(f'<text x="{MARGIN + 6}" y="{40 + 12 * number}" fill="{colour}">{name}</text>')
    return "".join(parts)


def _decades(values: list[float]) -> tuple[int, int]:
    """Powers of ten around the values, one apart at least."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


if __name__ == "__main__":
    main()
