"""Which pages in a browser may send requests: over real sockets, by what browsers write into `Host` and `Origin`."""

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from pagoda.base.server_config import ServerConfig
from tests.server.live import FAKE_ENGINE, LiveServer, serving


def ask(
    server: LiveServer, path: str, method: str = "GET", body: bytes = b"", **headers: str
) -> tuple[int, Any, http.client.HTTPMessage]:
    """Send exactly these headers; return the status, the decoded answer (or its text) and its headers."""
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), timeout=10)
    connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders(body)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    is_json = "json" in (response.headers["content-type"] or "")
    return response.status, json.loads(text) if is_json and text else text, response.headers


NOT_OURS = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "a.b", "[::1")
OURS = ("127.0.0.1", "127.0.0.1:1", "localhost:8000", "LOCALHOST", "app.localhost", "[::1]:8000", "box", "box.local")


def test_a_name_that_may_lead_elsewhere_is_refused_on_this_machine(fake_server: LiveServer) -> None:
    for host in NOT_OURS[:-1]:
        status, answer, _ = ask(fake_server, "/v1/models", Host=host)
        assert (status, answer["error"]["type"]) == (403, "permission_error"), host
        assert "--cors-origins" in answer["error"]["message"]
        assert host in answer["error"]["message"]
    for host in OURS:
        assert ask(fake_server, "/v1/models", Host=host)[0] == 200, host
    assert ask(fake_server, "/v1/models", Host=NOT_OURS[-1])[0] in (200, 400)  # no name: no browser was led here


def test_with_keys_any_name_leads_here_as_a_page_has_no_key(keyed_server: LiveServer) -> None:
    assert ask(keyed_server, "/v1/models", Host="llm.example", Authorization="Bearer one")[0] == 200
    assert ask(keyed_server, "/v1/models", Host="llm.example")[0] == 401


def test_a_foreign_page_is_refused_on_every_route(fake_server: LiveServer) -> None:
    port = fake_server.url.rsplit(":", 1)[1]
    foreign = ("https://a.example", "null", "http://127.0.0.1:1", f"http://localhost:{port}", "http://[", "file://")
    form = {"Content-Type": "text/plain"}
    for origin in foreign:
        for path, method, body in (
            ("/v1/models", "GET", b""),
            ("/abort_requests", "POST", b"{}"),
            ("/v1/completions", "POST", b'{"prompt": "a", "max_tokens": 1}'),
        ):
            status, answer, headers = ask(fake_server, path, method, body, Origin=origin, **form)
            assert status == 403, (origin, path)
            assert "--cors-origins" in answer["error"]["message"]
            assert "access-control-allow-origin" not in headers
    own = f"http://127.0.0.1:{port}"
    assert ask(fake_server, "/v1/models", Origin=own)[0] == 200
    assert ask(fake_server, "/v1/models", Host=f"localhost:{port}", Origin=f"https://localhost:{port}")[0] == 200


def test_pages_and_apps_that_are_allowed_pass(tmp_path: Path) -> None:
    allowed = ("https://a.example", "app://notes", "null")
    flags = [word for origin in allowed for word in ("--cors-origins", origin)]
    with serving(tmp_path, *FAKE_ENGINE, *flags) as server:
        for origin in allowed:
            status, _, headers = ask(server, "/v1/models", Origin=origin)
            assert (status, headers["access-control-allow-origin"]) == (200, origin)
        assert ask(server, "/v1/models", Host="a.example")[0] == 200  # a proxy keeps the name
        assert ask(server, "/v1/models", Host="b.example")[0] == 403
        assert ask(server, "/v1/models", Origin="https://b.example")[0] == 403


@pytest.mark.parametrize(
    ("host", "uds", "is_local"),
    [
        ("127.0.0.1", None, True),
        ("127.1.2.3", None, True),
        ("::1", None, True),
        ("localhost", None, True),
        ("0.0.0.0", None, False),
        ("::", None, False),
        ("10.0.0.1", None, False),
        ("box", None, False),
        ("0.0.0.0", "/tmp/s", True),
    ],
)
def test_which_addresses_are_of_this_machine(host: str, uds: str | None, is_local: bool) -> None:
    assert ServerConfig(host=host, uds=uds).is_local is is_local
