"""Figures of a benchmark: percentiles, and one way to print them."""

import json
import math
import sys
from collections.abc import Mapping, Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def report(figures: Mapping[str, object], as_json: bool) -> None:
    """Print figures: one JSON line and nothing else, or a table for people."""
    if as_json:
        print(json.dumps(figures))
        return
    from rich.table import Table

    from pagoda.cli.console import stdout_console

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,}" if isinstance(value, (int, float)) else str(value))
    stdout_console().print(table)


def note(text: str) -> None:
    """A line about progress, on standard error."""
    print(text, file=sys.stderr)
