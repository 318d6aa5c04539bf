"""guidellm, a load generator that people use, against a server with a real model.

It has its own environment (see the Makefile), because its pins differ from ours.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from tests.cached_models import cached_model
from tests.server.live import LiveServer

MODEL = "smollm2-135m"
GUIDELLM = Path(f"{sys.prefix}-load") / "bin" / "guidellm"
NUM_REQUESTS = 12
NUM_STREAMS = 4
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 16


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not GUIDELLM.exists(), reason=f"no {GUIDELLM}; install it with: make .venv-load/.installed"),
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer as files that transformers reads."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    load_tokenizer(cached_model(MODEL)).backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def guidellm(url: str, request_format: str, tokenizer: Path, report: Path) -> dict[str, Any]:
    """One run of its command line on synthetic prompts; the benchmark in its JSON report."""
    command = [
        *(str(GUIDELLM), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={url},request_format={request_format}"),
        *("--profile", f"kind=concurrent,streams={NUM_STREAMS}"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={report}"),
    ]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    return benchmark


def totals(server: LiveServer) -> dict[str, float]:
    """All of /metrics that counts; a counter with several reasons is summed over them."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics")[1]):
        for sample in family.samples:
            if sample.name.endswith(("_total", "_count", "_sum")):
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def template_tokens(server: LiveServer) -> int:
    """What the chat template puts around one message."""
    status, answer = server.post("/tokenize", {"messages": [{"role": "user", "content": "1"}]})
    assert status == 200
    return answer["count"] - 1


@pytest.mark.parametrize("request_format", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_and_the_server_count_the_same(
    real_server: LiveServer, tokenizer_folder: Path, tmp_path: Path, request_format: str
) -> None:
    around = template_tokens(real_server) if "chat" in request_format else 0
    before = totals(real_server)
    benchmark = guidellm(real_server.url, request_format, tokenizer_folder, tmp_path / "report.json")
    real_server.wait_idle()
    after = totals(real_server)

    metrics = benchmark["metrics"]
    ends = {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    assert metrics["request_totals"] == ends
    assert metrics["request_concurrency"]["successful"]["max"] == NUM_STREAMS
    requests = benchmark["requests"]["successful"]
    assert len(requests) == NUM_REQUESTS
    for request in requests:
        asked = json.loads(request["request_args"])["body"]
        assert asked["stream"]
        assert asked["stream_options"]["include_usage"]
        assert request["prompt_tokens"] == PROMPT_TOKENS + around
        assert request["output_tokens"] == OUTPUT_TOKENS
        assert request["output"]
        assert 0 < request["time_to_first_token_ms"] < request["request_latency"] * 1000
        assert request["inter_token_latency_ms"] > 0

    def grown(name: str) -> float:
        return after[f"vllm:{name}"] - before.get(f"vllm:{name}", 0.0)

    assert grown("request_success_total") == NUM_REQUESTS
    assert grown("prompt_tokens_total") == sum(r["prompt_tokens"] for r in requests)
    assert grown("prompt_tokens_cached_total") == sum(r["cached_tokens"] for r in requests)
    assert grown("generation_tokens_total") == sum(r["output_tokens"] for r in requests)
    assert grown("time_to_first_token_seconds_count") == NUM_REQUESTS
    # Tokens that reach the API process together are one gap.
    assert 0 < grown("inter_token_latency_seconds_count") <= NUM_REQUESTS * (OUTPUT_TOKENS - 1)
    # The same first tokens and gaps, seen from both ends; an answer held back until it is whole has no gaps.
    assert 0 < grown("time_to_first_token_seconds_sum") < sum(r["time_to_first_token_ms"] for r in requests) / 1000
    gaps_s = sum(r["inter_token_latency_ms"] for r in requests) * (OUTPUT_TOKENS - 1) / 1000
    assert gaps_s > 0.25 * grown("inter_token_latency_seconds_sum") > 0
