"""`pagoda launch`: start a coding agent, such as Claude Code or Codex, with a running server behind it.

A client is a function from the server to a Setup, and a line of CLIENTS. What a client reads from its environment or
its command line is given there. Only what a client reads nowhere but in a file is written to that file.
"""

import difflib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from pagoda.base.errors import ConfigError, PagodaError
from pagoda.base.registry import nearest
from pagoda.cli.console import print_table
from pagoda.cli.help_format import LOCAL_SERVER, ApiKey, Url
from pagoda.cli.remote import ServerConnection, model_card, require_chat

_KEY_VARIABLE = "PAGODA_API_KEY"
_KEY = f"${_KEY_VARIABLE}"
"""Stands for the server's key in all that is shown."""
_SECRET = re.compile("key|token|secret|password|authorization|headers", re.IGNORECASE)
"""Names of fields whose texts are not shown, however deep they are in them."""
_SMALL_CONTEXT = 32_768
_MOST_OUTPUT = 32_000  # tokens of one answer


@dataclass(frozen=True, slots=True)
class Server:
    """What a client needs to know.   url: without /v1.   key: _KEY, or "none" of a server without keys.

    context: the longest prompt plus output, in tokens; None: the server does not say.
    """

    url: str
    model: str
    key: str
    context: int | None


@dataclass(frozen=True, slots=True)
class Setup:
    """How a client is started.   file, changes: what a JSON file must have; all else in it stays.

    defaults: what the file must have, too, with any value.
    """

    environment: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    file: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Client:
    title: str
    install: str
    setup: Callable[[Server], Setup]


def _aider(server: Server) -> Setup:
    variables = {"OPENAI_API_BASE": f"{server.url}/v1", "OPENAI_API_KEY": server.key}
    return Setup(variables, ["--model", f"openai/{server.model}"])


_LEAST_WINDOW = 100_000
"""Claude Code takes less for this, and says so each time it starts."""


def _claude(server: Server) -> Setup:
    """Name the model for all that Claude Code would use several models for. A key of Anthropic's must not be sent."""
    roles = (
        "ANTHROPIC_MODEL",
        *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")),
        "CLAUDE_CODE_SUBAGENT_MODEL",
    )
    variables = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_AUTH_TOKEN": server.key, "ANTHROPIC_API_KEY": ""}
    variables |= dict.fromkeys(roles, server.model)
    if server.context is not None and server.context >= _LEAST_WINDOW:
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(server.context)
    return Setup(variables)


def _cline(server: Server) -> Setup:
    """Cline takes another provider's address from its file only, and replaces a file that lacks one of its fields."""
    name = "openai-compatible"
    settings = {"provider": name, "apiKey": server.key, "model": server.model, "baseUrl": f"{server.url}/v1"}
    own = {"updatedAt": "1970-01-01T00:00:00.000Z", "tokenSource": "manual"}
    return Setup(
        file="~/.cline/data/settings/providers.json",
        changes={"lastUsedProvider": name, "providers": {name: {"settings": settings}}},
        defaults={"version": 1, "modes": {}, "providers": {name: own}},
    )


def _codex(server: Server) -> Setup:
    provider = {"name": "pagoda", "base_url": f"{server.url}/v1", "wire_api": "responses"}
    provider |= {"env_key": _KEY_VARIABLE} if server.key == _KEY else {}
    values: dict[str, Any] = {"model": server.model, "model_provider": "pagoda"}
    values |= {f"model_providers.pagoda.{name}": value for name, value in provider.items()}
    if server.context is not None:
        values["model_context_window"] = server.context
    # A value is read as TOML, in which a string is written as in JSON.
    settings = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    words = [word for setting in settings for word in ("-c", setting)]
    return Setup({_KEY_VARIABLE: server.key} if server.key == _KEY else {}, words)


