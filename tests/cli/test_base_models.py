"""A model that cannot chat is refused for chats before it is loaded, and before it is fetched where that is known."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

import pagoda.llm
from pagoda.cli.main import COMMANDS, main
from pagoda.server.batches import offline
from pagoda.server.batches.lines import Answer, Journal, OutputLine, read_lines
from tests.cached_models import cached_model

CHATTING = [("run", "{}", "Hello"), ("chat", "{}"), ("generate", "{}", "Hello", "--chat")]
BATCH = ("run-batch", "in.jsonl", "out.jsonl", "--model", "{}")
OTHER_COMMANDS = {"transcribe", "serve", "launch", "top", "plan", "replay", "doctor"}
"""Those that load no model to chat with. `serve` has routes for other models; `launch` asks the server."""
CHATS = ("/v1/chat/completions", "/v1/responses")
OWN = {"messages": [], "chat_template": "{{ messages }}"}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was to be loaded; nothing is."""
    found: list[object] = []

    def load(**options: object) -> None:
        found.append(options)
        raise SystemExit(0)

    async def load_for_batch(*arguments: object) -> None:
        load()

    monkeypatch.setattr(pagoda.llm, "LLM", load)
    monkeypatch.setattr(offline, "answer_file", load_for_batch)
    return found


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(command))
    assert ended.value.code == 2
    return capsys.readouterr().err


def write_batch(folder: Path, url: str, body: object = None) -> Path:
    """Write a file of a line that is no chat, and one to a route."""
    asked = [("/v1/completions", {"prompt": "x"}), (url, body or {})]
    lines = [
        json.dumps({"custom_id": str(at), "method": "POST", "url": url, "body": body})
        for at, (url, body) in enumerate(asked)
    ]
    path = folder / "in.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_all_commands_that_chat_are_tested_here() -> None:
    assert {one[0] for one in (*CHATTING, BATCH)} | OTHER_COMMANDS == set(COMMANDS)


@pytest.mark.parametrize("command", [*CHATTING, BATCH])
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
    monkeypatch: pytest.MonkeyPatch,
    loaded: list[object],
) -> None:
    write_batch(tmp_path, CHATS[0])
    monkeypatch.chdir(tmp_path)
    (cache := tmp_path / "cache").mkdir()
    words = [word.format(model) for word in command]
    assert said in refused(capsys, *words, "--cache-dir", str(cache))
    assert (loaded, list(cache.iterdir())) == ([], [])


@pytest.mark.parametrize(("model", "said"), [("gemma3-270m", "has no chat template"), ("minilm-l6", "does not chat")])
def test_a_model_of_a_path_is_refused_before_it_is_loaded(
    model: str, said: str, capsys: pytest.CaptureFixture[str], loaded: list[object]
) -> None:
    path = str(cached_model(model).path)
    assert said in refused(capsys, "chat", path)
    assert loaded == []


@pytest.mark.parametrize("url", CHATS)
def test_a_batch_is_refused_for_its_first_line_that_is_a_chat(
    url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, loaded: list[object]
) -> None:
    path = write_batch(tmp_path, url)
    said = refused(capsys, "run-batch", str(path), str(tmp_path / "out"), "--model", "gemma3-270m")
    assert f"{path}: line 2 is a chat: gemma3-270m has no chat template" in said
    assert "--chat-template FILE" in said
    assert loaded == []


@pytest.mark.parametrize(
    ("url", "body", "flags"),
    [
        ("/v1/completions", None, ()),
        (CHATS[0], OWN, ()),
        (CHATS[0], None, ("--chat-template", "{{ messages }}")),
        (f"{CHATS[0]}s", None, ()),
    ],
)
def test_a_batch_that_needs_no_template_of_the_model_runs(
    url: str, body: object, flags: tuple[str, ...], tmp_path: Path, loaded: list[object]
) -> None:
    path = write_batch(tmp_path, url, body)
    with pytest.raises(SystemExit) as ended:
        main(["run-batch", str(path), str(tmp_path / "out"), "--model", "gemma3-270m", *flags])
    assert (ended.value.code, len(loaded)) == (0, 1)


def test_a_batch_whose_chats_are_answered_goes_on(tmp_path: Path, loaded: list[object]) -> None:
    path, out = write_batch(tmp_path, CHATS[0]), tmp_path / "out"
    with Journal(out) as journal:
        (line,) = [one for one in read_lines(path, 1000) if one.is_chat]
        journal.write(OutputLine(line.id, line.custom_id, Answer(400, line.id, msgspec.Raw(b"{}")), None))
    with pytest.raises(SystemExit) as ended:
        main(["run-batch", str(path), str(out), "--model", "gemma3-270m"])
    assert (ended.value.code, len(loaded)) == (0, 1)


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
