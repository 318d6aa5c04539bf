"""`pagoda chat --url`: a conversation with a real server, whose tokens come from the fake executor."""

import io
from pathlib import Path

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
        monkeypatch.setenv("PAGODA_API_KEY", "secret")
        with pytest.raises(SystemExit) as ended:
            main(["chat", "--url", server.url, "--max-tokens", "5", "--ignore-eos"])
        assert not ended.value.code
        assert "(cut off at the length limit)" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            main(["chat", "--url", server.url, "--max-num-seqs", "5"])
        assert "max_num_seqs: the server of --url has its own" in capsys.readouterr().err
