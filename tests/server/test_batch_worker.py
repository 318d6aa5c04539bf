"""Batches over an app of the test's own: what ends one early, bounds, and whose turn it is."""

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from pagoda.base.errors import ConfigError
from pagoda.base.server_config import ServerConfig
from pagoda.engine.clients.calls import OwnCalls, services_of
from pagoda.server.admission import AdmissionCounts, Refusal
from pagoda.server.batches import worker
from pagoda.server.batches.folder import remove_left_behind
from pagoda.server.batches.lines import Answer, Journal, OutputLine
from pagoda.server.batches.records import Batch, FileObject, RequestCounts
from pagoda.server.batches.service import FileLimits, FileService, journal_of
from pagoda.server.batches.usage import BatchUsage, CachedTokens, ReasoningTokens, Tally
from pagoda.server.batches.worker import BatchWorker, check_input
from pagoda.server.middleware import Drain, owner_name

URL = "/v1/completions"
DEFAULTS = ServerConfig()


def lines_of(num_lines: int, begin: int = 0, models: Sequence[str | None] = (None,)) -> bytes:
    """Lines that name these models in turn."""
    each = (
        {"custom_id": f"{at}", "method": "POST", "url": URL, "body": {"model": models[at % len(models)]}}
        for at in range(begin, begin + num_lines)
    )
    return "".join(f"{json.dumps(one)}\n" for one in each).encode()


@dataclass(frozen=True, slots=True)
class Rows:
    max_num_seqs: int


