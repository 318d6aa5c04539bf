"""Every package that people use, through every API that it speaks: the same conversations, whole and streamed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagoda.assembly.engine_setup import resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from tests.server.live import FAKE_FLAGS, LiveServer, serving
from tests.server.test_tools import HERMES, SAID

PYTHON = Path(f"{sys.prefix}-clients") / "bin" / "python"
SCRIPT = "tests.server.client_scripts.every_client"
SAYS = {
    "t": SAID[3],
    "a": SAID[0],
    "A": "It rains in both.",
    "w": SAID[2],
    "W": "<think>\nWet.\n</think>\n\nIt rains.",
    "p": '{"city": "Bern", "days": 3}',
    "?": "I see.",
}
"""What the model says if the first question begins with a letter; in upper case: after the results of tools."""
TEMPLATE = HERMES.removesuffix("{% endif %}") + (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list | first %}"
    "{% set answered = messages | selectattr('role', 'equalto', 'tool') | list %}"
    "{{ asked.content[:1] | upper if answered else asked.content[:1] }}{% endif %}{# <think> </think> #}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("clients")
    setup = resolve_engine(EngineConfig.from_options(distributed_executor_backend="fake"))
    tokenizer = load_tokenizer(setup.files, None, None)
    end = tokenizer.facts.eos_token_ids[0]
    says = {
        str(tokenizer.encode(f"\n{letter}", False)[-1]): [*tokenizer.encode(text, False), end]
        for letter, text in SAYS.items()
    }
    (folder / "scripts.json").write_text(json.dumps(says))
    (folder / "template.jinja").write_text(TEMPLATE)
    env = {"ENGINE_SCRIPTS": str(folder / "scripts.json"), "PYTHONPATH": os.getcwd()}
    flags = (*FAKE_FLAGS, "--ollama", "--chat-template", str(folder / "template.jinja"))
    with serving(folder, *flags, env=env, engine="tests.engine.scripted_engine") as started:
        yield started


def run_script(python: Path, server: LiveServer, *names: str) -> dict[str, Any]:
    """What clients have seen; all of them, without names."""
    command = [str(python), "-m", SCRIPT, server.url, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.fixture(scope="module")
def saw(server: LiveServer) -> dict[str, Any]:
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}; install it with: make .venv-clients/.installed")
    return run_script(PYTHON, server)


PLACE, BERN, TYPED = {"city": "Zürich", "days": 2}, {"city": "Bern", "days": 2}, {"city": "Bern", "days": 3}
THOUGHTS = "Where? 2 < 3, so Zürich.\nWet.\n"
SHOWS_NO_THOUGHTS = ("langchain chat",)
CLIENTS = (
    *("openai_chat", "openai_responses", "openai_texts", "instructor"),
    *("openai_agents OpenAIChatCompletionsModel", "openai_agents OpenAIResponsesModel"),
    *("pydantic_ai chat", "pydantic_ai responses", "pydantic_ai anthropic"),
    *("langchain chat", "langchain responses", "langchain anthropic", "langchain ollama"),
    *("litellm openai", "litellm hosted_vllm", "litellm anthropic", "litellm ollama_chat"),
)


def check(name: str, seen: dict[str, Any]) -> None:
    """Fail unless a client saw what the model said, whole and streamed alike."""
    thoughts = "" if name in SHOWS_NO_THOUGHTS else THOUGHTS
    expected = {
        "text": [SAYS["t"], [], ""],
        "agent": [SAYS["A"], [PLACE, BERN], ""],
        "thought": ["It rains.", [PLACE], thoughts],
        "typed": TYPED,
    }
    for asked, answer in expected.items():
        assert seen.get(asked) in ([answer] * 2, [], None), (name, asked)
    for asked in ("image", "long"):
        assert seen.get(asked) in (400, None), (name, asked)
    assert "text" in seen


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_sees_what_the_model_said(saw: dict[str, Any], name: str) -> None:
    check(name, saw[name])


def test_every_client_has_a_test(saw: dict[str, Any]) -> None:
    assert {*saw} == {*CLIENTS, "others"}
    assert saw["openai_chat"]["version"].startswith("3.")


def test_texts_embeddings_and_rankings_of_clients(saw: dict[str, Any], server: LiveServer) -> None:
    seen = saw["others"]
    assert seen["continued"] == [SAYS["t"]] * 4
    assert [*seen["prompted"], seen["response"]] == [SAYS["t"]] * 3
    given = server.post("/v1/embeddings", {"input": "b"})[1]["data"][0]["embedding"]
    assert len(seen["embedded"]) == 5
    for made in seen["embedded"]:
        assert made == pytest.approx(given, abs=1e-6)
    assert seen["ranked"] == [0] * 3


def test_the_openai_package_before_version_3(server: LiveServer) -> None:
    """That of the tests' own environment."""
    seen = run_script(Path(sys.executable), server, "openai_chat", "openai_texts", "openai_responses")
    assert seen["openai_chat"]["version"].startswith("2.")
    for name, one in seen.items():
        check(name, one)
