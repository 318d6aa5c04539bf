"""The command lines of coding agents, from npm, with a server whose model calls one tool and then answers."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pagoda.base.config import ModelConfig
from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from pagoda.loading.resolve import resolve_model
from tests.engine.byte_llama import EOS, write_byte_llama
from tests.server.live import FAKE_ENGINE, LiveServer, serving
from tests.server.test_tools import HERMES

pytestmark = pytest.mark.slow

FOLDER = Path(f"{sys.prefix}-agents")
"""Where the clients are installed: some hundred megabytes each."""
TITLE, ANSWER = "A note", "The note says that pagodas have many floors."
TEMPLATE = (
    HERMES.replace(
        "{% if add_generation_prompt %}<|im_start|>assistant",
        "{% if add_generation_prompt %}<|im_start|>assistant#"
        "{% if not tools %}t{% elif messages | selectattr('role', 'equalto', 'tool') | list %}a{% else %}c{% endif %}",
    ).removesuffix("\n{% endif %}")
    + "{% endif %}"
)
"""A prompt ends with what the model is to write: a title, a call, an answer."""


class Agent(NamedTuple):
    """package: of npm.   words: of its command line.   tool, arguments: of the call that it carries out."""

    package: str
    words: tuple[str, ...]
    tool: str
    arguments: dict[str, Any]
    num_requests: int


QUESTION, COMMAND = "What does note.txt say?", "cat note.txt"
SHELL = {"command": COMMAND, "description": "Read the note"}
AGENTS = {
    "claude": Agent("@anthropic-ai/claude-code@2.1.197", ("-p", QUESTION, "--allowedTools", "Bash"), "Bash", SHELL, 3),
    "codex": Agent(
        "@openai/codex@0.171.0",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", QUESTION),
        "exec_command",
        {"cmd": COMMAND},
        2,
    ),
    "opencode": Agent("opencode-ai@1.18.33", ("run", QUESTION), "bash", SHELL, 3),
    "cline": Agent("cline@3.0.65", (QUESTION,), "run_commands", {"commands": [COMMAND]}, 2),
    "qwen": Agent(
        "@qwen-code/qwen-code@0.15.10", ("-y", QUESTION), "run_shell_command", {**SHELL, "is_background": False}, 2
    ),
}


def program_of(name: str) -> Path:
    """Return an agent's program, after installing it."""
    program = FOLDER / name / "node_modules" / ".bin" / name
    if program.exists():
        return program
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("npm and node are not installed")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(FOLDER / name), AGENTS[name].package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install {AGENTS[name].package}: {done.stderr[-300:]}")
    return program


@contextlib.contextmanager
def server_for(agent: Agent, folder: Path) -> Iterator[LiveServer]:
    """A server whose model has one token per byte and a context for any agent."""
    model = write_byte_llama(folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 20}))
    tokenizer = load_tokenizer(resolve_model(ModelConfig(model=str(model))), None, None)
    call = json.dumps({"name": agent.tool, "arguments": agent.arguments})
    says = {"t": TITLE, "c": f"I will look.\n<tool_call>{call}</tool_call>", "a": ANSWER}
    scripts = {
        str(tokenizer.encode(end, False)[-1]): [*tokenizer.encode(text, False), EOS] for end, text in says.items()
    }
    (folder / "scripts.json").write_text(json.dumps(scripts))
    (folder / "template.jinja").write_text(TEMPLATE)
    env = {"ENGINE_SCRIPTS": str(folder / "scripts.json"), "PYTHONPATH": os.getcwd()}
    own = ("--num-blocks", "30000", "--max-model-len", "400000", "--max-num-batched-tokens", "8192")
    flags = ("--model", str(model), *FAKE_ENGINE[:2], *own, "--chat-template", str(folder / "template.jinja"))
    more = ("--served-model-name", "my-model", "--api-key", "secret")
    with serving(folder, *flags, *more, env=env, engine="tests.engine.scripted_engine") as server:
        yield server


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_carries_out_a_call_and_answers(name: str, tmp_path: Path) -> None:
    """Everything that it asks for is there, and its variables lead nowhere else."""
    agent, program = AGENTS[name], program_of(name)
    home, work, folder = (tmp_path / one for one in ("home", "work", "server"))
    for path in (home, work, folder):
        path.mkdir()
    (work / "note.txt").write_text("Pagodas have many floors.\n")
    path = f"{program.parent}:{os.environ['PATH']}"
    env = {"HOME": str(home), "PATH": path, "PAGODA_API_KEY": "secret", "IS_SANDBOX": "1"}
    with server_for(agent, folder) as server:
        command = [sys.executable, "-m", "pagoda", "launch", name, "--url", server.url, "--yes", "--", *agent.words]
        try:
            done = subprocess.run(
                command, cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180
            )
        finally:
            _end_daemons(home)
        log = server.log.read_text()
    asked = [line.split(" in ")[0].split("] ")[1] for line in log.splitlines() if " POST " in line]
    assert ANSWER in done.stdout, done.stdout + done.stderr
    assert [line for line in asked if not line.endswith(" 200")] == []
    assert "/tokenize" in asked.pop(0)  # of `launch` itself: whether the model can chat
    assert len(asked) == agent.num_requests, asked


def _end_daemons(home: Path) -> None:
    """End what an agent left running: what has its home in the environment."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"HOME={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGTERM)
