#!/usr/bin/env python3
"""Draw the README's picture, once for light and once for dark pages, and fill in tables of pages, from results/.

usage: draw.py [RESULTS_FOLDER] [PICTURE_STEM] [PAGE.md ...]

PICTURE_STEM: `STEM-light.svg` and `STEM-dark.svg` are written.   PAGE: where the rows of a table after
`<!-- table: NAME -->` are replaced by those of NAME.jsonl.

Results are JSON lines of the scripts of this folder:
  throughput.jsonl  compare.py --json: output tokens per second of engines on a workload
  gguf_speed.jsonl  gguf_speed.py --json: tokens per second of GGUF files, and of llama.cpp
  load_times.jsonl  load_times.py --json: seconds from the command to the first token
"""

import json
import re
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
QUESTIONS = {
    "offline64": "64 requests at once: tokens per second",
    "single": "One request: tokens per second",
    "Q4_K_M streams": "1B in 4 bits, 16 requests: tokens per second",
    "Q4_K_M prefill": "1B in 4 bits, a prompt: tokens per second",
}
"""The charts of the picture, by workload, or by file and measure: one question each."""
MEASURES = {"decode": "one stream", "prefill": "prompt of 512", "streams": "16 streams"}
PEERS = ("OpenVINO", "vLLM", "llama.cpp")
WIDTH, LABELS, BARS, LINE = 480, 170, 240, 26
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a picture: the text, the peers' bars, pagoda's."""

    text: str
    peer: str
    own: str


THEMES = {"light": Theme("#1f2328", "#c4cad1", "#1a7f5a"), "dark": Theme("#e6edf3", "#565d66", "#3fb68b")}


@dataclass(frozen=True, slots=True)
class Chart:
    """One question, and each engine's answer, the best first."""

    question: str
    bars: list[tuple[str, float]]


def charts_of(results: dict[str, list[Row]]) -> list[Chart]:
    """Return a chart for each question that the results answer."""
    found: dict[str, list[tuple[str, float]]] = {}
    for row in results.get("throughput", []):
        found[row["workload"]] = [(one["engine"], one["out_tok_s"]) for one in row["engines"] if one["out_tok_s"]]
    for row in results.get("gguf_speed", []):
        for measure in MEASURES.keys() & row.keys():
            speeds = [(engine, row[f"{measure} {engine}"]) for engine in ("pagoda", "llama.cpp")]
            found[f"{row['file']} {measure}"] = speeds
    return [
        Chart(question, sorted(found[name], key=lambda bar: -bar[1]))
        for name, question in QUESTIONS.items()
        if name in found
    ]


def draw(charts: list[Chart], caption: str, theme: Theme) -> str:
    """Return the picture: charts below each other, a name left of each bar and its figure right of it."""
    parts: list[str] = []
    top = 0
    for chart in charts:
        top += 24
        parts.append(f'<text x="0" y="{top}" font-weight="600">{escape(chart.question)}</text>')
        most = max(value for _, value in chart.bars)
        for name, value in chart.bars:
            own = name.startswith("pagoda")
            colour, weight = (theme.own, "600") if own else (theme.peer, "400")
            length = max(2.0, BARS * value / most)
            middle = top + 10 + LINE / 2
            parts += [
                f'<text x="{LABELS - 10}" y="{middle + 5}" text-anchor="end" font-weight="{weight}">'
                f"{escape(name)}</text>",
                f'<rect x="{LABELS}" y="{middle - 9}" width="{length:.1f}" height="18" rx="2" fill="{colour}"/>',
                f'<text x="{LABELS + length + 8:.1f}" y="{middle + 5}" font-weight="{weight}">{value:.0f}</text>',
            ]
            top += LINE
        top += 16
    top += 14
    parts.append(f'<text x="0" y="{top}" font-size="12" opacity="0.75">{escape(caption)}</text>')
    title = escape("; ".join(chart.question for chart in charts))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 8}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="15" fill="{theme.text}">',
            f"<title>{title}</title>",
            *parts,
            "</svg>\n",
        ]
    )


def caption_of(results: dict[str, list[Row]]) -> str:
    """Say where the figures come from: machine, day and commit, each combination once."""
    rows = [row for found in results.values() for row in found]
    sources = (", ".join(row[key] for key in ("machine", "date", "commit") if key in row) for row in rows)
    return "; ".join(dict.fromkeys(sources))


def row_of_throughput(row: Row) -> list[str]:
    """Return pagoda's speed, then each peer's with how many times as fast pagoda is."""
    speeds = {one["engine"]: one["out_tok_s"] for one in row["engines"]}
    own = speeds["pagoda"]
    peers = (speeds.get(name) for name in PEERS)
    return [row["workload"], f"{own:.0f}", *(f"{peer:.0f} ({own / peer:.2f} x)" if peer else "" for peer in peers)]


def row_of_gguf(row: Row) -> list[str]:
    return [row["file"], *(f"{row[f'{one} pagoda']:.0f} ({row[one]:.2f} x)" if one in row else "" for one in MEASURES)]


def row_of_load_times(row: Row) -> list[str]:
    peer_s = row.get("llama_server_first_token_s")
    first = f"{row['first_token_s']:.1f} s ({row['over_torch_s']:+.1f} s)"
    return [row["model"], first, f"{peer_s:.1f} s" if peer_s else ""]


TABLES = {"throughput": row_of_throughput, "gguf_speed": row_of_gguf, "load_times": row_of_load_times}


def fill_in(page: Path, name: str, rows: list[Row]) -> None:
    """Replace the rows of a page's table, if it has that of `name`; its head is the page's."""
    lines = "".join(f"| {' | '.join(TABLES[name](row))} |\n" for row in rows)
    table = re.compile(rf"(<!-- table: {name} -->\n\|.*\n\|[-|]+\n)(?:\|.*\n)*")
    text = page.read_text(encoding="utf-8")
    page.write_text(table.sub(lambda found: found[1] + lines, text), encoding="utf-8")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    stem = sys.argv[2] if len(sys.argv) > 2 else str(folder / "speed")
    texts = {name: folder / f"{name}.jsonl" for name in TABLES}
    results = {
        name: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        for name, path in texts.items()
        if path.exists()
    }
    charts, caption = charts_of(results), caption_of(results)
    for name, theme in THEMES.items():
        Path(f"{stem}-{name}.svg").write_text(draw(charts, caption, theme), encoding="utf-8")
    for page in map(Path, sys.argv[3:]):
        for name, rows in results.items():
            fill_in(page, name, rows)


if __name__ == "__main__":
    main()
