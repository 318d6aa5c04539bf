"""The server over SmolLM2: log-probabilities against transformers, and a kill under load with real numbers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import torch

from tests.cached_models import cached_model
from tests.server.live import LiveServer, serving
from tests.server.test_faults import stream

PROMPT = "The lighthouse keeper wrote one letter a month to his sister, who lived inland and"
TOP = 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    cached_model("smollm2-135m")
    folder: Path = tmp_path_factory.mktemp("real")
    with serving(folder, "--dtype", "float32", "--max-model-len", "1024", "--num-blocks", "400") as live:
        yield live


@pytest.fixture(scope="module")
def reference() -> object:
    """token ids -> log-probabilities float32 [len, vocab] of the token after each."""
    from transformers import AutoModelForCausalLM

    files = cached_model("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(files.path.parent, gguf_file=files.path.name, dtype=torch.float32)

    @torch.inference_mode()
    def logprobs(ids: list[int]) -> torch.Tensor:
        return torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)

    return logprobs


def test_logprobs_are_those_of_transformers(server: LiveServer, reference: object) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": TOP, "prompt_logprobs": 2}
    answer = server.post("/v1/completions", {**body, "return_token_ids": True})[1]["choices"][0]
    prompt_ids, ids = answer["prompt_token_ids"], answer["token_ids"]
    expected = reference(prompt_ids + ids)  # type: ignore[operator]
    logprobs = answer["logprobs"]
    for i, token in enumerate(ids):
        row = expected[len(prompt_ids) + i - 1]
        assert logprobs["token_logprobs"][i] == pytest.approx(float(row[token]), abs=2e-3)
        best = torch.topk(row, TOP).values.tolist()
        assert sorted(logprobs["top_logprobs"][i].values(), reverse=True) == pytest.approx(best, abs=2e-3)
    assert "".join(logprobs["tokens"]) == answer["text"]
    assert answer["prompt_logprobs"][0] is None
    for i, token in enumerate(prompt_ids[1:], start=1):
        given = answer["prompt_logprobs"][i][str(token)]
        row = expected[i - 1]
        assert given["logprob"] == pytest.approx(float(row[token]), abs=2e-3)
        assert abs(given["rank"] - int((row > row[token]).sum()) - 1) <= 1


def test_chat_logprobs_and_echo(server: LiveServer) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    answer = server.post("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 3})[1]["choices"][0]
    assert len(answer["logprobs"]["content"]) == 4
    for entry in answer["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    scored = server.post("/v1/completions", body)[1]["choices"][0]
    assert scored["text"] == PROMPT
    assert scored["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in scored["logprobs"]["token_logprobs"][1:])


def test_a_kill_under_load_changes_no_token(server: LiveServer) -> None:
    async def load(kill: bool) -> list[tuple[int, list[str]]]:
        async with aiohttp.ClientSession(server.url) as session:
            tasks = [asyncio.create_task(stream(session, i, 80)) for i in range(4)]
            if kill:
                while server.load()["running"] < 4:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                assert not any(task.done() for task in tasks)
                await asyncio.to_thread(server.kill_engine)
            return await asyncio.gather(*tasks)

    undisturbed = asyncio.run(load(False))
    assert asyncio.run(load(True)) == undisturbed
    assert server.wait_idle()["engine_restarts"] == 1
