"""`pagoda chat --url`: a conversation with a real server, whose tokens come from the fake executor."""

import http.server
import io
import json
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pagoda.base.errors import ConfigError, RequestError
from pagoda.cli.main import main
from pagoda.cli.remote import RemoteSession
from tests.cached_models import cached_model
from tests.server.live import FAKE_FLAGS, serving


def test_a_conversation_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cached_model("smollm2-135m")
    with serving(tmp_path, *FAKE_FLAGS, "--api-key", "secret") as server:
        with pytest.raises(ConfigError, match="cannot list its models .*401"):
            RemoteSession(server.url)
        with pytest.raises(ConfigError, match="does not serve 'other'; it has smollm2-135m"):
            RemoteSession(server.url, "other", "secret")
        session = RemoteSession(f"{server.url}/v1/", api_key="secret")
        assert (session.model_name, session.max_model_len) == ("smollm2-135m", 2048)
        params = session.params({"ignore_eos": True}, 5, 1)
        token_ids = session.encode_chat([{"role": "user", "content": "hello"}])
        pieces = list(session.stream(token_ids, params))
        assert pieces[-1].finish_reason == "length"
        assert "".join(piece.text for piece in pieces)
        with pytest.raises(RequestError, match="the server answered 400: .*vocabulary"):
            list(session.stream([10**6], params))
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/bye\n"))
        monkeypatch.setenv("PAGODA_API_KEY", "secret other")
        monkeypatch.setenv("PAGODA_MAX_NUM_SEQS", "4")  # of engines on this machine
        monkeypatch.setenv("PAGODA_MODEL", "another")
        with pytest.raises(SystemExit) as ended:
            main(["chat", "--url", server.url, "--max-tokens", "5", "--ignore-eos"])
        assert not ended.value.code
        printed = capsys.readouterr().out
        assert "(cut off at the length limit)" in printed
        assert "smollm2-135m; /help" in printed  # the server decides about the temperature
        with pytest.raises(SystemExit):
            main(["chat", "--url", server.url, "--max-num-seqs", "5"])
        assert "max_num_seqs: the server of --url has its own" in capsys.readouterr().err


class Breaking(http.server.BaseHTTPRequestHandler):
    """Lists a model, tokenises everything to [1], and begins an answer that breaks after its first words."""

    protocol_version = "HTTP/1.1"
    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._send(json.dumps({"tokens": [1]}))
            return
        self.bodies.append(body)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        line = b'data: {"choices": [{"text": "well", "finish_reason": null}]}\n\n'
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None: ...

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def test_a_stream_that_breaks_ends_the_answer_and_not_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/set temperature 1\nagain\n/bye\n"))
    Breaking.bodies.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Breaking) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(SystemExit) as ended:
                main(["chat", "--url", f"http://127.0.0.1:{server.server_port}"])
        finally:
            server.shutdown()
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert printed.count("well\n") == printed.count("the connection to the server broke") == 2
    assert [body.get("temperature") for body in Breaking.bodies] == [None, 1.0], "what /set sets is sent"
