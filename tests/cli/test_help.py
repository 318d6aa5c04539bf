"""Help pages: every flag whole at 80 columns and in a pipe, what people need first."""

import os
import pty
import re
import subprocess
import sys

import pytest
import typer

from pagoda.base.config import PrefillConfig
from pagoda.base.server_config import ServerLimits, ServerTimeouts
from pagoda.base.setting import describe_settings, show_default
from pagoda.cli import main as cli_main
from pagoda.cli.options import MOST_USED, MOST_USED_FIELDS, SAMPLING_FIELDS

COMMANDS = (
    "generate",
    "chat",
    "transcribe",
    "run-batch",
    "serve",
    "plan",
    "bench throughput",
    "bench latency",
    "bench startup",
    "bench serve",
)


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit):
        cli_main.main([*command, "--help"])
    return capsys.readouterr().out


def flags_of(*command: str) -> set[str]:
    found = typer.main.get_command(cli_main.make_app())
    for name in command:
        found = found.commands[name]  # type: ignore[attr-defined]
    shown = [parameter for parameter in found.params if not getattr(parameter, "hidden", False)]
    spellings = [some for parameter in shown for some in (parameter.opts, parameter.secondary_opts)]
    short = [[flag for flag in some if "." not in flag] or some for some in spellings]  # not also --group.field
    return {flag for some in short for flag in some if "--" in flag}


@pytest.fixture(params=["40", "80", "200"])
def _columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", request.param)


@pytest.mark.usefixtures("_columns")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_written_out(capsys: pytest.CaptureFixture[str], command: str) -> None:
    printed = help_of(capsys, *command.split())
    flags = flags_of(*command.split())
    assert len(flags) > 3
    words = set(re.findall(r"--[\w.-]*\w", printed))
    assert flags <= words
    assert "\u2026" not in printed


def test_fields_of_groups_are_listed_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    printed = " ".join(help_of(capsys, "serve").split())
    for group in (PrefillConfig, ServerLimits, ServerTimeouts):
        for item in describe_settings(group):
            assert f"{item.name} ({show_default(item)})" in printed
    assert "max_body_bytes (16MiB)" in printed
    assert "such as --request-limits.prompts." in printed


@pytest.mark.parametrize("command", COMMANDS)
def test_no_flag_is_negated_twice(command: str) -> None:
    assert [flag for flag in flags_of(*command.split()) if "--no-no-" in flag] == []


def test_the_most_used_flags_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    printed = help_of(capsys, "generate")
    headings = re.findall(r"^(\S.*):$", printed, re.MULTILINE)
    assert headings == [
        "Arguments",
        "Options",
        "Sampling",
        MOST_USED,
        "Model",
        "KV cache",
        "Scheduler",
        "Devices, workers and threads",
        "Testing and debugging",
    ]
    sampling = printed[printed.index("Sampling:") : printed.index(f"{MOST_USED}:")]
    assert all(f"--{name.replace('_', '-')} " in sampling for name in SAMPLING_FIELDS)
    most_used = help_of(capsys, "serve").split(f"{MOST_USED}:")[1].split("\n\n")[0]
    assert re.findall(r"^  .*?--([\w-]+)", most_used, re.MULTILINE) == [
        {"api_keys": "api-key"}.get(name, name.replace("_", "-")) for name in MOST_USED_FIELDS
    ]


def test_in_a_pipe_nothing_is_wrapped_or_padded(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ((), ("plan",), ("models", "list")):
        lines = help_of(capsys, *command).splitlines()
        assert lines == [line.rstrip() for line in lines]
    assert "Print a shell's completion script: `source <(pagoda completion bash)`." in help_of(capsys)


def test_one_default_temperature_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "chat"):
        printed = " ".join(help_of(capsys, command).split())
        assert "Unless flags or the model say otherwise, temperature is 0.7" in printed
        assert re.search(r"--temperature <float> .{0,90}\(default: 0.7\)", printed)


def test_in_a_terminal_of_80_columns() -> None:
    """The page of the command with the most flags, through a pty."""
    script = "from pagoda.cli.main import main; main(['serve', '--help'])"
    leader, follower = pty.openpty()
    env = {**os.environ, "COLUMNS": "80", "TERM": "xterm-256color"}
    done = subprocess.Popen([sys.executable, "-c", script], stdout=follower, stderr=follower, env=env)
    os.close(follower)
    printed = b""
    try:
        while chunk := os.read(leader, 65536):
            printed += chunk
    except OSError:  # the other end is closed
        pass
    assert done.wait() == 0
    text = printed.decode()
    assert flags_of("serve") <= set(re.findall(r"--[\w.-]*\w", text))
    assert max(len(line.rstrip("\r")) for line in text.split("\n")) <= 80


@pytest.mark.usefixtures("_columns")
@pytest.mark.parametrize("group", ["", "bench", "models"])
def test_lists_of_commands_have_whole_sentences(capsys: pytest.CaptureFixture[str], group: str) -> None:
    printed = help_of(capsys, *group.split())
    commands = printed.partition("Commands:\n")[2]
    assert commands.rstrip().endswith(".")
    assert "..." not in commands
