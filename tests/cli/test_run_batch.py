"""`pagoda run-batch`: real processes over the fake executor, that are killed and go on."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pagoda.cli.main import main
from tests.server.live import FAKE_ENGINE, children

FLAGS = (*FAKE_ENGINE, "--max-num-seqs", "8", "--no-enable-prefix-caching")
NUM_LINES = 240
_OF_A_RUN = re.compile(r'"(?:created|created_at|completed_at)":\d+|(?:resp|msg)_[0-9a-f]+')
"""Times, and ids that are drawn."""


def write_input(path: Path, num_lines: int) -> None:
    with path.open("w") as file:
        for number in range(num_lines):
            url, body = random.Random(number).choice(
                [
                    ("/v1/completions", {"prompt": f"Line {number}", "max_tokens": 60, "seed": number}),
                    ("/v1/responses", {"input": f"Line {number}", "max_output_tokens": 50, "seed": number}),
                    ("/v1/completions", {"prompt": f"Line {number}", "model": "unknown"}),
                    ("/v1/embeddings", {"input": f"Line {number}"}),
                    (
                        "/v1/chat/completions",
                        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "seed": number},
                    ),
                ]
            )
            file.write(json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body}) + "\n")


def start(folder: Path, out: str) -> "subprocess.Popen[bytes]":
    command = (sys.executable, "-m", "pagoda", "run-batch", "in.jsonl", out, *FLAGS)
    return subprocess.Popen(command, cwd=folder, stderr=(folder / f"{out}.log").open("wb"))


def wait_lines(path: Path, count: int, process: "subprocess.Popen[bytes]") -> None:
    end_s = time.monotonic() + 120
    while (path.read_bytes().count(b"\n") if path.exists() else 0) < count:
        assert process.poll() is None, "the run has ended early"
        assert time.monotonic() < end_s, "the lines do not come"
        time.sleep(0.001)


def answers(path: Path) -> list[str]:
    text = _OF_A_RUN.sub("", path.read_text())
    assert text.endswith("\n")
    return sorted(text.splitlines())


def test_a_run_that_is_killed_goes_on_with_nothing_lost_or_done_twice(tmp_path: Path) -> None:
    """Also after Ctrl-C, and with an engine that is killed. The answers are those of a run that nothing disturbed."""
    write_input(tmp_path / "in.jsonl", NUM_LINES)
    whole, out, log = tmp_path / "whole", tmp_path / "out", tmp_path / "out.log"
    assert start(tmp_path, "whole").wait(120) == 1  # some lines ask for an unknown model
    chance = random.Random(1)
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGINT):
        process = start(tmp_path, "out")
        before = out.read_bytes().count(b"\n") if out.exists() else 0
        wait_lines(out, before + chance.randrange(1, 40), process)
        process.send_signal(number)
        assert process.wait(30) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert "the same command goes on from there" in log.read_text()
    last = start(tmp_path, "out")
    wait_lines(out, out.read_bytes().count(b"\n") + 5, last)
    (engine,) = [child for child, command in children(last.pid).items() if b"engine" in command]
    os.kill(engine, signal.SIGKILL)
    assert last.wait(120) == 1
    assert answers(out) == answers(whole)
    assert len(answers(out)) == NUM_LINES
    failed = sum('"status_code":404' in line for line in answers(out))
    assert f"{NUM_LINES} of {NUM_LINES} lines are in out" in log.read_text()
    assert f"{failed} lines failed; the first: line " in log.read_text()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit:
        main(["run-batch", *arguments])
    assert isinstance(exit.value.code, int)
    return (exit.value.code, *capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "IN is missing: pagoda run-batch IN OUT --model MODEL"),
        (("in",), "OUT is missing"),
        (("in", "out", "-o", "other"), "OUT is given twice, as out and with --output-file"),
        (("none", "out"), "none does not exist, or is not a file"),
        (("in", "out", "--port", "80"), "no such option: --port"),
        (("in", "no/out"), "no/out cannot be written: No such file or directory"),
    ],
)
def test_files_and_flags_are_checked_before_a_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("")
    code, out, err = run(capsys, *arguments, "--model", "no/such/model")
    assert (code, out) == (2, "")
    assert message in err


def test_an_output_that_is_complete_needs_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's names of the files are accepted. The status tells of lines that failed before, too."""
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("not JSON\n")
    error: dict[str, Any] = {"code": "invalid_json_line", "message": "bad \x1b[2J"}
    line = {"id": "batch_req_1", "custom_id": None, "response": None, "error": error}
    Path("out").write_text(json.dumps(line, separators=(",", ":")) + "\n")
    code, out, err = run(capsys, "-i", "in", "--output-file", "out", "--model", "no/such/model")
    assert (code, out) == (1, "")
    assert "1 of 1 lines are in out, 1 of them from before\n1 lines failed; the first: line 1: bad" in err
    Path("in").write_text("\n")
    assert run(capsys, "in", "empty", "--model", "no/such/model")[0] == 0
