"""Open WebUI itself, with a chat and an embedding model of this server: models, chats, and notes that it finds."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.live import reserved_port, serving

PROGRAM = Path(f"{sys.prefix}-webui", "bin", "open-webui")
"""Installed by hand: it takes 3 GB."""
INSTALL = f"{sys.executable} -m venv {sys.prefix}-webui && {sys.prefix}-webui/bin/pip install open-webui==0.12.4"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM.exists(), reason=f"no {PROGRAM}; install it with: {INSTALL}"),
]


@pytest.fixture(scope="module")
def webui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of Open WebUI, which has nothing but the addresses of two servers, one of them with a key."""
    folder = tmp_path_factory.mktemp("webui")
    with contextlib.ExitStack() as stack:
        chat = stack.enter_context(serving(folder, "--model", "smollm2-135m", "--ollama"))
        pooling = stack.enter_context(serving(folder, "--model", "minilm-l6", "--api-key", "secret"))
        port = stack.enter_context(reserved_port())
        env = {
            **os.environ,
            "DATA_DIR": str(folder),
            "WEBUI_AUTH": "False",
            "WEBUI_SECRET_KEY": "x",
            "OFFLINE_MODE": "True",
            "OPENAI_API_BASE_URLS": f"{chat.url}/v1;{pooling.url}/v1",
            "OPENAI_API_KEYS": "none;secret",
            "OLLAMA_BASE_URLS": chat.url,
            "RAG_EMBEDDING_ENGINE": "openai",
            "RAG_EMBEDDING_MODEL": "minilm-l6",
            "RAG_OPENAI_API_BASE_URL": f"{pooling.url}/v1",
            "RAG_OPENAI_API_KEY": "secret",
        }
        log = stack.enter_context((folder / "webui.log").open("wb"))
        command = [str(PROGRAM), "serve", "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        http = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60))
        _wait_until_up(http, process, folder / "webui.log")
        token = http.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
        http.headers["Authorization"] = f"Bearer {token}"
        yield http


def _wait_until_up(http: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end_s = time.monotonic() + 300
    while time.monotonic() < end_s:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            if http.get("/health").status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(log.read_text())


def test_it_finds_the_models_of_both_servers(webui: httpx.Client) -> None:
    models = {one["id"]: one for one in webui.get("/api/models").json()["data"]}
    assert models.keys() == {"smollm2-135m", "minilm-l6"}
    assert models["minilm-l6"]["openai"]["capabilities"] == ["embedding"]
    (tag,) = webui.get("/ollama/api/tags").json()["models"]
    assert (tag["name"], tag["details"]["parameter_size"]) == ("smollm2-135m", "134.52M")
    assert webui.get("/ollama/api/version").json()["version"]


def test_a_chat_is_answered_whole_and_in_pieces(webui: httpx.Client) -> None:
    question = [{"role": "user", "content": "What is a pagoda?"}]
    asked: dict[str, Any] = {"model": "smollm2-135m", "messages": question, "max_tokens": 12, "temperature": 0}
    asked["options"] = {"max_tokens": 12, "temperature": 0}  # read in place of these where it asks by Ollama's routes
    whole = webui.post("/api/chat/completions", json={**asked, "stream": False}).json()
    said = whole["choices"][0]["message"]["content"]
    assert said
    assert whole["usage"]["completion_tokens"] == 12
    pieces: list[str] = []
    with webui.stream("POST", "/api/chat/completions", json={**asked, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and (choices := json.loads(line[6:]).get("choices")):
                pieces.append(choices[0]["delta"].get("content") or "")
    assert "".join(pieces) == said


def test_notes_are_found_by_their_embeddings(webui: httpx.Client) -> None:
    (vector,) = webui.post("/api/embeddings", json={"model": "minilm-l6", "input": ["a"]}).json()["data"]
    assert len(vector["embedding"]) == 384
    for name, text in (("cats", "Cats purr and sleep all day."), ("cars", "The engine of the car needs oil.")):
        note = {"name": name, "content": text, "collection_name": name}
        assert webui.post("/api/v1/retrieval/process/text", json=note).status_code == 200
    asked = {"collection_names": ["cats", "cars"], "query": "an animal", "k": 1, "hybrid": False}
    found = webui.post("/api/v1/retrieval/query/collection", json=asked).json()
    assert found["documents"][0] == ["Cats purr and sleep all day."]
