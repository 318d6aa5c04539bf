"""Loading and unloading LoRA adapters over HTTP, and choosing one by its name as the model."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pagoda.base.errors import ConfigError
from pagoda.server.served_adapters import LoRAModule, parse_module
from tests.cached_models import cached_model
from tests.engine.lora_adapters import write_adapter, write_prompt_adapter
from tests.server.live import FAKE_FLAGS, LiveServer, serving

MODEL = "smollm2-135m"
TEXT: dict[str, Any] = {"prompt": "Hello", "max_tokens": 8, "seed": 1, "temperature": 1}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's folder of adapters, next to one that it must not read."""
    files = cached_model(MODEL)
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "served" / "one", files, 4, 1, ("q_proj",), layers=(0,))
    write_adapter(folder / "served" / "deep" / "two", files, 8, 2, ("v_proj",), layers=(1,))
    write_adapter(folder / "served" / "large", files, 33, 3, ("v_proj",), layers=(1,))
    write_adapter(folder / "outside", files, 4, 4, ("q_proj",), layers=(0,))
    write_prompt_adapter(folder / "served" / "soft", 7, 576, 5)
    return folder / "served"


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    modules = ("--lora-modules", f"start={root / 'one'}")
    described = {"name": "org/described", "path": str(root / "deep" / "two"), "base_model_name": "its-parent"}
    flags = (*FAKE_FLAGS, "--enable-lora", "--max-lora-rank", "32", "--lora-dir", str(root), *modules)
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, *flags, "--lora-modules", json.dumps(described), stepped=True) as server:
        yield server


def call(server: LiveServer, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    """POST; the two routes answer in plain text."""
    import urllib.error
    import urllib.request

    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


def text(server: LiveServer, model: str | None, **more: Any) -> str:
    status, answer = server.post("/v1/completions", {**TEXT, **({"model": model} if model else {}), **more})
    assert status == 200, answer
    assert answer["model"] == (model or MODEL)
    return str(answer["choices"][0]["text"])


def test_adapters_of_the_settings_are_models(server: LiveServer, root: Path) -> None:
    cards = {card["id"]: card for card in json.loads(server.get("/v1/models")[1])["data"]}
    assert list(cards) == [MODEL, "start", "org/described"]
    assert (cards[MODEL]["parent"], cards["start"]["parent"]) == (None, MODEL)
    assert cards["org/described"]["parent"] == "its-parent"
    assert cards["start"]["root"] == str(root / "one")
    assert json.loads(server.get("/v1/models/org/described")[1]) == cards["org/described"]
    # Whether an adapter is in memory changes with each request.
    assert [("status" in card) for card in cards.values()] == [True, False, False]
    assert len({text(server, name) for name in (None, "start", "org/described")}) == 3
    assert text(server, "start") == text(server, "start")


def test_every_route_for_text_knows_them(server: LiveServer) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "seed": 1}
    said = {
        name: server.post("/v1/chat/completions", {**chat, "model": name})[1]["choices"][0]["message"]["content"]
        for name in (MODEL, "start", "org/described")
    }
    assert len(set(said.values())) == 3
    best = {name: text(server, name, n=2, best_of=2) for name in (MODEL, "start")}
    assert best[MODEL] != best["start"]
    for path, body in (("/tokenize", {"prompt": "Hello"}), ("/detokenize", {"tokens": [1, 2]})):
        assert server.post(path, {**body, "model": "start"})[0] == 200
        assert server.post(path, {**body, "model": "none"})[0] == 404
    status, answer = server.post("/v1/completions", {**TEXT, "model": "none"})
    assert (status, answer["error"]["param"]) == (404, "model")
    assert "unknown model 'none'; this server has smollm2-135m, start" in answer["error"]["message"]


