"""What a load run comes to: throughput, percentiles, goodput; as JSON, a table and a plot."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from pagoda.base.errors import ConfigError
from pagoda.cli.bench.load import RequestRecord

PERCENTILES = (50, 90, 99)


class Distribution(TypedDict):
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class LoadReport(TypedDict):
    """duration_s: from the first due time to the last token.

    goodput: ok requests per second that met every target.
    """

    requests: int
    ok: int
    refused: int
    failed: int
    duration_s: float
    in_tokens: int
    out_tokens: int
    out_tok_s: float
    requests_s: float
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    goodput_requests_s: float | None


def parse_goodput(targets: Sequence[str]) -> dict[str, float]:
    """["ttft:500", "tpot:50"] -> {"ttft": 500.0, "tpot": 50.0} in ms. Raises ConfigError."""
    parsed: dict[str, float] = {}
    for target in targets:
        name, _, value = target.partition(":")
        if name not in _MEASURES:
            raise ConfigError(f"--goodput {target!r}: the metric must be one of {', '.join(_MEASURES)}, as in ttft:500")
        try:
            parsed[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput {target!r}: {value!r} is not a number of milliseconds") from None
    return parsed


_MEASURES: dict[str, Callable[[RequestRecord], float]] = {
    "ttft": lambda r: r.ttft_s * 1e3,
    "tpot": lambda r: r.tpot_s * 1e3,
    "e2e": lambda r: r.e2e_s * 1e3,
}


def summarise(records: Sequence[RequestRecord], goodput_ms: dict[str, float]) -> LoadReport:
    """The report of one run."""
    ok = [r for r in records if r.ok]
    duration_s = max((r.end_s or 0.0 for r in ok), default=0.0) - min((r.due_s for r in records), default=0.0)
    out_tokens = sum(r.num_output_tokens for r in ok)
    refused = sum(r.status == 429 for r in records)
    good = [r for r in ok if all(_MEASURES[name](r) <= limit for name, limit in goodput_ms.items())]
    per_s = (lambda count: round(count / duration_s, 2)) if duration_s > 0 else (lambda count: 0.0)
    return LoadReport(
        requests=len(records),
        ok=len(ok),
        refused=refused,
        failed=len(records) - len(ok) - refused,
        duration_s=round(duration_s, 3),
        in_tokens=sum(r.num_prompt_tokens for r in ok),
        out_tokens=out_tokens,
        out_tok_s=per_s(out_tokens),
        requests_s=per_s(len(ok)),
        ttft_ms=_distribution([r.ttft_s for r in ok]),
        itl_ms=_distribution([gap for r in ok for gap in r.gaps_s]),
        tpot_ms=_distribution([r.tpot_s for r in ok if r.num_output_tokens > 1]),
        e2e_ms=_distribution([r.e2e_s for r in ok]),
        goodput_requests_s=per_s(len(good)) if goodput_ms else None,
    )


def _distribution(seconds: Sequence[float]) -> Distribution | None:
    if not seconds:
        return None
    ms = np.asarray(seconds) * 1e3
    p50, p90, p99 = np.percentile(ms, PERCENTILES).round(2).tolist()
    return Distribution(mean=round(float(ms.mean()), 2), p50=p50, p90=p90, p99=p99)


def check_plot(path: Path) -> None:
    """Raises ConfigError when no picture could be written there: better before a long run than after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: folder {path.parent} does not exist")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: the name must end with .png, .svg or .pdf")


def plot(records: Sequence[RequestRecord], path: Path) -> None:
    """Two panels: TTFT and E2E over the time requests were due, and the distribution of ITL.

    Call check_plot before the run. Draws nothing where no request was answered.
    """
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    ok = [r for r in records if r.ok]
    if not ok:
        return
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    due = [r.due_s for r in ok]
    left.scatter(due, [r.ttft_s * 1e3 for r in ok], s=10, label="TTFT")
    left.scatter(due, [r.e2e_s * 1e3 for r in ok], s=10, label="E2E")
    left.set(xlabel="due (s)", ylabel="ms", yscale="log")
    left.legend()
    gaps = np.sort(np.asarray([gap for r in ok for gap in r.gaps_s]) * 1e3)
    right.plot(gaps, np.linspace(0, 100, len(gaps)))
    right.set(xlabel="inter-token latency (ms)", ylabel="share of gaps (%)")
    if len(gaps):
        right.set_xscale("log")
    figure.savefig(path)
