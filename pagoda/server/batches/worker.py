"""BatchWorker: runs batches in a process of the server, a line at a time through the routes of its own app."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from starlette.types import ASGIApp

from pagoda.base.errors import ConfigError, PagodaError
from pagoda.base.server_config import ServerConfig
from pagoda.engine.clients.calls import AnyCalls
from pagoda.server.admission import AdmissionCounts
from pagoda.server.batches.lines import InputLine, Journal, LineError, OutputLine, parse_output, read_lines
from pagoda.server.batches.records import BatchError, Ended, Progress, RequestCounts, Work
from pagoda.server.batches.run import MAX_LINE_BYTES, AppCaller, Unanswered, answer_lines, unanswered
from pagoda.server.batches.service import FileService, journal_of, output_ids
from pagoda.server.middleware import Drain, owner_name
from pagoda.server.request_starter import BATCH
from pagoda.server.sending import on_thread

logger = logging.getLogger("pagoda.server")

MAX_LINES = 100_000
"""Of a batch; what is kept in memory of each is about 300 bytes."""
_MAX_ERRORS = 100
_AT_ONCE = 4
"""So many batches a process runs at once, so that a long one does not keep the others waiting."""
_ASIDE = 16
"""Beside other requests, so many times fewer lines are in flight: the more run, the longer each step takes."""
_ALONE_S = 30.0
"""After so long without another request, a batch has the engine to itself."""
_LOOK_S = 0.5
"""Interval at which a batch's counts are stored, and its end is looked for."""
_RETRY_S = 30.0
"""After so long, a batch whose answers could not be written is tried again."""
_EXPIRED = LineError("batch_expired", "the completion window of the batch passed before this line had an answer")


class _Stopped(Exception):
    """The server drains: what has no answer is left for the next start."""


class Rows(Protocol):
    """A model, of which that counts.   max_num_seqs: that its engine runs at once."""

    @property
    def max_num_seqs(self) -> int: ...


