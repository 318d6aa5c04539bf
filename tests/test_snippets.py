"""Every snippet of README and docs/howto runs as a reader would paste it, alone; a table names those that cannot."""

import functools
import json
import re
import shlex
import subprocess
import sys
import textwrap
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from pagoda.base.config import PARTS, EngineConfig
from pagoda.base.config_options import option_names
from pagoda.base.config_rules import check_settings
from pagoda.cli import main as cli_main
from pagoda.loading.catalog import CATALOG
from tests.cached_models import cached_model
from tests.server.live import serving

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]

NOT_HERE = {
    ("add-a-policy.md", 1): "it tests the policy that the page tells how to write",
    ("embeddings.md", 1): "a model of the hub",
    ("images.md", 0): "a model of the hub",
    ("images.md", 1): "a server of a model of the hub",
    ("infill.md", 0): "a server of a model of the hub",
    ("lora.md", 0): "an adapter of the reader's; tests/engine/test_lora.py loads some",
    ("prompt-embeddings.md", 1): "a model of the hub",
    ("python.md", 4): "a model of the hub",
}
"""Python snippets, by page and number on it, that do not run in this test: what they need."""
SLOW = {("transcription.md", 0)}
OTHER_COMMANDS = {
    "curl": "test_curl_sends_what_the_server_takes",
    "docker": "needs Docker; tests of the image run where there is one",
    "export": "sets a variable",
    "kubectl": "needs a cluster",
    "make": "installs the checkout",
    "pip": "installs the checkout",
    "python": "examples: tests/test_examples.py; pytest and benchmarks: their own tests",
    "ray": "needs two machines; tests/executors runs a cluster in this one",
    "source": "activates the environment",
}
"""Programs in shell snippets other than pagoda: why they do not run in this test, or what runs them."""


SETTINGS = {name for part in PARTS.values() for name in option_names(part)}


class Snippet(NamedTuple):
    page: str
    number: int  # of its kind on the page
    code: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


