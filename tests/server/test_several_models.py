"""Several models in one server, each with an engine process of its own."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import LiveServer, serving

TABLES = """
[chat]
model = "smollm2-135m"
max_model_len = 2048

[embed]
model = "minilm-l6"
"""
FAKE = ("--distributed-executor-backend", "fake", "--num-blocks", "512", "--ollama")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("models")
    (folder / "models.toml").write_text(TABLES)
    with serving(folder, *FAKE, "--models", str(folder / "models.toml")) as server:
        yield server


def engine_pid(server: LiveServer, model: str) -> int:
    """The engine process that has loaded a model last."""
    return int(re.findall(rf"engine\[(\d+)\] model: {model} ", server.log.read_text())[-1])


@contextlib.contextmanager
def stopped(server: LiveServer, model: str) -> Iterator[None]:
    """Stop a model's engine process during the block: what it is asked for waits."""
    pid = engine_pid(server, model)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def chat(model: str | None, **more: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}
    return asked if model is None else {"model": model, **asked}


def embed(model: str) -> dict[str, Any]:
    return {"model": model, "input": "some text"}


def test_each_request_gets_the_model_that_it_names(server: LiveServer) -> None:
    for name in ("chat", None):
        status, answer = server.post("/v1/chat/completions", chat(name))
        assert (status, answer["model"]) == (200, "chat")
    status, answer = server.post("/v1/embeddings", embed("embed"))
    assert (status, answer["model"]) == (200, "embed")


def test_only_listed_models_can_be_named(server: LiveServer) -> None:
    for path, body in (("/v1/chat/completions", chat("smollm2-135m")), ("/v1/embeddings", embed("minilm-l6"))):
        status, answer = server.post(path, body)
        assert (status, answer["error"]["param"]) == (404, "model")
        assert answer["error"]["message"].endswith("this server has chat, embed")


def test_lists_have_all_models(server: LiveServer) -> None:
    data = json.loads(server.get("/v1/models")[1])["data"]
    assert [(one["id"], one["max_model_len"]) for one in data] == [("chat", 2048), ("embed", 256)]
    assert json.loads(server.get("/v1/models/embed")[1])["max_model_len"] == 256
    for path in ("/api/tags", "/api/ps"):
        assert [one["name"] for one in json.loads(server.get(path)[1])["models"]] == ["chat", "embed"]
    shown = {name: server.post("/api/show", {"model": name})[1]["capabilities"] for name in ("chat", "embed")}
    assert shown == {"chat": ["completion"], "embed": ["embedding"]}


def test_routes_about_a_tokenizer_use_that_of_the_model(server: LiveServer) -> None:
    ids = {name: server.post("/tokenize", {"model": name, "prompt": "hi"})[1] for name in ("chat", "embed")}
    assert [one["max_model_len"] for one in ids.values()] == [2048, 256]
    texts = [
        server.post("/detokenize", {"model": name, "tokens": one["tokens"]})[1]["prompt"] for name, one in ids.items()
    ]
    assert [text.strip() for text in texts] == ["hi", "[CLS] hi [SEP]"]
    sizes = [json.loads(server.get(f"/tokenizer_info?model={name}")[1])["vocab_size"] for name in ids]
    assert sizes == [49152, 30522]
    assert server.get("/tokenizer_info?model=other")[0] == 404


def test_metrics_have_the_name_of_the_model(server: LiveServer) -> None:
    def counted() -> dict[str, float]:
        lines = server.get("/metrics")[1].splitlines()
        found = [line for line in lines if line.startswith("vllm:prompt_tokens_total{")]
        return {line.partition('model_name="')[2].partition('"')[0]: float(line.split()[-1]) for line in found}

    before = counted()
    num_tokens = server.post("/v1/embeddings", embed("embed"))[1]["usage"]["prompt_tokens"]
    assert counted() == {**before, "embed": before["embed"] + num_tokens}
    text = server.get("/metrics")[1]
    assert text.count("# TYPE vllm:generation_tokens_total") == 1
    for name in ("cache_config_info", "lora_requests_info", "num_requests_running", "engine_restarts_total"):
        lines = [line for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]
        assert [f'model_name="{model}"' in line for model, line in zip(("chat", "embed"), lines, strict=True)] == [
            True,
            True,
        ], name


def test_requests_tell_their_model(server: LiveServer) -> None:
    server.post("/v1/chat/completions", chat("chat", request_id="told"))
    server.post("/v1/embeddings", {**embed("embed"), "request_id": "embedded"})
    seen = {one["id"]: one["model"] for one in json.loads(server.get("/requests")[1])["data"]}
    assert (seen["chatcmpl-told"], seen["embd-embedded"]) == ("chat", "embed")
    for name, model in seen.items():
        assert json.loads(server.get(f"/requests/{name}")[1])["model"] == model


def test_an_abort_finds_the_requests_of_each_model(server: LiveServer) -> None:
    with ThreadPoolExecutor(1) as pool, stopped(server, "minilm-l6"):
        running = pool.submit(server.post, "/v1/embeddings", {**embed("embed"), "request_id": "x"})
        while json.loads(server.get("/requests")[1])["data"][0]["id"] != "embd-x":
            time.sleep(0.01)
        assert server.post("/v1/chat/completions", chat("chat"))[0] == 200  # the other engine runs
        assert server.post("/abort_requests", {"request_ids": ["embd-x"]})[1] == {"aborted": ["embd-x"]}
        assert running.result()[0] == 400
    server.wait_idle()
