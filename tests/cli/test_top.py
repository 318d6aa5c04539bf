"""`pagoda top` against a pagoda server, and against one that has only vLLM's metrics."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pagoda.cli.top import Look, lines_of
from tests.server.live import FAKE_ENGINE, serving
from tests.server.test_requests import slowed, streaming


def run_top(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagoda", "top", "--once", "--interval", "0.3", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_it_shows_the_requests_of_the_key(tmp_path: Path) -> None:
    keys = ("--api-key", "one", "--api-key", "two")
    with (
        serving(tmp_path, *FAKE_ENGINE, *keys, stepped=True) as server,
        slowed(server),
        streaming(server, "mine", "one"),
        streaming(server, "theirs", "two"),
    ):
        shown = run_top("--url", server.url, "--api-key", "one")
        assert shown.returncode == 0, shown.stderr
        assert "2 running, 0 waiting" in shown.stdout
        assert "running         40" in shown.stdout
        assert "cmpl-mine" in shown.stdout
        assert "1 other requests" in shown.stdout
        assert "theirs" not in shown.stdout
        refused = run_top("--url", server.url)
        assert (refused.returncode, "API key" in refused.stderr) == (2, True)


VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_swapped{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.9
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+06
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
"""


@contextmanager
def answering(metrics: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.path == "/metrics"
            self.send_response(200 if is_known else 404)
            self.end_headers()
            self.wfile.write(metrics.encode() if is_known else b"{}")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_it_reads_vllms_metrics_of_another_server() -> None:
    with answering(VLLM) as url:
        shown = run_top("--url", url)
    assert "7 running, 2 waiting, 1 swapped; KV cache 90.0% full" in shown.stdout
    assert "no /requests" in shown.stdout


@pytest.mark.parametrize("metrics", ["", "process_cpu_seconds_total 1\n"])
def test_a_server_without_these_metrics_is_named(metrics: str) -> None:
    with answering(metrics) as url:
        refused = run_top("--url", url)
    assert (refused.returncode, f"{url}/metrics has no metrics of vLLM's names" in refused.stderr) == (2, True)


def test_rates_and_means_are_those_of_the_interval() -> None:
    before = {"generation_tokens_total": 100.0, "inter_token_latency_seconds_sum": 1.0}
    now = {
        "generation_tokens_total": 700.0,
        "inter_token_latency_seconds_sum": 2.0,
        "inter_token_latency_seconds_count": 50.0,
    }
    (rates, *_) = lines_of(Look(12.0, now, None), Look(10.0, before, None))
    assert rates == "300 output and 0 prompt tokens/s; first token -, between two 20.0 ms"
    (after_restart, *_) = lines_of(Look(14.0, before, None), Look(12.0, now, None))
    assert after_restart.startswith("0 output and 0 prompt tokens/s")