class Bench:
    """A service, and the app that its batches are answered by: each line waits until `gate` is set."""

    def __init__(self, folder: Path, limits: FileLimits | None = None, config: ServerConfig = DEFAULTS) -> None:
        self.now_s = time.time()
        self.folder = folder
        self.service = FileService(str(folder), limits, lambda: self.now_s)
        self.files, self.config, self.drain = OwnCalls(services_of(self.service)), config, Drain()
        self.idle_s = math.inf
        self.gate, self.scopes, self.num_running, self.most_running = asyncio.Event(), list[Scope](), 0, 0
        self.answer: tuple[int, bytes] = (200, b"{}")

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            with self.drain.hold():
                await self.gate.wait()
        finally:
            self.num_running -= 1
        status, body = self.answer
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        )
        await send({"type": "http.response.body", "body": body})

    async def upload(self, data: bytes, owner: str = "") -> str:
        upload = await self.files.ask(FileService.begin_upload, owner, len(data))
        Path(upload.path).write_bytes(data)
        file = FileObject(id=upload.id, bytes=len(data), created_at=int(self.now_s), filename="in", purpose="batch")
        return (await self.files.ask(FileService.end_upload, owner, file)).id

    async def create(self, data: bytes, id: str = "batch_a", owner: str = "", window_s: int = 3600) -> Batch:
        batch = Batch(
            id=id,
            endpoint=URL,
            input_file_id=await self.upload(data, owner),
            completion_window="1h",
            created_at=int(self.now_s),
            expires_at=int(self.now_s) + window_s,
            request_counts=RequestCounts(),
        )
        await self.files.ask(FileService.create, owner, batch, 3600)
        return batch

    @contextlib.asynccontextmanager
    async def working(self, max_num_seqs: int = 8, **others: int) -> AsyncIterator[None]:
        """others: further models that lines name, each with so many rows."""
        models: dict[str | None, Rows] = {name: Rows(num) for name, num in others.items()}
        first = Rows(max_num_seqs)

        async def read_counts() -> AdmissionCounts:
            return AdmissionCounts(0, 0, 0, self.idle_s)

        one = BatchWorker(
            *(self.app, self.files, self.config, self.drain, lambda name: models.get(name, first)),
            died=lambda: None,
            read_counts=read_counts,
        )
        task = asyncio.create_task(one.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until(self, is_so: Any) -> None:
        async with asyncio.timeout(30):
            while not is_so():
                await asyncio.sleep(0.002)

    async def ended(self, batch: Batch) -> Batch:
        await self.until(lambda: self.known(batch).has_ended)
        return self.known(batch)

    def known(self, batch: Batch) -> Batch:
        return self.service._batches[batch.id].batch

    def ids(self, file: str | None) -> dict[str, str | None]:
        """The custom ids of an output, with the codes of their errors."""
        if file is None:
            return {}
        each = map(json.loads, (self.folder / file).read_text().splitlines())
        return {one["custom_id"]: one["error"] and one["error"]["code"] for one in each}


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_LOOK_S", 0.005)


def test_lines_in_flight_are_half_of_what_the_engine_runs_and_fewer_beside_other_requests(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path / "files")
        first, second = await bench.create(lines_of(60)), await bench.create(lines_of(60), "batch_b")
        async with bench.working(max_num_seqs=64):
            await bench.until(lambda: bench.num_running == 32)  # 16 of each
            bench.idle_s = 0.0
            bench.gate.set()
            await bench.until(lambda: bench.num_running <= 2)
            bench.most_running = 0
            await bench.until(lambda: len(bench.scopes) > 60)
            assert bench.most_running <= 2
            assert (await bench.ended(first)).status == (await bench.ended(second)).status == "completed"
        assert {scope["batch"] for scope in bench.scopes} == {"batch_a", "batch_b"}

    asyncio.run(main())


def test_lines_in_flight_are_counted_by_the_model_that_they_name(tmp_path: Path) -> None:
    """A name that is not known counts for the first one."""

    async def main() -> None:
        bench = Bench(tmp_path / "files")
        batch = await bench.create(lines_of(60, models=("wide", None, "unknown", "narrow")))
        async with bench.working(max_num_seqs=16, wide=1000, narrow=4):
            await bench.until(lambda: bench.num_running == 11)  # 2 are narrow: the third waits for them
            await asyncio.sleep(0.05)
            assert bench.most_running == 11
            bench.gate.set()
            assert (await bench.ended(batch)).status == "completed"

    asyncio.run(main())


def test_a_batch_tells_its_model_and_the_tokens_of_its_answers(tmp_path: Path) -> None:
    """Those of an earlier run of it, too; errors and answers that tell nothing count for nothing."""
    chat = {
        "model": "m",
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 1},
        },
    }
    response = {
        "model": "m",
        "usage": {
            "input_tokens": 50,
            "output_tokens": 30,
            "total_tokens": 80,
            "input_tokens_details": {"cached_tokens": 20},
            "output_tokens_details": {"reasoning_tokens": 10},
        },
    }
    pooled = {"model": "m", "usage": {"prompt_tokens": 500, "total_tokens": 500, "prompt_tokens_details": None}}
    told = [(200, chat), (200, response), (200, pooled), (400, {"error": {"message": "no"}, **chat}), (200, [])]

    async def main() -> None:
        bench = Bench(tmp_path / "files")
        bench.gate.set()
        batch = await bench.create(lines_of(len(told)))
        assert (batch.model, batch.usage) == (None, None)
        work = await bench.files.ask(FileService.take)
        assert work is not None
        with Journal(journal_of(work)) as journal:
            for number, (status, body) in enumerate(told, 1):
                answer = Answer(status, "x", msgspec.Raw(json.dumps(body).encode()))
                journal.write(OutputLine(f"batch_req_{number}", str(number - 1), answer, None))
        await bench.files.ask(FileService.put_back, batch.id)
        async with bench.working():
            batch = await bench.ended(batch)
        assert (batch.status, batch.model) == ("completed", "m")
        usage = BatchUsage(555, CachedTokens(22), 33, ReasoningTokens(11), 588)
        assert batch.usage == usage
        bench.service.close()
        again = Bench(tmp_path / "files")
        assert (again.known(batch).model, again.known(batch).usage) == ("m", usage)

    asyncio.run(main())


def test_a_batch_of_several_models_names_none() -> None:
    tally = Tally()
    for model, expected in (("a", "a"), ("a", "a"), ("b", None), ("c", None), ("a", None)):
        tally.add(msgspec.Raw(json.dumps({"model": model}).encode()))
        assert tally.model == expected