def test_load_use_replace_and_unload(server: LiveServer, root: Path) -> None:
    assert server.post("/v1/completions", {**TEXT, "model": "new"})[0] == 404
    assert call(server, LOAD, {"lora_name": "new", "lora_path": "one"}) == (
        200,
        "Success: LoRA adapter 'new' added successfully.",
    )
    assert text(server, "new") == text(server, "start")  # the same files
    status, error = call(server, LOAD, {"lora_name": "new", "lora_path": "deep/two"})
    assert (status, error["param"]) == (400, "lora_name")
    assert "an adapter named 'new' is loaded; unload it first, or set load_inplace" in error["message"]
    path = str(root / "deep" / ".." / "deep" / "two")
    assert call(server, LOAD, {"lora_name": "new", "lora_path": path, "load_inplace": True})[0] == 200
    assert text(server, "new") == text(server, "org/described")
    assert call(server, UNLOAD, {"lora_name": "new"}) == (
        200,
        "Success: LoRA adapter 'new' removed successfully.",
    )
    assert server.post("/v1/completions", {**TEXT, "model": "new"})[0] == 404
    status, error = call(server, UNLOAD, {"lora_name": "new"})
    assert (status, error["message"]) == (404, "no LoRA adapter is named 'new'")


def test_requests_finish_when_their_adapter_is_unloaded(server: LiveServer) -> None:
    long = {**TEXT, "model": "leaving", "max_tokens": 1500, "ignore_eos": True, "request_id": "leaving"}
    assert call(server, LOAD, {"lora_name": "leaving", "lora_path": "one"})[0] == 200
    server.wait_idle()
    with ThreadPoolExecutor(1) as pool, server.steps.held_after(50):
        asked = pool.submit(server.post, "/v1/completions", long)
        end = time.monotonic() + 60
        while 'running_lora_adapters="leaving"' not in server.get("/metrics")[1]:
            assert time.monotonic() < end, "the request was never seen running"
        assert 'vllm:lora_requests_info{max_lora="4",' in server.get("/metrics")[1]
        assert call(server, UNLOAD, {"lora_name": "leaving"})[0] == 200
        assert server.post("/v1/completions", {**TEXT, "model": "leaving"})[0] == 404
        assert not asked.done()
        server.steps.release()
        status, answer = asked.result()
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1500)


def test_prompt_adapters_are_loaded_like_others(server: LiveServer) -> None:
    """Their virtual tokens are part of the prompt."""
    assert call(server, LOAD, {"lora_name": "soft", "lora_path": "soft"})[0] == 200
    _, plain = server.post("/v1/completions", TEXT)
    status, answer = server.post("/v1/completions", {**TEXT, "model": "soft", "echo": True, "return_token_ids": True})
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 7
    choice = answer["choices"][0]
    assert choice["text"].startswith("Hello")
    assert choice["prompt_token_ids"][:7] == [0] * 7
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "model": "soft"}
    assert server.post("/v1/chat/completions", chat)[0] == 200
    assert [card["id"] for card in json.loads(server.get("/v1/models")[1])["data"]][-1] == "soft"
    status, answer = server.post("/v1/embeddings", {"model": "soft", "input": "x"})
    assert (status, answer["error"]["param"]) == (400, "lora_request")
    assert call(server, UNLOAD, {"lora_name": "soft"})[0] == 200
    assert server.post("/v1/completions", {**TEXT, "model": "soft"})[0] == 404


