"""`pagoda launch`: what programs in the place of the clients are started with, and what happens to a client's file."""

import http.server
import json
import os
import pty
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagoda.cli.launch import CLIENTS, Server

KEY = "se\"cret's"
MODELS: list[dict[str, Any]] = [
    {"id": "embed", "capabilities": ["embedding"]},
    {"id": "my-model", "max_model_len": 40_000},
    {"id": "other"},
]
FAKE_CLIENT = f"""#!{sys.executable}
import json, os, sys
print(json.dumps({{"arguments": sys.argv[1:], "variables": dict(os.environ)}}))
"""


class Lister(http.server.BaseHTTPRequestHandler):
    """A server that lists its models to whoever has its key."""

    def do_GET(self) -> None:
        is_refused = self.path == "/keyed/v1/models" and self.headers["Authorization"] != f"Bearer {KEY}"
        data = json.dumps({"data": MODELS}).encode()
        self.send_response(401 if is_refused else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Lister) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home in which all clients are installed."""
    for name in CLIENTS:
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(FAKE_CLIENT)
        program.chmod(0o755)
    return tmp_path


def launch(home: Path, *words: str, key: str | None = None, **more: Any) -> "subprocess.CompletedProcess[str]":
    variables = {"HOME": str(home), "PATH": str(home / "bin"), "ANTHROPIC_API_KEY": "of another"}
    variables |= {"PAGODA_API_KEY": f"{key} second"} if key else {}
    command = [sys.executable, "-m", "pagoda", "launch", *words]
    more = {"stdin": subprocess.DEVNULL, **more}
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60, check=False, **more)


def variables_of(name: str, url: str, key: str) -> dict[str, str]:
    """What a client has in its environment."""
    model = "my-model"
    if name == "claude":
        roles = ("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
        address = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, "ANTHROPIC_API_KEY": ""}
        return {**address, **dict.fromkeys(roles, model)}
    goose = {"GOOSE_PROVIDER": "openai", "GOOSE_MODEL": model, "OPENAI_HOST": url, "OPENAI_API_KEY": key}
    goose |= {"OPENAI_BASE_PATH": "v1/chat/completions", "GOOSE_CONTEXT_LIMIT": "40000"}
    return {
        "qwen": {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": model},
        "aider": {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key},
        "goose": goose,
    }.get(name, {})


def check_settings(name: str, seen: dict[str, Any], url: str, key: str | None) -> None:
    """Check the settings that have a form of their own."""
    if name == "opencode":
        config = json.loads(seen["variables"]["OPENCODE_CONFIG_CONTENT"])
        provider = config["provider"]["pagoda"]
        assert (config["model"], config["small_model"]) == ("pagoda/my-model", "pagoda/my-model")
        assert provider["options"] == {"baseURL": f"{url}/v1"} | ({"apiKey": "{env:PAGODA_API_KEY}"} if key else {})
        assert provider["models"]["my-model"]["limit"] == {"context": 40_000, "output": 10_000}
    if name == "codex":
        words = seen["arguments"][:-2]
        assert words[::2] == ["-c"] * (len(words) // 2)
        config = tomllib.loads("\n".join(words[1::2]))
        provider = {"name": "pagoda", "base_url": f"{url}/v1", "wire_api": "responses"}
        provider |= {"env_key": "PAGODA_API_KEY"} if key else {}
        providers = {"pagoda": provider}
        expected = {"model": "my-model", "model_provider": "pagoda", "model_providers": providers}
        assert config == {**expected, "model_context_window": 40_000}
    if name in ("codex", "opencode") and key:
        assert seen["variables"]["PAGODA_API_KEY"] == key


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_is_started_with_the_server_and_what_is_shown_starts_it_too(
    name: str, key: str | None, url: str, home: Path
) -> None:
    at = f"{url}/keyed" if key else url
    shown = launch(home, name, "--url", f"{at}/v1/", "--show", "--", "-p", "it's $HOME", key=key)
    assert (shown.returncode, shown.stderr) == (0, "")
    started = launch(home, name, "--url", at, "--yes", "--", "-p", "it's $HOME", key=key)
    assert KEY not in shown.stdout + started.stderr
    seen = json.loads(started.stdout)
    assert seen["arguments"][-2:] == ["-p", "it's $HOME"]
    expected = variables_of(name, at, key or "none")
    assert {one: seen["variables"].get(one) for one in expected} == expected
    check_settings(name, seen, at, key)

    path = {"PATH": f"{home / 'bin'}:/usr/bin:/bin"} | ({"PAGODA_API_KEY": key} if key else {})
    command = shown.stdout.partition("\n--- ")[0]
    pasted = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=path, check=True)
    again = json.loads(pasted.stdout)
    assert again["arguments"] == seen["arguments"]
    assert {one: again["variables"].get(one) for one in expected} == expected


def test_clients_are_listed_with_where_they_are(home: Path) -> None:
    (home / "bin" / "codex").unlink()
    listed = launch(home)
    assert f"claude    Claude Code  {home}/bin/claude\n" in listed.stdout
    assert "codex     Codex        npm install -g @openai/codex\n" in listed.stdout


def test_the_address_needs_no_scheme(url: str, home: Path) -> None:
    shown = launch(home, "qwen", "--url", url.removeprefix("http://"), "--show")
    assert f"OPENAI_BASE_URL={url}/v1 " in shown.stdout


@pytest.mark.parametrize(("context", "window"), [(40_000, None), (131_072, "131072")])
def test_claude_code_gets_a_window_only_where_it_takes_it(context: int, window: str | None) -> None:
    setup = CLIENTS["claude"].setup(Server("http://127.0.0.1:8000", "my-model", "none", context))
    assert setup.environment.get("CLAUDE_CODE_AUTO_COMPACT_WINDOW") == window


def test_what_cannot_be_started_says_why(url: str, home: Path) -> None:
    (home / "bin" / "claude").unlink()
    cases = {
        ("claude", "--url", url): (1, "Claude Code is not installed: there is no claude in PATH; install it: npm"),
        ("claud", "--url", url): (2, "unknown client 'claud'; did you mean 'claude'?"),
        ("claude", "-p", "Hi"): (2, "No such option: -p; a client's arguments come after --"),
        ("codex", "--url", url, "--model", "third"): (2, "does not serve 'third'; it has embed, my-model, other"),
        ("codex", "--url", f"{url}/keyed"): (2, "cannot list its models (the server answered 401"),
        ("codex", "--url", "http://127.0.0.1:9"): (2, "is the server running?"),
    }
    for words, (code, text) in cases.items():
        done = launch(home, *words)
        assert (done.returncode, done.stdout) == (code, "")
        assert text in done.stderr


def test_a_context_that_is_small_or_not_known_is_said_or_left_out(url: str, home: Path) -> None:
    MODELS[2]["max_model_len"] = 8192
    shown = launch(home, "opencode", "--url", url, "--model", "other", "--show").stdout
    assert "a context of 8192 tokens\n# That is little" in shown
    del MODELS[2]["max_model_len"]
    for name in ("claude", "codex", "opencode"):
        shown = launch(home, name, "--url", url, "--model", "other", "--show").stdout
        assert not {"context", "COMPACT_WINDOW", "limit"} & set(shown.replace("_", " ").split())
        assert "40000" not in shown


OLD = {
    "version": 1,
    "lastUsedProvider": "mine",
    "providers": {
        "mine": {
            "settings": {"apiKey": "of mine", "headers": {"Authorization": "Bearer of mine", "list": ["of mine"]}}
        },
        "openai-compatible": {"settings": {"apiKey": "older", "headers": {"a": "b"}}, "updatedAt": "2026"},
    },
}


@pytest.fixture
def providers(home: Path) -> Path:
    path = home / ".cline" / "data" / "settings" / "providers.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(OLD, separators=(",", ":")))
    path.chmod(0o640)
    return path


def test_a_file_is_changed_after_it_was_shown_and_keeps_all_else(url: str, home: Path, providers: Path) -> None:
    refused = launch(home, "cline", "--url", url)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "would be changed; say --yes" in refused.stderr
    assert json.loads(providers.read_text()) == OLD
    done = launch(home, "cline", "--url", url, "--yes", "--api-key", KEY)
    assert '+        "model": "my-model"' in done.stderr
    assert '+        "apiKey": "*** (changed)"' in done.stderr
    assert not [secret for secret in (KEY, "older", "of mine") if secret in done.stderr + refused.stderr]
    new = json.loads(providers.read_text())
    settings = new["providers"]["openai-compatible"].pop("settings")
    address = {"provider": "openai-compatible", "model": "my-model", "baseUrl": f"{url}/v1"}
    assert settings == {**address, "apiKey": KEY, "headers": {"a": "b"}}
    assert new["providers"].pop("openai-compatible") == {"updatedAt": "2026", "tokenSource": "manual"}
    mine = {"mine": OLD["providers"]["mine"]}  # type: ignore[index]
    assert new == {"version": 1, "modes": {}, "lastUsedProvider": "openai-compatible", "providers": mine}
    (copy,) = providers.parent.glob("providers.json.*")
    assert json.loads(copy.read_text()) == OLD
    assert [path.stat().st_mode & 0o777 for path in (providers, copy)] == [0o640, 0o640]
    again = launch(home, "cline", "--url", url, "--api-key", KEY)  # there is nothing to agree to
    assert (again.returncode, "---" in again.stderr, len(list(providers.parent.iterdir()))) == (0, False, 2)


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 1), (b"y\n", 0)])
def test_a_file_is_changed_by_a_yes_in_a_terminal(
    answer: bytes, code: int, url: str, home: Path, providers: Path
) -> None:
    keyboard, terminal = pty.openpty()
    os.write(keyboard, answer)
    done = launch(home, "cline", "--url", url, stdin=terminal)
    os.close(keyboard)
    os.close(terminal)
    assert (done.returncode, f"Change {providers}?" in done.stderr) == (code, True)
    assert ("was not changed" in done.stderr) == bool(code)
    assert (json.loads(providers.read_text()) == OLD) == bool(code)


def test_a_new_file_is_its_owners_and_one_that_is_not_json_is_left_alone(url: str, home: Path, providers: Path) -> None:
    providers.write_text("// mine\n{}")
    done = launch(home, "cline", "--url", url, "--yes")
    assert (done.returncode, "cannot be read as JSON" in done.stderr) == (2, True)
    assert providers.read_text() == "// mine\n{}"
    target = home / "dotfiles.json"
    providers.unlink()
    providers.symlink_to(target)
    assert launch(home, "cline", "--url", url, "--yes").returncode == 0
    assert providers.is_symlink()
    assert (target.stat().st_mode & 0o777, json.loads(target.read_text())["version"]) == (0o600, 1)