def test_a_batch_that_expires_has_an_error_for_each_line_without_an_answer(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path / "files")
        bench.gate.set()
        bench.answer = (400, b"{}")
        batch = await bench.create(lines_of(3))
        async with bench.working():
            assert (await bench.ended(batch)).status == "completed"
            assert (batch.output_file_id, batch.request_counts.failed) == (None, 3)
            bench.gate.clear()
            late = await bench.create(lines_of(10), "batch_late")
            await bench.until(lambda: bench.num_running == 4)
            bench.now_s += 3601
            late = await bench.ended(late)
        assert (late.status, late.output_file_id, late.request_counts.failed) == ("expired", None, 10)
        assert bench.ids(late.error_file_id) == dict.fromkeys(map(str, range(10)), "batch_expired")
        assert bench.num_running == 0

    asyncio.run(main())


def test_what_is_cancelled_keeps_its_answers(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path / "files")
        waiting = await bench.create(lines_of(3), "batch_waiting")
        assert (await bench.files.ask(FileService.cancel, "", waiting.id)) is waiting
        assert (waiting.status, waiting.output_file_id) == ("cancelled", None)
        batch = await bench.create(lines_of(10))
        async with bench.working(max_num_seqs=2):
            await bench.until(lambda: bench.num_running == 1)
            bench.gate.set()
            await bench.until(lambda: batch.request_counts.completed > 2 or batch.has_ended)
            bench.gate.clear()
            await bench.files.ask(FileService.cancel, "", batch.id)
            assert batch.status in ("cancelling", "completed")
            batch = await bench.ended(batch)
        assert len(bench.ids(batch.output_file_id)) == batch.request_counts.completed > 2
        assert bench.num_running == 0

    asyncio.run(main())


def test_a_drain_ends_what_runs_and_begins_no_line(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path / "files")
        batch = await bench.create(lines_of(20))
        async with bench.working():
            await bench.until(lambda: bench.num_running == 4)
            bench.drain.begin()
            bench.gate.set()
            await bench.until(lambda: bench.service._batches[batch.id].client is None)
            assert 4 <= len(bench.scopes) <= 5  # one was read before
        bench.service.close()
        again = Bench(tmp_path / "files")
        again.gate.set()
        async with again.working():
            batch = await again.ended(batch)
        assert len(again.scopes) == 20 - len(bench.scopes)
        assert bench.ids(batch.output_file_id).keys() == set(map(str, range(20)))

    asyncio.run(main())


def test_a_full_disk_stops_a_batch_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, num_failures = Journal.write, 2
    threads = set[bool]()

    def fail(self: Journal, line: OutputLine) -> None:
        nonlocal num_failures
        threads.add(threading.current_thread() is threading.main_thread())
        if self.num_done == 5 and num_failures:
            num_failures -= 1
            raise ConfigError("no space left")
        write(self, line)

    monkeypatch.setattr(Journal, "write", fail)
    monkeypatch.setattr(worker, "_RETRY_S", 0.01)

    async def main() -> None:
        bench = Bench(tmp_path / "files")
        bench.gate.set()
        batch = await bench.create(lines_of(20))
        async with bench.working():
            batch = await bench.ended(batch)
        assert (batch.status, num_failures, threads) == ("completed", 0, {False})
        assert len(bench.ids(batch.output_file_id)) == 20

    asyncio.run(main())


def test_answers_beyond_the_room_of_their_key_end_the_batch(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path / "files", FileLimits(key_bytes=20_000))
        bench.gate.set()
        bench.answer = (200, b'"' + b"x" * 2_000 + b'"')
        batch = await bench.create(lines_of(100))
        async with bench.working(max_num_seqs=2):
            batch = await bench.ended(batch)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert [one.code for one in batch.errors.data] == ["storage_full"]
        assert 0 < len(bench.ids(batch.output_file_id)) < 100
        with pytest.raises(Refusal, match="this key has 2 files of 1000 and"):
            await bench.files.ask(FileService.begin_upload, "", 1)
        await bench.files.ask(FileService.begin_upload, "other", 1)

    asyncio.run(main())


def test_lines_are_sent_with_the_key_that_made_the_batch(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path / "files", config=ServerConfig(api_keys=("one",), admin_api_key="root"))
        bench.gate.set()
        async with bench.working():
            for key in ("one", "root", "gone"):
                batch = await bench.ended(await bench.create(lines_of(1), f"batch_{key}", owner_name(key)))
                if key != "gone":
                    assert dict(bench.scopes[-1]["headers"])[b"authorization"] == f"Bearer {key}".encode()
            assert batch.status == "failed"
            assert batch.errors is not None
            assert batch.errors.data[0].code == "invalid_api_key"

    asyncio.run(main())


