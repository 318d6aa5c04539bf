"""Counts: what a process has counted, so that it can be added to what others have; and histograms."""

from bisect import bisect_left
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

LABELS = ("model_name", "engine")
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

Counts = dict[str, dict[str, float]]
"""All that a process has counted and that only grows, by metric and label: what processes have counted can be added."""

ModelCounts = dict[str, Counts]
"""What a process has counted of each model, by the model's name."""


def add_model_counts(total: ModelCounts, more: ModelCounts) -> None:
    """Add to counts what another process has counted."""
    for model, counts in more.items():
        add_counts(total.setdefault(model, {}), counts)


def add_counts(total: Counts, more: Counts) -> None:
    """Add to the counts of a model what another process has counted."""
    for name, values in more.items():
        into = total.setdefault(name, {})
        for label, count in values.items():
            into[label] = into.get(label, 0) + count


class Histogram:
    """Counts values by bucket. The library's goes through the buckets and takes locks for each value."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def bounds(self) -> tuple[float, ...]:
        return self._bounds

    def counts(self) -> dict[str, float]:
        """Return how many values were in each bucket, by its number, and their sum; see Counts."""
        return {**{str(number): count for number, count in enumerate(self._counts)}, "sum": self.total}

    def buckets(self, counts: Counts) -> list[float]:
        """Return how many values were in each bucket, the last one without an upper bound."""
        mine = counts[self.name]
        return [mine[str(number)] for number in range(len(self._bounds) + 1)]

    def family(self, counts: Counts, values: tuple[str, ...], name: str = "") -> Metric:
        """Return it as Prometheus reads it.   values: of LABELS.   name: another one for the same."""
        family = HistogramMetricFamily(f"vllm:{name or self.name}", self._text, labels=LABELS)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        sums = list(zip(bounds, accumulate(self.buckets(counts)), strict=True))
        family.add_metric(values, sums, counts[self.name]["sum"])
        return family


def tokens_per_step() -> Histogram:
    """Return what counts the tokens of each step of the engine."""
    return Histogram("iteration_tokens_total", "Tokens per step: of prompts, sampled, and drafted.", _STEP_TOKENS)
