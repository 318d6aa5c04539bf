#!/usr/bin/env python3
"""Draws the measurements in results/ as results/throughput.svg, the README's picture, and fills in its tables of them.

usage: draw.py [RESULTS_FOLDER] [PICTURE.svg] [PAGE.md ...]

PAGE: where the rows of the table after `<!-- table: NAME -->` are replaced by those of NAME.jsonl.

Three parts, each from the JSON lines of one script; a part without a file is left out:
  throughput.jsonl  compare.py --json: one group per workload, one bar per engine, as a multiple of the output tokens
                    per second of the first engine that is not pagoda. A bar's whisker spans its runs.
  gguf_speed.jsonl  gguf_speed.py --json: pagoda's tokens per second as a multiple of llama.cpp's, for each file
  load_times.jsonl  load_times.py --json: seconds from the command to the first token
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

RESULTS = Path(__file__).parent / "results"
MEASURES = {"decode": "one stream", "prefill": "prompt of 512", "streams": "16 streams"}


def title(what: str, rows: list[dict[str, Any]]) -> str:
    """With where the rows come from; older ones have no commit."""
    return f"{what}\n{', '.join(rows[0][name] for name in ('date', 'machine', 'commit') if name in rows[0])}"


def draw_throughput(axes: Axes, comparisons: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["engine"] for one in comparisons for row in one["engines"]))
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
    axes.set_title(title("output tokens/s", comparisons), fontsize=8)
    handles = [Rectangle((0, 0), 1, 1, color=f"C{index}") for index in range(len(names))]
    axes.legend(handles, names, fontsize=6, loc="upper left")


def draw_gguf(axes: Axes, files: list[dict[str, Any]]) -> None:
    for number, (measure, label) in enumerate(MEASURES.items()):
        places = [file + number * 0.28 for file in range(len(files))]
        axes.bar(places, [row.get(measure, 0) for row in files], 0.26, label=label)
        for place, row in zip(places, files, strict=True):
            if measure not in row:
                continue
            axes.text(place, row[measure], f"{row[f'{measure} pagoda']:.0f}", ha="center", va="bottom", fontsize=6)
    axes.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
    axes.set_xticks([file + 0.28 for file in range(len(files))], [row["file"] for row in files], fontsize=7)
    axes.set_ylabel("speed relative to llama.cpp")
    axes.set_title(title("GGUF files of 1B, tokens/s", files), fontsize=8)
    axes.margins(y=0.3)
    axes.legend(fontsize=6, loc="upper left")


def draw_load_times(axes: Axes, models: list[dict[str, Any]]) -> None:
    for place, row in enumerate(models):
        torch_s, first_s = row["import_torch_s"], row["first_token_s"]
        axes.bar(place, torch_s, 0.38, color="C7")
        axes.bar(place, first_s - torch_s, 0.38, bottom=torch_s, color="C0")
        axes.text(place, first_s, f"{first_s:.1f}", ha="center", va="bottom", fontsize=6)
        if peer_s := row.get("llama_server_first_token_s"):
            axes.bar(place + 0.4, peer_s, 0.38, color="C1")
            axes.text(place + 0.4, peer_s, f"{peer_s:.1f}", ha="center", va="bottom", fontsize=6)
    axes.set_xticks([place + 0.2 for place in range(len(models))], [row["model"] for row in models], fontsize=7)
    axes.set_ylabel("seconds to the first token")
    axes.set_title(title("start, files in the page cache", models), fontsize=8)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in ("C7", "C0", "C1")]
    axes.margins(y=0.3)
    axes.legend(handles, ["import torch", "pagoda", "llama-server"], fontsize=6, loc="upper left")


def row_of_gguf(row: dict[str, Any]) -> list[str]:
    return [row["file"], *(f"{row[f'{one} pagoda']:.0f} ({row[one]:.2f} x)" if one in row else "" for one in MEASURES)]


def row_of_load_times(row: dict[str, Any]) -> list[str]:
    peer_s = row.get("llama_server_first_token_s")
    first = f"{row['first_token_s']:.1f} s ({row['over_torch_s']:+.1f} s)"
    return [row["model"], first, f"{peer_s:.1f} s" if peer_s else ""]


TABLES = {"gguf_speed": row_of_gguf, "load_times": row_of_load_times}


def fill_in(page: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Replace the rows of a page's table, if it has that of `name`; its head is the page's."""
    lines = "".join(f"| {' | '.join(TABLES[name](row))} |\n" for row in rows)
    table = re.compile(rf"(<!-- table: {name} -->\n\|.*\n\|[-|]+\n)(?:\|.*\n)*")
    text = page.read_text(encoding="utf-8")
    page.write_text(table.sub(lambda found: found[1] + lines, text), encoding="utf-8")


PARTS = {"throughput": draw_throughput, "gguf_speed": draw_gguf, "load_times": draw_load_times}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else folder / "throughput.svg"
    lines = {
        name: (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        for name in PARTS
        if (folder / f"{name}.jsonl").exists()
    }
    rows = {name: [json.loads(line) for line in text if line.strip()] for name, text in lines.items()}
    matplotlib.rcParams["svg.hashsalt"] = "pagoda"  # the same figures give the same file
    widths = [
        1.6 + 1.5 * len(found) if name == "throughput" else 1.4 + 1.1 * len(found) for name, found in rows.items()
    ]
    figure, axes = plt.subplots(
        1, len(rows), figsize=(sum(widths), 3.6), width_ratios=widths, layout="constrained", squeeze=False
    )
    for place, (name, found) in zip(axes[0], rows.items(), strict=True):
        PARTS[name](place, found)
    figure.savefig(target, metadata={"Date": None})
    for page in map(Path, sys.argv[3:]):
        for name in TABLES.keys() & rows.keys():
            fill_in(page, name, rows[name])


if __name__ == "__main__":
    main()
