"""The server over SmolLM2 with drafts: every number is what it is without, also after a kill under load."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cached_models import cached_model
from tests.engine.byte_llama import write_byte_llama
from tests.server.live import LiveServer, serving
from tests.server.test_real_model import asks_with_numbers
from tests.server.test_replay import ask_all

FLAGS = ("--dtype", "float32", "--max-model-len", "1024", "--num-blocks", "400")
METHODS: dict[str, dict[str, object]] = {
    "suffix": {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False},
    "int8 draft model": {
        "model": "smollm2-135m",
        "quantization": "int8",
        "num_speculative_tokens": 3,
        "adaptive": False,
    },
}


@pytest.fixture(scope="module")
def undisturbed(real_server: LiveServer) -> object:
    return asyncio.run(ask_all(real_server, asks_with_numbers()))


@pytest.fixture(scope="module", params=["suffix", "int8 draft model"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    cached_model("smollm2-135m")
    config = json.dumps(METHODS[request.param])
    with serving(tmp_path_factory.mktemp("drafting"), *FLAGS, "--speculative-config", config, stepped=True) as live:
        yield live


@pytest.mark.slow
def test_drafts_change_no_number(server: LiveServer, undisturbed: object) -> None:
    assert asyncio.run(ask_all(server, asks_with_numbers())) == undisturbed


def check_reports(server: LiveServer) -> None:
    text = "one two three four five six seven eight nine ten, "
    body = {"prompt": text * 6, "max_tokens": 40, "temperature": 0, "return_timings": True}
    timings = server.post("/v1/completions", body)[1]["timings"]
    assert 0 < timings["accepted_draft_tokens"] <= timings["draft_tokens"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (
        timings["draft_tokens"],
        timings["accepted_draft_tokens"],
    )
    page = server.get("/metrics")[1]
    per_pos = re.findall(r'spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d)"\} (\S+)', page)
    total = re.search(r"spec_decode_num_accepted_tokens_total\{.*\} (\S+)", page)
    assert total is not None
    assert [int(position) for position, _ in per_pos] == list(range(len(per_pos)))
    assert sum(float(count) for _, count in per_pos) == float(total[1]) > 0


def test_timings_and_metrics_report_accepted_drafts(tmp_path: Path) -> None:
    """Of a tiny model, which takes a second to load."""
    flags = ("--model", str(write_byte_llama(tmp_path / "model")), "--max-model-len", "512", "--num-blocks", "100")
    with serving(tmp_path, *flags, "--speculative-config", json.dumps(METHODS["suffix"])) as server:
        check_reports(server)


@pytest.mark.slow
def test_timings_and_metrics_report_accepted_drafts_of_smollm2(server: LiveServer) -> None:
    check_reports(server)


@pytest.mark.slow
def test_a_kill_changes_no_logprob(server: LiveServer, undisturbed: object) -> None:
    assert asyncio.run(ask_all(server, asks_with_numbers(), kill_after=(60,))) == undisturbed
    assert server.wait_idle()["engine_restarts"] == 1