def test_files_and_batches_of_a_key_are_limited(tmp_path: Path) -> None:
    async def main() -> None:
        limits = FileLimits(key_files=4, key_bytes=10_000, num_bytes=12_000, key_unfinished=2, key_batches=3, age_s=100)
        bench = Bench(tmp_path / "files", limits)
        ask = bench.files.ask
        with pytest.raises(Refusal, match="no room for 10001 more"):
            await ask(FileService.begin_upload, "a", 10_001)
        begun = await ask(FileService.begin_upload, "a", 9_000)  # counts while it comes
        with pytest.raises(Refusal, match="and 9000 bytes of 10000"):
            await ask(FileService.begin_upload, "a", 2_000)
        with pytest.raises(Refusal, match="the server has 1 files"):
            await ask(FileService.begin_upload, "b", 4_000)
        bench.service.end_client(0)  # its process is gone
        assert begun.id not in bench.service._uploads
        for at in range(2):
            await bench.create(lines_of(1), f"batch_{at}", "a")
        late = Batch(**{**_fields(bench.known(bench.service._batches["batch_0"].batch)), "id": "batch_late"})
        with pytest.raises(Refusal, match="2 batches that have not ended, of 2"):
            await ask(FileService.create, "a", late, 1)
        for at in range(2):
            await ask(FileService.cancel, "a", f"batch_{at}")
        for at in range(2, 4):
            await ask(FileService.create, "a", Batch(**{**_fields(late), "id": f"batch_{at}"}), 1)
            await ask(FileService.cancel, "a", f"batch_{at}")
        page = await ask(FileService.batches, "a", "", 10)
        assert [one.id for one in page.data] == ["batch_3", "batch_2", "batch_1"]
        bench.now_s += 101
        files = await ask(FileService.files, "a", "", "", 10, True)
        assert files.data == []
        await bench.until(lambda: [path.name for path in bench.folder.glob("file-*")] == [])

    asyncio.run(main())


def test_the_next_service_removes_the_folder_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of one that lives, nor a folder of another kind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "pagoda-files-mine").mkdir()
    (tmp_path / "pagoda-other").mkdir()
    mine = {path.name for path in tmp_path.iterdir()}
    code = "from pagoda.server.batches.folder import TemporaryFolder as F; f = F(); print(f.path, flush=True); input()"
    command = [sys.executable, "-c", code]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as other:
        assert other.stdout is not None
        path = Path(other.stdout.readline().strip())
        (path / "file-x").write_bytes(b"x")
        remove_left_behind()
        assert (path / "file-x").exists()
        other.kill()
    service = FileService()
    assert {path.name for path in tmp_path.iterdir()} == mine

    async def begin() -> str:
        return (await service.begin_upload(0, "", 1)).path

    folder = Path(asyncio.run(begin())).parent
    FileService()
    assert folder.exists()
    service.close()
    assert {path.name for path in tmp_path.iterdir()} == mine


def _fields(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in batch.__struct_fields__}


def test_a_restart_removes_what_is_not_complete_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path / "files")
        file = await bench.upload(b"x")
        upload = await bench.files.ask(FileService.begin_upload, "", 1)
        Path(upload.path).write_bytes(b"half")
        (bench.folder / "notes.txt").write_text("mine")
        with pytest.raises(ConfigError, match="responses_file"):
            FileService(str(bench.folder))  # another server
        bench.service.close()
        again = Bench(tmp_path / "files")
        assert (await again.files.ask(FileService.file, "", file)) is not None
        names = {path.name for path in bench.folder.iterdir()}
        assert {file, "notes.txt"} <= names
        assert upload.id not in names
        assert oct(bench.folder.stat().st_mode)[-3:] == "700"

    asyncio.run(main())


def test_an_input_has_a_bounded_number_of_lines_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"{}\n" * 500)
    assert len(check_input(path, URL)[1]) == 100
    monkeypatch.setattr(worker, "MAX_LINES", 10)
    path.write_bytes(lines_of(11))
    _, (error,) = check_input(path, URL)
    assert (error.code, error.message, error.line) == ("too_many_lines", "a batch has at most 10 lines", 11)