class BatchWorker:
    """Runs batches until the server drains."""

    def __init__(
        self,
        app: ASGIApp,
        owned: AnyCalls,
        config: ServerConfig,
        drain: Drain,
        model_of: Callable[[str | None], Rows],
        died: Callable[[], Exception | None],
        read_counts: Callable[[], Awaitable[AdmissionCounts]],
    ) -> None:
        """model_of: returns the model of a name.   died: returns why the engine is gone for good, or None.

        read_counts: of all processes together.
        """
        self._app, self._owned, self._config, self._drain, self._died = app, owned, config, drain, died
        self._model_of, self._read_counts = model_of, read_counts
        self._is_alone = False
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run batches until the server drains; when cancelled, leave those that run for the next start."""
        try:
            while not self._drain.is_draining:
                if len(self._running) >= _AT_ONCE:
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                elif (work := await self._owned.ask(FileService.take)) is None:
                    continue
                elif self._drain.is_draining:  # it has begun meanwhile
                    self._owned.tell(FileService.put_back, work.batch.id)
                else:
                    task = asyncio.create_task(self._run(work))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self, work: Work) -> None:
        id = work.batch.id
        try:
            ended = await self._ended(work)
        except _Stopped:
            self._owned.tell(FileService.put_back, id)
            return
        except (OSError, PagodaError) as error:
            logger.error("%s stops, and is tried again in %g s: %s", id, _RETRY_S, error)
            await asyncio.sleep(_RETRY_S)
            self._owned.tell(FileService.put_back, id)
            return
        except Exception as error:
            logger.error("%s ended with an error", id, exc_info=error)
            ended = Ended("failed", errors=[BatchError("server_error", "internal error")])
        await self._owned.ask(FileService.end, id, ended)
        counts = work.batch.request_counts if ended.progress is None else ended.progress.counts
        logger.info("%s: %s, %d answers and %d errors", id, ended.status, counts.completed, counts.failed)

    async def _ended(self, work: Work) -> Ended:
        """Run a batch; return how it has ended. Its files are complete."""
        headers = self._headers_of(work.owner)
        if headers is None:
            return _failed("invalid_api_key", "the API key that made this batch is not one of this server any more")
        source = Path(work.folder, work.batch.input_file_id)
        num_lines, errors = await on_thread(lambda: check_input(source, work.batch.endpoint))
        if errors:
            return Ended("failed", errors=errors)
        with await on_thread(lambda: Journal(journal_of(work))) as journal:
            stop = await self._answer(work, source, journal, num_lines, headers)
            if stop == "expired":
                await on_thread(lambda: _expire(source, journal))
            progress = _progress(journal, num_lines)
            if not stop:
                await self._note(work, journal, num_lines, "finalizing")
            sizes = await on_thread(lambda: _write_outputs(work))
        if stop == "full":
            text = (
                "the answers of this key, or of the server, take too much room: delete files, and send the rest again"
            )
            return Ended("failed", progress, *sizes, errors=[BatchError("storage_full", text)])
        return Ended(stop or "completed", progress, *sizes)

    def _headers_of(self, owner: str) -> tuple[tuple[bytes, bytes], ...] | None:
        """Return the headers of an owner's requests; None if its key is not known."""
        keys = (*self._config.api_keys, self._config.admin_api_key or "")
        if not owner:
            return None if self._config.api_keys else ()
        key = next((one for one in keys if one and owner_name(one) == owner), None)
        return None if key is None else ((b"authorization", f"Bearer {key}".encode()),)

    async def _answer(
        self, work: Work, source: Path, journal: Journal, num_lines: int, headers: tuple[tuple[bytes, bytes], ...]
    ) -> str:
        """Answer the lines that have no answer; return why not all have one, or "". Raises _Stopped."""
        if stop := await self._note(work, journal, num_lines, "in_progress"):
            return stop
        caller = AppCaller(self._app, self._raise_if_ending, headers, {BATCH: work.batch.id}, f"{work.batch.id}-")
        lines = takewhile(lambda _: not self._drain.is_draining, unanswered(source, journal))
        answering = asyncio.create_task(answer_lines(caller, lines, journal, self._has_room, lambda: None))
        try:
            while not answering.done():
                await asyncio.wait((answering,), timeout=_LOOK_S)
                if stop := await self._note(work, journal, num_lines, "in_progress"):
                    answering.cancel()
                    await asyncio.gather(answering, return_exceptions=True)
                    return stop
            await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        if journal.num_done < num_lines:
            raise _Stopped
        return ""

    def _has_room(self, line: InputLine, running: Collection[InputLine]) -> bool:
        """Return whether another line of a batch may be in flight: fewer of a model while there are other requests."""
        model = self._model_of(line.model)
        names = Counter(one.model for one in running)
        num_running = sum(count for name, count in names.items() if self._model_of(name) is model)
        most = max(model.max_num_seqs // 2 // self._config.api_server_count, 1)
        return num_running < max((most if self._is_alone else most // _ASIDE) // len(self._running), 1)

    def _raise_if_ending(self) -> None:
        if self._drain.is_draining:
            raise Unanswered
        if (died := self._died()) is not None:
            raise died

    async def _note(self, work: Work, journal: Journal, num_lines: int, status: str) -> str:
        """Tell how far a batch is, and look whether there are other requests. Return why it must stop, or ""."""
        self._is_alone = (await self._read_counts()).idle_s > _ALONE_S
        return await self._owned.ask(FileService.note, work.batch.id, status, _progress(journal, num_lines))


def check_input(path: Path, endpoint: str) -> tuple[int, list[BatchError]]:
    """Return how many lines an input has, and what is wrong with them, as far as that is seen before they are sent."""
    num_lines = 0
    errors: list[BatchError] = []
    try:
        for line in read_lines(path, MAX_LINE_BYTES):
            num_lines += 1
            error = line.error
            if error is None and line.path != endpoint:
                error = LineError("invalid_url", f"url must be {endpoint}, the endpoint of the batch (got {line.path})")
            if error is not None:
                errors.append(BatchError(error.code, error.message, line.number))
            if num_lines > MAX_LINES:
                errors.append(BatchError("too_many_lines", f"a batch has at most {MAX_LINES} lines", line.number))
            if len(errors) >= _MAX_ERRORS or num_lines > MAX_LINES:
                break
    except ConfigError as error:
        errors.append(BatchError("invalid_file", str(error)))
    if not num_lines and not errors:
        errors.append(BatchError("empty_file", "the input has no line"))
    return num_lines, errors


def _failed(code: str, message: str) -> Ended:
    return Ended("failed", errors=[BatchError(code, message)])


def _progress(journal: Journal, num_lines: int) -> Progress:
    counts = RequestCounts(total=num_lines, completed=journal.num_done - journal.num_failed, failed=journal.num_failed)
    tally = journal.tally
    return Progress(counts=counts, model=tally.model, usage=tally.usage, num_bytes=journal.num_bytes)


def _expire(source: Path, journal: Journal) -> None:
    """Write an error for each line that has no answer."""
    for line in unanswered(source, journal):
        journal.write(OutputLine(line.id, line.custom_id, None, _EXPIRED))


def _write_outputs(work: Work) -> tuple[int, int]:
    """Write the answers, and the lines that failed, to a file each. Return their sizes; no file is empty.

    What an earlier run of this has left is written again.
    """
    paths = [Path(work.folder, name) for name in output_ids(work.batch)]
    with contextlib.ExitStack() as at_end:
        targets = [at_end.enter_context(path.open("wb")) for path in paths]
        for data in at_end.enter_context(journal_of(work).open("rb")):
            targets[parse_output(data).failure is not None].write(data)
    sizes = [path.stat().st_size for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        if not size:
            path.unlink()
    return sizes[0], sizes[1]