def _goose(server: Server) -> Setup:
    """Name the path, too: `goose configure` writes one to its file, which may be another server's."""
    variables = {"GOOSE_PROVIDER": "openai", "GOOSE_MODEL": server.model}
    variables |= {"OPENAI_HOST": server.url, "OPENAI_BASE_PATH": "v1/chat/completions", "OPENAI_API_KEY": server.key}
    if server.context is not None:  # else it takes 128,000 tokens for it
        variables["GOOSE_CONTEXT_LIMIT"] = str(server.context)
    return Setup(variables)


def _opencode(server: Server) -> Setup:
    # opencode asks for as long an answer as it may: most of the context has to be left for the prompt.
    context = server.context
    limit = {} if context is None else {"context": context, "output": min(_MOST_OUTPUT, max(1, context // 4))}
    options = {"baseURL": f"{server.url}/v1"} | ({"apiKey": f"{{env:{_KEY_VARIABLE}}}"} if server.key == _KEY else {})
    model = {"name": server.model} | ({"limit": limit} if limit else {})
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "pagoda", "options": options}
    name = f"pagoda/{server.model}"
    config = {"provider": {"pagoda": {**provider, "models": {server.model: model}}}, "model": name, "small_model": name}
    variables = {_KEY_VARIABLE: server.key} if server.key == _KEY else {}
    return Setup(variables | {"OPENCODE_CONFIG_CONTENT": json.dumps(config, ensure_ascii=False)})


def _qwen(server: Server) -> Setup:
    variables = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key, "OPENAI_MODEL": server.model}
    return Setup(variables, ["--auth-type", "openai"])


CLIENTS: Mapping[str, Client] = {
    "claude": Client("Claude Code", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Client("Codex", "npm install -g @openai/codex", _codex),
    "opencode": Client("opencode", "npm install -g opencode-ai", _opencode),
    "cline": Client("Cline", "npm install -g cline", _cline),
    "qwen": Client("Qwen Code", "npm install -g @qwen-code/qwen-code", _qwen),
    "aider": Client("aider", "python -m pip install aider-install && aider-install", _aider),
    "goose": Client("goose", "see https://goose-docs.ai/docs/getting-started/installation", _goose),
}
"""The program's name -> the client."""


def launch(
    client: Annotated[
        str | None, typer.Argument(metavar="CLIENT", help=f"{', '.join(CLIENTS)}. Without one, they are listed.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENT", help="Arguments of the client, after --.")
    ] = None,
    url: Url = LOCAL_SERVER,
    api_key: ApiKey = None,
    model: Annotated[
        str | None,
        typer.Option(help="Name of a model or adapter that it serves (default: its first that writes text)."),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Show what would be done, and start nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Change a client's file without a question.")] = False,
) -> None:
    """Start a coding agent, such as Claude Code or Codex, with a running server behind it.

    It shows the client's settings: variables and arguments where the client has them. A file is changed only after the
    change was shown and you said yes, and a copy is kept.
    """
    if client is None:
        rows = [(name, one.title, shutil.which(name) or one.install) for name, one in CLIENTS.items()]
        print_table(rows, ("client", "what", "where it is, or how to install it"))
        return
    if client not in CLIENTS:
        raise ConfigError(f"client: unknown client {client!r:.80}{nearest(client, list(CLIENTS))}")
    connection = ServerConnection(url, api_key)
    key = connection.key
    card = model_card(connection, model)
    require_chat(connection, str(card["id"]))
    server = Server(connection.url, str(card["id"]), "none" if key is None else _KEY, card.get("max_model_len"))
    setup = CLIENTS[client].setup(server)
    out = sys.stdout if show else sys.stderr
    print(_described(client, server, setup, arguments or []), file=out)
    file = None if setup.file is None else _ChangedFile(setup, key)
    if file is not None and file.difference:
        print(file.difference, file=out)
    if show:
        return
    program = shutil.which(client)
    if program is None:
        raise PagodaError(
            f"{CLIENTS[client].title} is not installed: there is no {client} in PATH; "
            f"install it: {CLIENTS[client].install}"
        )
    if file is not None and file.difference:
        file.write(agreed=yes)
    _start(program, [*setup.arguments, *(arguments or [])], setup.environment, key)


def _described(client: str, server: Server, setup: Setup, arguments: list[str]) -> str:
    """Return how a shell would start a client, with a comment above."""
    size = "" if server.context is None else f", a context of {server.context} tokens"
    lines = [f"# {CLIENTS[client].title} with {server.model} at {server.url}{size}"]
    if server.context is not None and server.context < _SMALL_CONTEXT:
        lines.append("# That is little: the prompt and tools of an agent alone take 5,000 to 25,000 tokens.")
    variables = [f"{name}={_quoted(value)} \\" for name, value in setup.environment.items() if name != _KEY_VARIABLE]
    return "\n".join([*lines, *variables, " ".join([client, *map(_quoted, [*setup.arguments, *arguments])])])


def _quoted(word: str) -> str:
    return f'"{word}"' if word == _KEY else shlex.quote(word) if word else ""


def _start(program: str, arguments: list[str], environment: Mapping[str, str], key: str | None) -> NoReturn:
    """Become the client."""
    known = {name: value.replace(_KEY, key or "") for name, value in environment.items()}
    sys.stdout.flush()
    os.execve(program, [program, *arguments], {**os.environ, **known})


class _ChangedFile:
    """A client's JSON file, and what it will be.   difference: of the two, for people; "" if there is none."""

    def __init__(self, setup: Setup, key: str | None) -> None:
        """Raises ConfigError if the file is not a JSON object."""
        self._path = path = Path(setup.file or "").expanduser().resolve()
        try:
            old = path.read_text(encoding="utf-8") if path.exists() else ""
            before = json.loads(old) if old else {}
            if not isinstance(before, dict):
                raise ValueError("it is not an object")
        except ValueError as error:
            wanted = json.dumps(setup.changes, ensure_ascii=False)
            raise ConfigError(
                f"{path}: cannot be read as JSON ({error}); mend it, or add this to it: {wanted}"
            ) from None
        changes = json.loads(json.dumps(setup.changes).replace(_KEY, json.dumps(key or "")[1:-1]))
        after = _merged(_merged(setup.defaults, before), changes)
        self._text = _written(after)
        # Of what the file means, however it is written.
        old, new = _written(_masked(before, before)), _written(_masked(after, before))
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), str(path), str(path), lineterm="")
        self.difference = "\n".join(lines)

    def write(self, agreed: bool) -> None:
        """Write the file, after a yes, next to a copy of what it was. Its owner alone can read a new one."""
        if not agreed and not sys.stdin.isatty():
            raise ConfigError(f"{self._path} would be changed; say --yes to agree, or --show to see it only")
        if not agreed and not typer.confirm(f"Change {self._path}?", err=True):
            raise PagodaError(f"{self._path} was not changed, and nothing was started")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        fresh.touch(0o600)
        fresh.write_text(self._text)
        if self._path.exists():
            copy = self._path.with_name(f"{self._path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
            shutil.copy2(self._path, copy)
            shutil.copymode(self._path, fresh)
            print(f"a copy of what it was is {copy}", file=sys.stderr)
        fresh.replace(self._path)


def _written(settings: Any) -> str:
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def _masked(settings: Any, before: Any, *, is_secret: bool = False) -> Any:
    """Return settings to show: stars for what is secret, with a word if that was not so `before`."""
    if isinstance(settings, dict):
        old = before if isinstance(before, dict) else {}
        return {
            name: _masked(value, old.get(name), is_secret=is_secret or _SECRET.search(name) is not None)
            for name, value in settings.items()
        }
    if isinstance(settings, list):
        old = before if isinstance(before, list) and len(before) == len(settings) else [None] * len(settings)
        return [_masked(one, other, is_secret=is_secret) for one, other in zip(settings, old, strict=True)]
    if not is_secret or not isinstance(settings, str):
        return settings
    return "***" if settings == before else "*** (changed)"


def _merged(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return `old` with what `new` has, within objects, too."""
    inner = {
        name: _merged(old[name], value)
        for name, value in new.items()
        if isinstance(value, dict) and isinstance(old.get(name), dict)
    }
    return {**old, **new, **inner}
