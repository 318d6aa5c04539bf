"""Prometheus itself reads /metrics of a live server, and answers queries about it."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import LiveServer, reserved_port

PROMETHEUS = shutil.which("prometheus")
NUM_REQUESTS = 3
OUTPUT_TOKENS = 5

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus; install it with: apt-get install prometheus")


class Prometheus:
    """Its HTTP API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def api(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=10) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of every series that the expression gives."""
        return [(one["metric"], float(one["value"][1])) for one in self.api("query", query=expression)["result"]]

    def value(self, expression: str) -> float | None:
        """The value of the one series that the expression gives; None while there is none."""
        series = self.query(expression)
        assert len(series) <= 1, series
        return series[0][1] if series else None

    def wait_for(self, expression: str, wanted: float, timeout_s: float = 90.0) -> None:
        end_s = time.monotonic() + timeout_s
        while (now := self.value(expression)) != wanted:
            assert time.monotonic() < end_s, f"{expression} is {now}, not {wanted}"
            time.sleep(0.2)


@contextlib.contextmanager
def scraping(target: LiveServer, folder: Path, key: str = "") -> Iterator[Prometheus]:
    """A Prometheus that scrapes `target` every 0.3 s."""
    with reserved_port() as port, _scraping_from(port, target, folder, key) as prometheus:
        yield prometheus


@contextlib.contextmanager
def _scraping_from(port: int, target: LiveServer, folder: Path, key: str) -> Iterator[Prometheus]:
    job: dict[str, Any] = {
        "job_name": "pagoda",
        "static_configs": [{"targets": [target.url.removeprefix("http://")]}],
        **({"authorization": {"credentials": key}} if key else {}),
    }
    settings = {"global": {"scrape_interval": "300ms", "scrape_timeout": "300ms"}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    log = folder / "prometheus.log"
    assert PROMETHEUS is not None
    command = [
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        end_s = time.monotonic() + 90
        while True:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2):
                break
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.1)
        yield Prometheus(port)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_prometheus_reads_what_was_served(fake_server: LiveServer, tmp_path: Path) -> None:
    fake_server.wait_idle()
    with scraping(fake_server, tmp_path) as prometheus:
        prometheus.wait_for('up{job="pagoda"}', 1.0)
        before = prometheus.value("vllm:generation_tokens_total") or 0.0
        ended = prometheus.value("sum(vllm:request_success_total)") or 0.0
        for i in range(NUM_REQUESTS):
            body = {"prompt": f"Request {i}", "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
            assert fake_server.post("/v1/completions", body)[0] == 200
        prometheus.wait_for("vllm:generation_tokens_total", before + NUM_REQUESTS * OUTPUT_TOKENS)
        prometheus.wait_for("sum(vllm:request_success_total)", ended + NUM_REQUESTS)
        prometheus.wait_for("vllm:num_requests_running", 0.0)

        (labels, _) = prometheus.query("vllm:generation_tokens_total")[0]
        assert (labels["model_name"], labels["engine"], labels["job"]) == ("smollm2-135m", "0", "pagoda")
        # What dashboards draw from the histograms.
        quantile = prometheus.value(
            "histogram_quantile(0.99, sum by (le) (vllm:e2e_request_latency_seconds_bucket{job='pagoda'}))"
        )
        assert quantile is not None
        assert 0 < quantile < 60
        for name in ("time_to_first_token_seconds", "request_prompt_tokens", "request_generation_tokens"):
            counted = prometheus.value(f"vllm:{name}_count")
            assert counted == prometheus.value(f'vllm:{name}_bucket{{le="+Inf"}}')
            assert counted is not None
            assert counted >= NUM_REQUESTS

        reasons = {labels["reason"] for labels, _ in prometheus.query("vllm:admission_rejections_total")}
        assert {"requests", "tokens", "media"} <= reasons  # a series appears before its first refusal

        kinds = {name: {one["type"] for one in about} for name, about in prometheus.api("metadata").items()}
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert kinds[f"vllm:{name}"] == {"gauge"}
        for name in (
            "prompt_tokens_total",
            "generation_tokens_total",
            "request_success_total",
            "num_preemptions_total",
        ):
            assert kinds.get(f"vllm:{name}") == {"counter"}, name
        (target,) = prometheus.api("targets")["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")


def test_prometheus_sends_the_api_key(keyed_server: LiveServer, tmp_path: Path) -> None:
    for folder, key, up in (("with", "one", 1.0), ("without", "", 0.0)):
        (tmp_path / folder).mkdir()
        with scraping(keyed_server, tmp_path / folder, key) as prometheus:
            prometheus.wait_for('up{job="pagoda"}', up)