@pytest.fixture(scope="module")
def hostile(root: Path) -> Path:
    """Folders that must not be loaded, in the server's own."""
    (root / "link").symlink_to(root.parent / "outside")
    (root / "loop").symlink_to(root / "loop")
    shutil.copytree(root / "one", root / "linked-file")
    (root / "linked-file" / "adapter_model.safetensors").unlink()
    (root / "linked-file" / "adapter_model.safetensors").symlink_to("/etc/passwd")
    shutil.copytree(root / "one", root / "pipe")
    (root / "pipe" / "adapter_model.safetensors").unlink()
    os.mkfifo(root / "pipe" / "adapter_model.safetensors")
    shutil.copytree(root / "one", root / "cut")
    data = (root / "one" / "adapter_model.safetensors").read_bytes()
    (root / "cut" / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])
    shutil.copytree(root / "one", root / "garbage")
    (root / "garbage" / "adapter_config.json").write_bytes(b'{"peft_type": "LORA", "r": \xff')
    shutil.copytree(root / "one", root / "pickled")
    (root / "pickled" / "adapter_model.safetensors").rename(root / "pickled" / "adapter_model.bin")
    (root / "empty").mkdir()
    return root


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../outside", "is not a folder below the server's --lora-dir"),
        ("one/../../outside", "is not a folder below the server's --lora-dir"),
        ("link", "is not a folder below the server's --lora-dir"),
        ("loop", "is not a folder below the server's --lora-dir"),
        ("linked-file", "is not a folder below the server's --lora-dir"),
        ("/etc", "is not a folder below the server's --lora-dir"),
        (".", "is not a folder below the server's --lora-dir"),
        ("a" * 300, "is not a folder below the server's --lora-dir"),
        ("none", "there is no such folder below --lora-dir"),
        ("one/adapter_config.json", "there is no such folder below --lora-dir"),
        ("empty", "no adapter_config.json"),
        ("pipe", "no adapter_model.safetensors"),
        ("pickled", "adapter_model.bin is pickled: convert it"),
        ("cut", "truncated or corrupt safetensors"),
        ("garbage", "adapter_config.json"),
        ("large", "its rank is 33, but max_lora_rank is 32"),
    ],
)
def test_paths_and_files_that_cannot_be_loaded(server: LiveServer, hostile: Path, path: str, message: str) -> None:
    status, error = call(server, LOAD, {"lora_name": "bad", "lora_path": path})
    assert (status, error["param"]) == (404 if "no such folder" in message else 400, "lora_path")
    assert message in error["message"]
    assert server.post("/v1/completions", {**TEXT, "model": "bad"})[0] == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": MODEL, "lora_path": "one"}, "lora_name"),
        ({"lora_name": "", "lora_path": "one"}, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "one"}, "lora_name"),
        ({"lora_name": "x" * 100_000, "lora_path": "one"}, "lora_name"),
        ({"lora_name": 3, "lora_path": "one"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "one\0"}, "lora_path"),
        ({"lora_name": "x", "lora_path": ""}, "lora_path"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "x/" * 3000}, "lora_path"),
    ],
)
def test_bodies_that_load_nothing(server: LiveServer, body: dict[str, Any], param: str) -> None:
    status, error = call(server, LOAD, body)
    assert (status, error["param"]) == (400, param)


def test_only_the_admin_loads_adapters_where_there_is_one(root: Path, tmp_path: Path) -> None:
    keys = ("--api-key", "one", "--admin-api-key", "root")
    with serving(tmp_path, *FAKE_FLAGS, "--enable-lora", *keys) as server:
        for path in (LOAD, UNLOAD):
            body = {"lora_name": "x", "lora_path": "one"} if path == LOAD else {"lora_name": "x"}
            assert call(server, path, body, Authorization="Bearer one")[0] == 403
            assert call(server, path, body)[0] == 401
        status, error = call(server, LOAD, {"lora_name": "x", "lora_path": "one"}, Authorization="Bearer root")
        assert (status, error["message"]) == (
            400,
            "this server loads no adapters: start it with --enable-lora and --lora-dir FOLDER",
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora-modules", "a=/nowhere"), "lora_modules needs enable_lora"),
        (
            ("--enable-lora", "--lora-modules", "a=/nowhere"),
            "lora_modules='a=/nowhere': adapter 'a': /nowhere: no",
        ),
        (("--enable-lora", "--lora-dir", "/nowhere"), "lora_dir='/nowhere' is not a folder"),
    ],
)
def test_settings_that_cannot_work_end_the_start(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(AssertionError) as caught, serving(tmp_path, *FAKE_FLAGS, *flags):
        pass
    assert message in str(caught.value)


def test_forms_of_a_module() -> None:
    assert parse_module("a=/x=y") == LoRAModule("a", "/x=y")
    assert parse_module('{"name": "a", "path": "/x", "base_model_name": "b"}') == LoRAModule("a", "/x", "b")
    for text in (
        "a",
        "=/x",
        "a=",
        "{",
        '{"name": "a"}',
        '{"name": "a", "path": 3}',
        '{"name": "a", "path": "b", "c": 1}',
    ):
        with pytest.raises(ConfigError, match="lora_modules="):
            parse_module(text)


def test_the_list_of_requests_names_the_adapter_of_each(server: LiveServer) -> None:
    for model in (MODEL, "start"):
        assert server.post("/v1/completions", {**TEXT, "model": model, "request_id": f"list-{model}"})[0] == 200
    rows = json.loads(server.get("/requests")[1])["data"]
    found = {row["id"].partition("/")[2] or row["id"]: row["adapter"] for row in rows}
    assert (found[f"cmpl-list-{MODEL}"], found["cmpl-list-start"]) == ("", "start")
