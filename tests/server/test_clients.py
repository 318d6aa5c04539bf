"""Clients that people use, against a live server."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from pagoda.cli.bench import load
from pagoda.cli.bench.workload import random_workload
from tests.server.live import LiveServer

MODEL = "smollm2-135m"


@pytest.fixture
def client(fake_server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0)


def test_openai_chat_and_its_stream_agree(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "seed": 3}
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_openai_completions_models_and_extra_fields(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [MODEL]
    answer = client.completions.create(
        model=MODEL, prompt=["a", "b"], max_tokens=4, extra_body={"top_k": 5, "ignore_eos": True, "min_tokens": 2}
    )
    assert [c.index for c in answer.choices] == [0, 1]


def test_openai_embeddings_as_numbers_and_as_bytes(client: openai.OpenAI) -> None:
    """The package asks for base64 unless it is told otherwise, and decodes it."""
    texts = ["The sky is blue.", "Bread"]
    packed = client.embeddings.create(model=MODEL, input=texts)
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [item.index for item in packed.data] == [0, 1]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert sum(value * value for value in one.embedding) == pytest.approx(1, abs=1e-5)
    assert packed.data[0].embedding != packed.data[1].embedding
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 2
    short = client.embeddings.create(model=MODEL, input=[[5, 6, 7], [8]], dimensions=3)
    assert [len(item.embedding) for item in short.data] == [3, 3]
    assert short.usage.prompt_tokens == 4
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model=MODEL, input="a", dimensions=100_000)


def test_openai_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="x", temperature=-3)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="modalities"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], modalities=["audio"])


def test_openai_leaving_a_stream_frees_its_blocks(client: openai.OpenAI, fake_server: LiveServer) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="x", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    fake_server.wait_idle()


def test_openai_async_many_at_once(fake_server: LiveServer) -> None:
    async def main() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0)

        async def one(i: int) -> str:
            stream = await client.completions.create(model=MODEL, prompt=f"{i}", max_tokens=20, seed=i, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        return await asyncio.gather(*(one(i) for i in range(24)))

    texts = asyncio.run(main())
    assert len(set(texts)) == 24


@pytest.mark.slow
def test_litellm_completes_and_streams(fake_server: LiveServer) -> None:
    """As of the tests' own environment; test_every_client.py has that of the clients', in four ways.

    In a process of its own: litellm changes global state when it is imported.
    """
    script = """
import json, sys, litellm
ask = dict(model="openai/smollm2-135m", api_base=sys.argv[1], api_key="none", max_tokens=8, seed=5,
           messages=[{"role": "user", "content": "Hi"}])
whole = litellm.completion(**ask).choices[0].message.content
parts = [c.choices[0].delta.content or "" for c in litellm.completion(**ask, stream=True)]
print(json.dumps([whole, "".join(parts)]))
"""
    pytest.importorskip("litellm")
    command = [sys.executable, "-c", script, f"{fake_server.url}/v1"]
    # Without the variable, litellm waits for a list of prices from the network.
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env)
    whole, streamed = json.loads(done.stdout.splitlines()[-1])
    assert whole == streamed != ""


def test_the_load_generator_reports_what_it_sent(fake_server: LiveServer, tmp_path: Path) -> None:
    work = tmp_path / "work.json"
    items = [{"prompt_token_ids": [7, 8, 9], "max_tokens": 5, "arrival_s": i * 0.01} for i in range(10)]
    work.write_text(json.dumps(items))
    command = [sys.executable, "-m", "pagoda", "bench", "serve", "--base-url", fake_server.url, "--workload", str(work)]
    done = subprocess.run(
        [*command, "--json", "--goodput", "ttft:60000"], capture_output=True, text=True, timeout=60, check=True
    )
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert (result["ok"], result["failed"], result["out_tokens"], result["in_tokens"]) == (10, 0, 50, 30)
    assert result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"] <= result["e2e_ms"]["p99"]
    assert result["goodput_requests_s"] == result["requests_s"]


def test_the_report_counts_by_hand() -> None:
    records = [
        load.RequestRecord(0.0, 3, 0.1, 1.1, 11, [0.1] * 10, 200),
        load.RequestRecord(1.0, 3, 1.5, 2.5, 11, [0.1] * 10, 200),
        load.RequestRecord(1.0, 3, status=429, error="full"),
        load.RequestRecord(1.0, 3, status=500, error="no"),
    ]
    result = load.summarise(records, {"ttft": 200.0})
    assert (result["ok"], result["refused"], result["failed"]) == (2, 1, 1)
    assert result["duration_s"] == 2.5
    assert result["out_tok_s"] == 8.8
    assert result["goodput_requests_s"] == 0.4
    assert result["ttft_ms"] is not None
    assert result["ttft_ms"]["mean"] == 300.0
    assert result["tpot_ms"] is not None
    assert result["tpot_ms"]["p50"] == 100.0


def bench(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pagoda", "bench", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_load_generator_prints_what_it_measured(fake_server: LiveServer) -> None:
    flags = ("--base-url", fake_server.url, "--num-prompts", "6", "--request-rate", "100", "--output-len", "4")
    done = bench(*flags, "--input-len", "8")
    assert done.returncode == 0, done.stderr
    figures = [line.split() for line in done.stdout.splitlines()]
    assert ["requests", "6"] in figures
    assert ["ok", "6"] in figures
    assert [line[-1] for line in figures if line[:1] == ["TTFT"]] == ["ms"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "is the server running"),
        (("--model", "x", "--num-prompts", "2", "--json"), ""),
        (("--request-rate", "0"), "above 0"),
        (("--goodput", "speed:3"), "the metric must be one of"),
    ],
)
def test_the_load_generator_explains_a_missing_measurement_in_one_line(flags: tuple[str, ...], said: str) -> None:
    done = bench("--base-url", "http://127.0.0.1:9", *flags)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 1


def test_poisson_arrivals_have_the_rate_asked_for_and_repeat() -> None:
    requests = random_workload(4000, 2, 2, 100, 0)
    at = [r.arrival_s for r in load.poisson(requests, 20.0, 1)]
    assert at == sorted(at) == [r.arrival_s for r in load.poisson(requests, 20.0, 1)]
    assert 190 < at[-1] < 210
    assert {r.arrival_s for r in load.poisson(requests, float("inf"), 1)} == {0.0}
