"""Batches of servers whose processes are killed: no line is lost, and none is in the output twice."""

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import openai

from tests.server.live import FAKE_ENGINE, LiveServer, children, serving
from tests.server.test_batches import answers, client_of, create, ended, line_of

FLAGS = (*FAKE_ENGINE, "--max-num-seqs", "16", "--no-enable-prefix-caching", "--api-server-count", "2")
NUM_LINES = 240
_OF_A_RUN = re.compile(r'"(?:created)":\d+|batch_[0-9a-f]{32}')


def lines() -> list[str]:
    given = [line_of(number, prompt=f"Line {number}", max_tokens=50, seed=number) for number in range(NUM_LINES)]
    return [line_of(at, prompt="x", model="none") if at % 50 == 7 else line for at, line in enumerate(given)]


def wait_answers(server: LiveServer, path: Path, more: int) -> None:
    """Wait until a batch has some more answers than now."""
    end_s = time.monotonic() + 120

    def count() -> int:
        return path.read_bytes().count(b"\n") if path.exists() else 0

    until = min(count() + more, NUM_LINES - 60)
    while count() < until:
        assert time.monotonic() < end_s, f"the answers do not come: {server.log.read_text()[-3000:]}"
        time.sleep(0.005)


def pids_of(server: LiveServer) -> list[int]:
    """The processes that serve HTTP."""
    return [pid for pid, command in children(server.process.pid).items() if b"api_process" in command]


def content(client: openai.OpenAI, batch: openai.types.Batch) -> list[str]:
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    texts = [client.files.content(id).text for id in (batch.output_file_id, batch.error_file_id)]
    return sorted(_OF_A_RUN.sub("", "".join(texts)).splitlines())


def test_a_batch_goes_on_after_each_kind_of_kill(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    flags, chance = (*FLAGS, "--responses-file", str(kept)), random.Random(1)
    with serving(tmp_path, *flags) as server:
        batch = create(client_of(server), lines())
        path = tmp_path / "kept.files" / f"{batch.id}.answers"
        wait_answers(server, path, chance.randrange(1, 40))
        server.process.kill()
        server.process.wait()
    with serving(tmp_path, *flags) as server:
        wait_answers(server, path, chance.randrange(1, 40))
        for pid in pids_of(server):
            os.kill(pid, signal.SIGKILL)
            wait_answers(server, path, chance.randrange(1, 20))
        server.kill_engine()
        wait_answers(server, path, chance.randrange(1, 20))
    with serving(tmp_path, *flags) as server:  # the one before was ended by SIGTERM
        client = client_of(server)
        batch = ended(client, client.batches.retrieve(batch.id))
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (NUM_LINES - 5, 5)
        whole = ended(client, client.batches.create(**_as_before(batch)))
        assert content(client, batch) == content(client, whole)
        done = [one["custom_id"] for one in answers(client, batch.output_file_id)]
        assert len(set(done)) == len(done) == NUM_LINES - 5
        assert not path.exists()
        assert client.files.delete(batch.input_file_id).deleted


def _as_before(batch: openai.types.Batch) -> Any:
    return {"input_file_id": batch.input_file_id, "endpoint": batch.endpoint, "completion_window": "24h"}
