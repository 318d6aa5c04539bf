"""The Grafana dashboard asks for series that the server has."""

import json
import re
from pathlib import Path

from pagoda.engine.wire import EngineStats
from pagoda.metrics.prometheus import CACHE_LABELS, ServerMetrics, write_metrics

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"


def test_the_dashboard_asks_for_series_and_labels_that_exist() -> None:
    metrics = ServerMetrics("m", EngineStats, dict.fromkeys(CACHE_LABELS, ""))
    metrics.on_http("GET", "/health", 200)
    lines = [
        line
        for line in write_metrics([(metrics, metrics.counts())], 0).decode().splitlines()
        if not line.startswith("#")
    ]
    series = {re.split(r"[{ ]", line)[0] for line in lines}
    labels = set(re.findall(r'[{,](\w+)="', "\n".join(lines)))
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(panels) == 12
    for expression in asked:
        names = re.findall(r"(?:vllm:|http_)\w+", expression)
        assert names
        assert set(names) <= series, expression
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        assert {label.strip() for group in grouped for label in group.split(",")} <= labels, expression
