"""Every script in examples/ runs, and prints what it promises: some as a user runs them, the others in this process.

A process of its own imports torch first, which takes longer than most of them.
"""

import re
import runpy
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.base.config import SchedulingPolicy
from pagoda.core.policy import POLICIES
from tests.cached_models import cached_model
from tests.server.live import serving

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def _model() -> None:
    cached_model("smollm2-135m")


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def run_here(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return run_here


def test_offline_batch() -> None:
    lines = run("offline_batch.py").splitlines()
    assert "' Paris" in lines[0]
    assert [line.partition(" ->")[0] for line in lines[:3]] == [
        "'The capital of France is'",
        "'Water boils at'",
        "'The opposite of hot is'",
    ]
    assert lines[3:] == [
        "'The capital of France is' [0] 12 tokens, length",
        "'Water boils at' [0] 12 tokens, length",
        "'Water boils at' [1] 12 tokens, length",
    ]


def test_chat(run_here: Callable[..., str]) -> None:
    printed = run_here("chat.py")
    assert "Rome" in printed
    assert "Tokyo" in printed
    first, second = (int(count) for count in re.findall(r"prefix cache: (\d+)", printed))
    assert first == 0
    assert second > 0


def test_streaming() -> None:
    lines = run("streaming.py").splitlines()
    assert re.fullmatch(r"first word: \w+", lines[0])
    assert lines[1].startswith("a: ")
    assert "four, five" in lines[1]
    assert re.fullmatch(r"b: 16 pieces, '.+'", lines[2])
    assert len(lines) == 3


def test_openai_client(tmp_path: Path, run_here: Callable[..., str]) -> None:
    with serving(tmp_path, "--dtype", "float32", "--max-model-len", "512") as server:
        lines = run_here("openai_client.py", f"{server.url}/v1").splitlines()
    assert lines[0] == "model: smollm2-135m"
    assert "Paris" in lines[1]
    assert lines[2].startswith("chat: ")
    assert re.fullmatch(r"usage: \d+ prompt tokens, \d+ output tokens", lines[-1])


def test_beam_search(run_here: Callable[..., str]) -> None:
    lines = run_here("beam_search.py").splitlines()
    scores = [float(line.split()[0]) for line in lines[4:8]]
    assert scores == sorted(scores, reverse=True)  # all outputs are of the same length, unlike those of the first
    assert "Paris" in lines[0]
    assert "bread" in lines[4]


def test_lora(run_here: Callable[..., str]) -> None:
    lines = run_here("lora.py").splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["base", "first", "second", "removed"]
    assert "' Paris" in lines[0]
    assert len({line.partition(": ")[2] for line in lines[:3]}) == 3
    assert lines[3] == "removed: True"


def test_embeddings(run_here: Callable[..., str]) -> None:
    lines = run_here("embeddings.py").splitlines()
    assert lines[0] == "576 dimensions, length 1.000"
    assert "Paris" in lines[1]  # the nearest of the three
    scores = [float(line.split()[0]) for line in lines[1:4]]
    assert scores == sorted(scores, reverse=True)
    assert "Paris" in lines[4]


def test_prompt_embeddings(run_here: Callable[..., str]) -> None:
    lines = run_here("prompt_embeddings.py").splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["text", "first", "second", "again", "base64"]
    assert "' Paris" in lines[0]
    said = [line.partition(", ")[2] for line in lines[:4]]
    assert said[1] == said[3] != said[2]
    assert "32 tokens from the prefix cache" in lines[3]


def test_engine_steps() -> None:
    lines = run("engine_steps.py").splitlines()
    assert [re.sub(r": '.*", "", line) for line in lines] == [
        "step 15: first ended, 1 left",
        "step 19: second ended, 0 left",
    ]
    assert "Paris" in lines[0]
    assert "four, five" in lines[1]


def test_policy(run_here: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    priority = SchedulingPolicy.PRIORITY
    monkeypatch.setitem(POLICIES, priority, POLICIES[priority])  # which the script replaces
    lengths = [int(line.split()[0]) for line in run_here("policy.py").splitlines()]
    assert len(lengths) == 4
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_scheduler(run_here: Callable[..., str]) -> None:
    lines = run_here("scheduler.py").splitlines()
    assert lines[0] == "step 1: rows [0, 1] compute [10, 6] tokens; 27 blocks free; ended: none"
    assert lines[3].endswith("32 blocks free; ended: request-1, request-2")
    assert re.fullmatch(r"step 1: 2 rows, \d+ tokens", lines[4])
    assert lines[5] == "step 2: 2 rows, 2 tokens"
    assert "' Paris" in lines[-2]


@pytest.mark.slow
def test_transcription(tmp_path: Path) -> None:
    cached_model("whisper-tiny.en")
    with wave.open(str(tmp_path / "hum.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(64_000))
    assert run("transcription.py", str(tmp_path / "hum.wav")).splitlines()[0].endswith("hum.wav: 2.0 s, english")


def test_every_example_is_tested_and_listed() -> None:
    tested = set(re.findall(r'run(?:_here)?\("(\w+\.py)"', Path(__file__).read_text()))
    tested |= {"images.py"}  # by tests/server/test_images.py
    listed = set(re.findall(r"\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested == listed
