#!/usr/bin/env python3
"""Draws results/throughput.jsonl, lines of `compare.py --json`, as bars: results/throughput.svg.

usage: draw.py [RESULTS.jsonl] [PICTURE.svg]

One group per workload, one bar per engine: its output tokens per second as a multiple of those of the first engine
that is not pagoda: workloads of very different speeds then share one scale. A bar's whisker spans its runs.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "throughput.jsonl"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else RESULTS / "throughput.svg"
    comparisons = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    names = list(dict.fromkeys(row["engine"] for one in comparisons for row in one["engines"]))
    matplotlib.rcParams["svg.hashsalt"] = "pagoda"  # the same figures give the same file
    figure, axes = plt.subplots(figsize=(1.6 + 1.5 * len(comparisons), 3.6), layout="constrained")
    at = 0.0
    middles: list[float] = []
    for one in comparisons:
        rows = [row for row in one["engines"] if row["out_tok_s"]]
        base = next(row["out_tok_s"] for row in rows if not row["engine"].startswith("pagoda"))
        middles.append(at + (len(rows) - 1) / 2)
        for row in rows:
            runs = [value for value in row["runs"] if value == value]
            height = row["out_tok_s"] / base
            whisker = [[height - min(runs) / base], [max(runs) / base - height]]
            colour = f"C{names.index(row['engine'])}"
            axes.bar(at, height, 0.9, color=colour, yerr=whisker, error_kw={"linewidth": 0.8})
            axes.text(at, height, f"{row['out_tok_s']:.0f}", ha="center", va="bottom", fontsize=6)
            at += 1
        at += 1
    axes.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
    axes.set_xticks(middles, [one["workload"].replace(", ", "\n") for one in comparisons])
    axes.set_ylabel("speed relative to the first peer")
    axes.set_title(f"output tokens/s, {comparisons[0]['date']}, {comparisons[0]['machine']}", fontsize=8)
    handles = [plt.Rectangle((0, 0), 1, 1, color=f"C{index}") for index in range(len(names))]
    axes.legend(handles, names, fontsize=6, loc="upper left")
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
