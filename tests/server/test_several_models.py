"""Several models in one server, each with an engine process of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagoda.base.errors import ConfigError
from pagoda.cli.remote import RemoteSession
from tests.chrome_format import check_trace
from tests.server.live import LiveServer, children, serving

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
        with contextlib.suppress(ProcessLookupError):  # the test has killed it
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


def test_a_model_without_a_kv_cache_is_not_said_to_have_a_tiny_one(server: LiveServer) -> None:
    log = server.log.read_text()
    assert log.count("KV cache: none, prompts are computed in one step") == log.count("model: minilm-l6 ") > 0
    assert "KV cache: 8192 tokens (512 blocks of 16" in log


def test_a_model_for_embeddings_is_refused_for_chats(server: LiveServer) -> None:
    with pytest.raises(ConfigError, match=r"embed at .* cannot chat: .* this model generates no text"):
        RemoteSession(server.url, "embed")
    assert RemoteSession(server.url).model_name == "chat"


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
    server.post("/v1/chat/completions", chat("chat", request_id="last"))
    server.wait_idle()
    ended = [one["id"] for one in json.loads(server.get("/requests")[1])["data"][:3]]
    assert ended == ["chatcmpl-last", "embd-embedded", "chatcmpl-told"]  # the last first, of whichever model


def test_an_abort_finds_the_requests_of_each_model(server: LiveServer) -> None:
    with ThreadPoolExecutor(1) as pool, stopped(server, "minilm-l6"):
        running = pool.submit(server.post, "/v1/embeddings", {**embed("embed"), "request_id": "x"})
        while json.loads(server.get("/requests")[1])["data"][0]["id"] != "embd-x":
            time.sleep(0.01)
        assert server.post("/v1/chat/completions", chat("chat"))[0] == 200  # the other engine runs
        assert server.post("/abort_requests", {"request_ids": ["embd-x"]})[1] == {"aborted": ["embd-x"]}
        assert running.result()[0] == 400
    server.wait_idle()


def tracks_of(trace: dict[str, Any]) -> dict[str, set[str]]:
    """What is in a trace, by the names of its processes."""
    check_trace(trace)
    entries = trace["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in entries if one["name"] == "process_name"}
    return {names[pid]: {one["name"] for one in entries if one["pid"] == pid} for pid in names}


def test_a_trace_has_all_models_or_the_one_that_is_named(server: LiveServer) -> None:
    def traced(query: str) -> dict[str, set[str]]:
        with ThreadPoolExecutor(1) as pool:
            tracing = pool.submit(server.get, f"/trace?{query}", 30.0)
            while not tracing.done():
                server.post("/v1/chat/completions", chat("chat"))
                server.post("/v1/embeddings", embed("embed"))
        return tracks_of(json.loads(tracing.result()[1]))

    end_s = time.monotonic() + 60
    while True:  # on a busy machine, an engine may answer too late for a short trace
        found = traced("seconds=0.5")
        if all("tokens of steps" in found[f"engine of {name}"] for name in ("chat", "embed")):
            break
        assert time.monotonic() < end_s, found
    assert list(found) == [f"{what} of {name}" for name in ("chat", "embed") for what in ("engine", "requests")]
    assert all("runs" in found[f"requests of {name}"] for name in ("chat", "embed"))
    (engine, requests) = traced("seconds=0.5&model=embed").items()
    assert (engine[0], requests[0], "runs" in requests[1]) == ("engine", "requests", True)
    assert server.get("/trace?model=other")[0] == 404


# ---- one that fits, of two


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("tight")
    (folder / "models.toml").write_text(TABLES)
    with serving(folder, *FAKE, "--models", str(folder / "models.toml"), "--max-models-memory", "300MiB") as server:
        yield server


def states(server: LiveServer) -> dict[str, str]:
    data = json.loads(server.get("/v1/models")[1])["data"]
    return {one["id"]: one["status"]["value"] for one in data}


def wait_state(server: LiveServer, name: str, state: str) -> None:
    end_s = time.monotonic() + 60
    while states(server)[name] != state:
        assert time.monotonic() < end_s, f"{name} does not become {state}: {states(server)}"
        time.sleep(0.01)


def test_a_model_is_loaded_when_it_is_asked_for_and_another_makes_room(tight: LiveServer) -> None:
    for name, other, path, body in (
        ("chat", "embed", "/v1/chat/completions", chat("chat")),
        ("embed", "chat", "/v1/embeddings", embed("embed")),
        ("chat", "embed", "/v1/chat/completions", chat("chat")),
    ):
        assert tight.post(path, body)[0] == 200
        assert states(tight) == {name: "loaded", other: "unloaded"}
        assert [one["name"] for one in json.loads(tight.get("/api/ps")[1])["models"]] == [name]
        assert tight.get("/health")[0] == 200


def loads_of(server: LiveServer) -> dict[tuple[str, ...], float]:
    """What metrics say of loads, by their name, the model and the outcome."""
    families = text_string_to_metric_families(server.get("/metrics")[1])
    samples = [sample for family in families if family.name.startswith("vllm:model_") for sample in family.samples]
    return {
        (one.name.removeprefix("vllm:model_"), one.labels["model_name"], one.labels.get("outcome", "")): one.value
        for one in samples
        if "le" not in one.labels
    }


def test_metrics_count_loads_and_say_what_memory_each_model_takes(tight: LiveServer) -> None:
    tight.post("/models/load", {"model": "embed"})
    before = loads_of(tight)
    assert tight.post("/models/load", {"model": "chat"})[0] == 200
    after = loads_of(tight)
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    seconds = changed.pop(("load_seconds_sum", "chat", ""))
    assert 0 < seconds < 60
    memory = after["memory_bytes", "chat", ""], before["memory_bytes", "embed", ""]
    assert changed == {
        ("loads_total", "chat", "loaded"): 1,
        ("load_seconds_count", "chat", ""): 1,
        ("memory_bytes", "chat", ""): memory[0],
        ("memory_bytes", "embed", ""): -memory[1],
    }
    assert all(20 * 2**20 < one <= 300 * 2**20 for one in memory)
    assert {after["loads_total", name, "failed"] for name in ("chat", "embed")} == {0}


def test_what_needs_no_engine_loads_none(tight: LiveServer) -> None:
    assert tight.post("/v1/chat/completions", chat("chat"))[0] == 200
    assert tight.post("/tokenize", {"model": "embed", "prompt": "hi"})[1]["count"] == 3
    assert states(tight)["embed"] == "unloaded"


def test_models_are_loaded_and_unloaded_on_request(tight: LiveServer) -> None:
    assert tight.post("/models/load", {"model": "embed"})[1]["status"]["value"] == "loaded"
    assert tight.post("/models/unload", {"model": "embed"})[0] == 200
    wait_state(tight, "embed", "unloaded")
    assert tight.post("/models/load", {"model": "other"})[0] == 404
    assert tight.post("/api/chat", {"model": "chat", "messages": [], "keep_alive": "5m"})[0] == 200
    assert states(tight)["chat"] == "loaded"
    asked = {"model": "chat", "prompt": "hi", "stream": False, "options": {"num_predict": 2}, "keep_alive": 0}
    assert tight.post("/api/generate", asked)[0] == 200
    wait_state(tight, "chat", "unloaded")


def test_a_kill_during_a_load_and_an_unload_loses_nothing(tight: LiveServer) -> None:
    assert tight.post("/models/load", {"model": "chat"})[0] == 200
    before = set(children(tight.process.pid))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(tight.post, "/v1/embeddings", embed("embed"))
        while not (new := set(children(tight.process.pid)) - before):
            time.sleep(0.002)
        os.kill(new.pop(), signal.SIGKILL)
        assert asked.result()[0] == 200
    pid = engine_pid(tight, "minilm-l6")
    tight.post("/models/unload", {"model": "embed"})
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    assert tight.post("/v1/embeddings", embed("embed"))[0] == 200


def test_a_kill_under_load_concerns_one_model(server: LiveServer) -> None:
    asked = chat("chat", max_tokens=400, seed=1, ignore_eos=True, temperature=1.0)
    expected = server.post("/v1/chat/completions", asked)[1]["choices"]
    before = server.load()["engine_restarts"]
    with ThreadPoolExecutor(4) as pool, stopped(server, "smollm2-135m"):
        running = [pool.submit(server.post, "/v1/chat/completions", asked) for _ in range(3)]
        server.wait_load(3)
        os.kill(engine_pid(server, "smollm2-135m"), signal.SIGKILL)
        assert server.post("/v1/embeddings", embed("embed"))[0] == 200
        assert server.get("/health")[0] == 200
        assert [one.result()[1]["choices"] for one in running] == [expected] * 3
    assert server.load()["engine_restarts"] == before + 1
    restarts = [line for line in server.get("/metrics")[1].splitlines() if "engine_restarts_total{" in line]
    assert [line.endswith(" 0.0") for line in restarts] == [False, True]


def test_the_trace_of_a_server_has_models_that_are_loaded_later(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    (tmp_path / "models.toml").write_text(TABLES)
    flags = (*FAKE, "--models", str(tmp_path / "models.toml"), "--max-models-memory", "300MiB", "--trace", str(file))
    with serving(tmp_path, *flags) as server:
        assert server.post("/v1/chat/completions", chat("chat"))[0] == 200
        assert server.post("/v1/embeddings", embed("embed"))[0] == 200
    found = tracks_of(json.loads(file.read_text()))
    assert all("runs" in found[f"requests of {name}"] for name in ("chat", "embed"))


def test_a_model_that_can_never_fit_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(TABLES)
    command = [sys.executable, "-m", "pagoda", "serve", "--port", "0", *FAKE]
    command += ["--models", str(tmp_path / "models.toml"), "--max-models-memory", "100MiB"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert re.search(r"chat: it takes [\d.]+ MiB .* models may take 100.0 MiB together", ended.stderr)
