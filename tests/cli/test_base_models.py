"""A model that cannot chat is refused for chats before it is loaded, and before it is fetched where that is known."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import pagoda.llm
from pagoda.cli.main import main
from tests.cached_models import cached_model

CHATTING = [("run", "{}", "Hello"), ("chat", "{}"), ("generate", "{}", "Hello", "--chat")]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was to be loaded; nothing is."""
    found: list[object] = []

    def load(**options: object) -> None:
        found.append(options)
        raise SystemExit(0)

    monkeypatch.setattr(pagoda.llm, "LLM", load)
    return found


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(command))
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", CHATTING)
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "gemma3-270m",
            "gemma3-270m has no chat template, so it can only continue a text: pagoda generate gemma3-270m",
        ),
        ("minilm-l6", "minilm-l6 does not chat: it makes embeddings of texts"),
        ("all-minilm", "all-minilm does not chat: it makes embeddings of texts"),
        ("whisper-tiny.en", "does not chat: it writes down what is said, pagoda transcribe"),
    ],
)
def test_a_model_of_the_catalog_is_refused_before_it_is_fetched(
    command: tuple[str, ...],
    model: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    loaded: list[object],
) -> None:
    words = [word.format(model) for word in command]
    assert said in refused(capsys, *words, "--cache-dir", str(tmp_path))
    assert (loaded, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize(("model", "said"), [("gemma3-270m", "has no chat template"), ("minilm-l6", "does not chat")])
def test_a_model_of_a_path_is_refused_before_it_is_loaded(
    model: str, said: str, capsys: pytest.CaptureFixture[str], loaded: list[object]
) -> None:
    path = str(cached_model(model).path)
    assert said in refused(capsys, "chat", path)
    assert loaded == []


def test_a_base_model_chats_with_a_template_that_is_given(loaded: list[object]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "gemma3-270m", "Hello", "--chat-template", "{{ messages[0].content }}"])
    assert (ended.value.code, len(loaded)) == (0, 1)


@pytest.fixture(scope="module")
def without_template() -> Iterator[str]:
    """A server whose model has no chat template."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "base"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send(400, {"error": {"message": "this model has no chat template: pass one"}})

        def _send(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("command", [("chat",), ("launch", "codex", "--show")])
def test_a_server_without_a_template_is_refused_before_the_first_message(
    command: tuple[str, ...], without_template: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *command, "--url", without_template)
    assert f"base at {without_template} cannot chat: the server answered 400: this model has no chat template" in said
