"""Where the server listens: a Unix socket, and a path below which a proxy shows it."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import ConfigError
from pagoda.base.server_config import ServerConfig
from pagoda.server import listening
from pagoda.server.listening import check_free, listen, listen_together, lock_port
from tests.server.live import FAKE_FLAGS


def test_a_unix_socket_replaces_what_an_ended_server_left_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "s"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))  # by a server that was killed
    left.close()
    for _ in range(2):
        listener = listen(ServerConfig(uds=str(path)))
        listener.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        with pytest.raises(ConfigError, match=f"cannot listen on {path}: .*in use; choose another --uds"):
            listen(ServerConfig(uds=str(path)))
        listener.close()
        assert list(tmp_path.iterdir()) == []
    bound = listen(ServerConfig(uds=str(path)))  # of a server that still loads its model
    with pytest.raises(ConfigError, match="in use"):
        listen(ServerConfig(uds=str(path)))
    bound.listen()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    bound.close()
    file = tmp_path / "f"
    file.write_text("kept")
    with pytest.raises(ConfigError, match="cannot listen"):
        listen(ServerConfig(uds=str(file)))
    assert file.read_text() == "kept"


def test_ollamas_clients_find_the_server_where_they_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_bind", lambda config, port: port)
    asked = ((ServerConfig(), 8000), (ServerConfig(ollama=True), 11434), (ServerConfig(ollama=True, port=8001), 8001))
    assert [listen(config) for config, _ in asked] == [port for _, port in asked]


def test_the_sockets_of_several_processes_are_shared_with_no_other_server() -> None:
    config = ServerConfig(port=0, api_server_count=2)
    mine = listen_together(config)
    port = mine[0].getsockname()[1]
    assert {one.getsockname()[1] for one in mine} == {port}
    other = listen_together(ServerConfig(port=port, api_server_count=3))  # it still loads its model, as this one does
    check_free(config, mine[0])
    for one in mine:
        one.listen()
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}"):
        check_free(config, other[0])
    with pytest.raises(ConfigError, match="in use"):
        listen_together(ServerConfig(port=port, api_server_count=2))
    lock, refusal = lock_port(config, mine[0]), f"port {port}: another server with --api-server-count has it"
    with lock, pytest.raises(ConfigError, match=refusal):  # also if both find the port free, as nothing listens yet
        lock_port(config, other[0])
    for one in (*mine, *other, lock_port(config, other[0])):
        one.close()


def test_a_path_of_the_proxy_that_would_do_nothing_is_refused() -> None:
    check_settings(EngineConfig.from_options(root_path="/api/"))
    with pytest.raises(ConfigError, match="root_path='api' must begin with a slash"):
        check_settings(EngineConfig.from_options(root_path="api"))


def test_a_served_unix_socket_with_keys_from_a_file_below_a_path(tmp_path: Path) -> None:
    keys, path = tmp_path / "keys", tmp_path / "s"
    keys.write_text("secret\n")
    flags = (*FAKE_FLAGS, "--root-path", "/llm", "--api-key-file", str(keys), "--uds", str(path))
    command = [sys.executable, "-m", "pagoda", "serve", "smollm2-135m", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        client = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)))
        until = time.monotonic() + 120
        while not path.exists() or not _is_up(client):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.1)
        for prefix in ("", "/llm"):
            url = f"http://host{prefix}"
            assert client.get(f"{url}/health").status_code == 200
            assert client.get(f"{url}/v1/models").status_code == 401
            models = client.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"})
            assert models.json()["data"][0]["id"] == "smollm2-135m"
        headers = {"Authorization": "Bearer secret"}
        assert client.get("http://host/llmx/health", headers=headers).status_code == 404
        led = client.get("http://host/llm", headers={"Accept": "text/html"})
        assert (led.status_code, led.headers["location"]) == (307, "llm/")  # the page's addresses are relative
        assert "chat/main.js" in client.get("http://host/llm/", headers={"Accept": "text/html"}).text
        assert client.get("http://host/llm/chat/main.js").status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert list(tmp_path.iterdir()) == [keys]


def _is_up(client: httpx.Client) -> bool:
    try:
        return client.get("http://host/health").status_code == 200
    except httpx.TransportError:
        return False