_NAMES_A_MODEL = re.compile(
    r'LLM\(\s*(?:model=)?"([^"]+)"|"?\bmodel"?\s*[:=] "([^"]+)"|(?:--model|-m)[ =]([^\s`"]+)'
    r"|pagoda (?:serve|chat|plan|pull|show|run|generate) ([^-\s][^\s`]*)"
)
_PLACEHOLDERS = {"MODEL", "...", "pytest"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_begins_with_a_model_of_the_catalog_or_says_that_it_has_none(page: Path) -> None:
    """What is pasted first then works without an account, and mostly without a download."""
    text = page.read_text()
    blocks = [found.span(1) for found in re.finditer(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)]
    named = (match for span in blocks for match in _NAMES_A_MODEL.finditer(text, *span))
    known = ((next(filter(None, match.groups())), match.start()) for match in named)
    first, at = next(((name, at) for name, at in known if name not in _PLACEHOLDERS), ("smollm2-135m", 0))
    assert first in CATALOG or "of the catalog" in text[:at]


def _snippets(*kinds: str) -> list[Snippet]:
    found: list[Snippet] = []
    for page in PAGES:
        blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
        codes = [textwrap.dedent(code) for kind, code in blocks if kind in kinds]
        found += [Snippet(page.name, number, code) for number, code in enumerate(codes)]
    return found


def _is_excerpt(snippet: Snippet) -> bool:
    """Return whether it shows lines of a file, which tests/test_docs.py compares."""
    return re.match(r"# (pagoda|tests)/\S+\.py", snippet.code) is not None


PYTHON = [one for one in _snippets("python", "py") if not _is_excerpt(one) and one.page != "README.md"]
"""Those of README run in tests/test_docs.py."""
OFFLINE = [one for one in PYTHON if (one.page, one.number) not in NOT_HERE and "OpenAI(" not in one.code]
CLIENTS = [one for one in PYTHON if (one.page, one.number) not in NOT_HERE and "OpenAI(" in one.code]
COMMANDS = [
    (f"{one.page}-{one.number}", line.removeprefix("$ "))
    for one in _snippets("", "bash")
    for line in one.code.replace("\\\n", " ").splitlines()
    if re.match(r"\$ " if one.code.startswith("$ ") else r"[a-z.]", line)  # after "$ " comes what it prints
]


def _run(snippet: Snippet, replaced: dict[str, str] | None = None) -> None:
    code = snippet.code
    for text, other in (replaced or {}).items():
        code = code.replace(text, other)
    exec(compile(code, str(snippet), "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize(
    "snippet",
    [pytest.param(one, marks=pytest.mark.slow) if (one.page, one.number) in SLOW else one for one in OFFLINE],
    ids=str,
)
def test_python_runs(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached_model("whisper-tiny.en" if "whisper" in snippet.code else "smollm2-135m")
    for name in ("a.wav", "b.mp3"):
        with wave.open(str(tmp_path / name), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes(bytes(32_000))
    monkeypatch.chdir(tmp_path)
    _run(snippet)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    cached_model("smollm2-135m")
    names = ("smollm2-135m", "minilm-l6")  # of both, one is enough to see that a client's code works
    flags = (
        "--distributed-executor-backend",  # whose tokens are, too: no snippet looks at what is said
        "fake",
        "--num-blocks",
        "1024",
        "--model",
        "smollm2-135m",
        "--served-model-name",
        *names,
        "--enable-prompt-embeds",
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "8",
    )
    with serving(tmp_path_factory.mktemp("server"), *flags) as server:
        yield server.url


@pytest.mark.parametrize("snippet", CLIENTS, ids=str)
def test_clients_run(snippet: Snippet, url: str) -> None:
    _run(snippet, {"http://localhost:8000": url, "http://127.0.0.1:8000": url})


def test_every_python_snippet_is_run_or_listed() -> None:
    assert {(one.page, one.number) for one in PYTHON} >= NOT_HERE.keys() | SLOW
    assert len(OFFLINE) + len(CLIENTS) + len(NOT_HERE) == len(PYTHON)
    assert len(OFFLINE) > 6
    assert len(CLIENTS) > 2


@functools.cache
def _app() -> Any:
    return typer.main.get_command(cli_main.make_app())


@pytest.mark.parametrize(("where", "line"), COMMANDS, ids=[where for where, _ in COMMANDS])
def test_commands_are_taken(where: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pagoda command is parsed, and its settings are those of an engine; other programs are listed."""
    words = shlex.split(line.removeprefix(".venv/bin/"), comments=True)
    if words[0] != "pagoda":
        assert words[0] in OTHER_COMMANDS, line
        return
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    words = [{"MODEL": "smollm2-135m", "/etc/pagoda/keys": str(keys)}.get(word, word) for word in words[1:]]
    command: Any = _app()
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    given: dict[str, Any] = {}
    monkeypatch.setattr(command, "callback", given.update)
    command(words, standalone_mode=False)
    if "config" in given:
        given["model"] = given.get("model") or given.get("model_word")
        values = {name.replace("__", "."): value for name, value in given.items() if value is not None}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        check_settings(EngineConfig.from_options(**{name: values[name] for name in values.keys() & SETTINGS}))


def test_curl_sends_what_the_server_takes(url: str) -> None:
    """The curl command of README is run; those of other pages send JSON."""
    ran = 0
    for where, line in COMMANDS:
        words = shlex.split(line, comments=True)
        if words[0] != "curl":
            continue
        for body in (words[at + 1] for at, word in enumerate(words) if word == "-d"):
            assert isinstance(json.loads(body), dict)
        if where.startswith("README.md"):
            line = line.replace("http://127.0.0.1:8000", url)
            done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
            assert json.loads(done.stdout)["choices"][0]["message"]["content"]
            ran += 1
    assert ran


def test_plan_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    cached_model("smollm2-135m")
    (shown,) = (one.code for one in _snippets("") if one.code.startswith("$ pagoda plan"))
    command, *lines = shown.splitlines()
    with pytest.raises(SystemExit) as ended:
        cli_main.main(shlex.split(command)[2:])
    assert not ended.value.code
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if not line.startswith("memory ")] == [
        line for line in lines if not line.startswith("memory ")
    ]


TYPED = """
import pagoda
from pathlib import Path

from pagoda import AsyncLLM, EngineArgs, LLM, LLMEngine, SamplingParams, StructuredOutputsParams

params = SamplingParams(stop=["x"], stop_token_ids=[1], bad_words=["y"], allowed_token_ids=[1, 2], logit_bias={})
params = SamplingParams(logit_bias={1: 2.0}, structured_outputs={"json": {}}, stop="x", prompt_logprobs=0)
params.structured_outputs = StructuredOutputsParams(choice=["a", "b"])
params.stop = ["z"]
stop: tuple[str, ...] = params.stop
version: str = pagoda.__version__


def engine_of(args: EngineArgs) -> LLMEngine:
    return LLMEngine.from_engine_args(args)


def llm_of(args: EngineArgs = EngineArgs(model="m", max_num_seqs=3)) -> LLM:
    args.scheduling_policy = "priority"
    llm = LLM.from_engine_args(args)
    output = llm.chat([{"role": "user", "content": "hi"}], tools=[], chat_template_kwargs={"x": 1}, priority=1)[0]
    calls = [call.arguments for call in output.outputs[0].message.tool_calls] if output.outputs[0].message else []
    text: str = llm.transcribe("a.wav", language="en", cache_salt="mine")[0].text + "".join(calls)
    return llm


async def async_llm() -> AsyncLLM:
    return await AsyncLLM.create(Path("m"), dtype="bf16", kv_cache_memory="1GiB", prefill={"admit_whole_prompt": True})
"""
WRONG = (
    "LLM('m', max_num_seq=3)",
    "AsyncLLM(max_num_seqs='many')",
    "EngineArgs(device=3)",
    "LLM().chat([], add_generation_promt=False)",
    "LLM().transcribe('a.wav', langage='en')",
    "SamplingParams(nosuch=1)",
    "SamplingParams(stop=3)",
    "LLMEngine.from_engine_args(3)",
)


def test_type_checkers_accept_the_snippets_and_what_constructors_take(tmp_path: Path) -> None:
    """One run over all snippets without openai and torch; of the wrong lines each is an error."""
    pages = [page for page in _snippets("python") if page.page in ("README.md", "python.md")]
    for page in pages:
        (tmp_path / f"{page.page.removesuffix('.md')}_{page.number}.py").write_text(page.code)
    wrong = "\n".join(WRONG)
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "wrong.py").write_text(
        f"from pagoda import LLM, AsyncLLM, EngineArgs, LLMEngine, SamplingParams\n{wrong}\n"
    )
    settings = {"typeCheckingMode": "basic", "extraPaths": [str(ROOT)], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [str(Path(sys.executable).parent / "basedpyright"), "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    errors = [(Path(one["file"]).name, one["message"]) for one in json.loads(done.stdout)["generalDiagnostics"]]
    assert [one for one in errors if one[0] != "wrong.py"] == []
    assert len(errors) == len(WRONG)


def test_nothing_says_to_install_pagoda_from_an_index_that_does_not_have_it() -> None:
    files = [path for folder in ("pagoda", "docs", "examples") for path in (ROOT / folder).rglob("*.[pm][yd]")]
    assert len(files) > 100
    assert [path for path in [*files, *ROOT.glob("*.md")] if "install 'pagoda-llm" in path.read_text()] == []
