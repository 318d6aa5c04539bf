"""What benchmarks share: the requests that they run, from JSON or made up from a seed, and how figures are printed."""

import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from pagoda.base.errors import ConfigError

JsonLine = Annotated[bool, typer.Option("--json", help="Print a single JSON line on standard output.")]


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request; its output has exactly max_tokens tokens.   arrival_s: seconds after the start."""

    prompt_token_ids: list[int]
    max_tokens: int
    arrival_s: float = 0.0


def read_workload(path: Path) -> list[WorkItem]:
    """The requests of a file as `benchmarks/workload.py` writes it. Raises ConfigError that says what is wrong."""
    try:
        rows = json.loads(path.read_text())
        items = [WorkItem(row["prompt_token_ids"], row["max_tokens"], row.get("arrival_s", 0.0)) for row in rows]
    except OSError as error:
        raise ConfigError(f"workload {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"workload {path} is not a JSON list of objects with prompt_token_ids and max_tokens ({error!r})"
        ) from error
    if not items:
        raise ConfigError(f"workload {path} has no requests")
    return items


def random_workload(num_requests: int, input_len: int, output_len: int, vocab: int, seed: int) -> list[WorkItem]:
    """Requests of one shape with random token ids below `vocab` (none below 10, where special tokens tend to be)."""
    rng = random.Random(seed)
    return [WorkItem([rng.randrange(10, vocab) for _ in range(input_len)], output_len) for _ in range(num_requests)]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def report(figures: Mapping[str, object], as_json: bool) -> None:
    """Print figures: one JSON line and nothing else, or a table for people."""
    if as_json:
        print(json.dumps(figures))
        return
    from pagoda.cli.console import print_table

    print_table([_with_unit(name, value) for name, value in figures.items()], right=(1,))


_LABELS = {"in": "input tokens", "out": "output tokens", "secs": "time_s", "out_tok_s": "output_tok_s"}
_UNITS = {"_tok_s": "tokens/s", "_requests_s": "requests/s", "_ms": "ms", "_s": "s"}


def _with_unit(name: str, value: object) -> tuple[str, str, str]:
    """Return what a figure is called, its value, and the unit that the end of its name says."""
    name = _LABELS.get(name, name)
    shown = f"{value:,}" if isinstance(value, int | float) else str(value)
    for end, unit in _UNITS.items():
        if name.endswith(end) or name == end[1:]:
            return name.removesuffix(end).replace("_", " "), shown, unit
    return name.replace("_", " "), shown, ""


def note(text: str) -> None:
    """A line about progress, on standard error."""
    print(text, file=sys.stderr)
