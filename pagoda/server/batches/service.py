"""FileService: the files and batches of all keys, in the process that owns them, for those of any process that ask.

Content is in a folder that all processes of the server reach; this one alone knows which files there are.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pagoda.base.errors import RequestError
from pagoda.engine.clients.calls import offered
from pagoda.server.admission import Refusal
from pagoda.server.batches.folder import TemporaryFolder, remove_left_behind
from pagoda.server.batches.records import (
    Batch,
    BatchErrors,
    Ended,
    FileFound,
    FileObject,
    Progress,
    StoredBatch,
    StoredFile,
    Upload,
    Work,
)
from pagoda.server.database import naming_file, open_database
from pagoda.server.listing import Listed, page_of
from pagoda.server.stored.asking import not_found

logger = logging.getLogger("pagoda.server")

_SETTING = "responses_file"
_INDEX = "index"
_VERSION = 1
_TABLE = "CREATE TABLE kept (id TEXT UNIQUE, data BLOB)"
_PUT = "INSERT INTO kept VALUES (?, ?) ON CONFLICT DO UPDATE SET data = excluded.data"
_DELETE = "DELETE FROM kept WHERE id = ?"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredFile | StoredBatch).decode
_WAIT_S = 30.0
"""How long a process waits for a batch, before it asks again."""


@dataclass(frozen=True, slots=True)
class FileLimits:
    """How much is kept of one key and in all, for how long, and what a batch may come to.

    key_unfinished: batches of a key that have not ended.   batches: of a key, the oldest ended ones go first.
    """

    key_files: int = 1_000
    key_bytes: int = 2 * 2**30
    files: int = 10_000
    num_bytes: int = 16 * 2**30
    age_s: int = 30 * 86_400
    key_unfinished: int = 100
    key_batches: int = 1_000


def journal_of(work: Work) -> Path:
    """Return the file of the answers of a batch that has not ended."""
    return Path(work.folder, _answers(work.batch.id))


def _answers(id: str) -> str:
    return f"{id}.answers"


def output_ids(batch: Batch) -> tuple[str, str]:
    """Return the ids that the files of a batch's answers and errors get."""
    name = batch.id.removeprefix("batch_")
    return f"file-{name}-output", f"file-{name}-errors"


class FileService:
    """Answers what processes ask of files and batches. Each function gets the index of the client that asks, first."""

    def __init__(
        self, folder: str | None = None, limits: FileLimits | None = None, now: Callable[[], float] = time.time
    ) -> None:
        """folder: that keeps them over restarts; None: a temporary one. Raises ConfigError if it cannot be used."""
        self._limits, self._now = limits or FileLimits(), now
        self._folder = None if folder is None else Path(folder).expanduser()
        self._temporary: TemporaryFolder | None = None
        self._index: sqlite3.Connection | None = None
        self._files: dict[str, StoredFile] = {}
        self._batches: dict[str, StoredBatch] = {}
        self._uploads: dict[str, tuple[int, str, int]] = {}  # client, owner, bytes
        self._has_work = asyncio.Event()
        if self._folder is None:
            remove_left_behind()
        else:
            with naming_file(_SETTING, folder):
                self._folder.mkdir(exist_ok=True)
                self._folder.chmod(0o700)
                self._index = open_database(_SETTING, str(self._folder / _INDEX), _VERSION, (_TABLE,))
                self._load(self._folder, self._index)

    def _load(self, folder: Path, index: sqlite3.Connection) -> None:
        """Read what is kept, and remove what is left of uploads and answers that were not complete."""
        for (data,) in index.execute("SELECT data FROM kept ORDER BY rowid"):
            entry = _decode(data)
            if isinstance(entry, StoredFile):
                self._files[entry.file.id] = entry
            else:
                entry.client = None
                self._batches[entry.batch.id] = entry
        known = {*self._files, *(_answers(one.batch.id) for one in self._unfinished())}
        for path in folder.iterdir():
            if path.name not in known and path.name.startswith(("file-", "batch_")):
                path.unlink()

    def close(self) -> None:
        """Close the index, or remove the folder if it is temporary."""
        if self._index is not None:
            self._index.close()
        elif self._temporary is not None:
            self._temporary.close()

    def end_client(self, client: int) -> None:
        """A process has gone: others run its batches, and its uploads are dropped."""
        for id, (of, _, _) in list(self._uploads.items()):
            if of == client:
                self.drop_upload(client, id)
        for entry in self._batches.values():
            if entry.client == client:
                self._put_back(entry)

    # ---- files

    @offered
    async def begin_upload(self, client: int, owner: str, num_bytes: int) -> Upload:
        """Reserve room for a file of at most so many bytes. Raises Refusal if there is none."""
        self._drop_old()
        self._check_room(owner, num_bytes)
        id = f"file-{uuid.uuid4().hex}"
        self._uploads[id] = (client, owner, num_bytes)
        return Upload(id, str(self._path(id)))

    @offered
    async def end_upload(self, client: int, owner: str, file: FileObject) -> FileObject:
        """Keep what was uploaded."""
        del self._uploads[file.id]
        latest = file.created_at + self._limits.age_s
        file.expires_at = latest if file.expires_at is None else min(file.expires_at, latest)
        self._keep(StoredFile(owner, file))
        return file

    @offered
    def drop_upload(self, client: int, id: str) -> None:
        """Give up an upload."""
        if self._uploads.pop(id, None) is not None:
            self._unlink(id)

    @offered
    async def file(self, client: int, owner: str, id: str) -> FileFound:
        """Return a file. Raises ApiError (404)."""
        return FileFound(self._file_of(owner, id, "file_id"), str(self._path(id)))

    @offered
    async def files(
        self, client: int, owner: str, purpose: str, after: str, limit: int, is_ascending: bool
    ) -> Listed[FileObject]:
        """Return some files of a key, in the order in which they came. Raises RequestError, see page_of."""
        self._drop_old()
        own = {id: one.file for id, one in self._files.items() if one.owner == owner}
        asked = {id: file for id, file in own.items() if purpose in ("", file.purpose)}
        return page_of(asked, "file", after, limit, is_ascending)

    @offered
    async def delete_file(self, client: int, owner: str, id: str) -> None:
        """Delete a file. Raises ApiError (404), and RequestError if a batch still reads it."""
        self._file_of(owner, id, "file_id")
        reader = next((one.batch.id for one in self._unfinished(owner) if one.batch.input_file_id == id), None)
        if reader is not None:
            raise RequestError(f"file_id: {reader} still reads it; cancel that, or wait until it has ended", "file_id")
        self._remove_file(id)

    def _file_of(self, owner: str, id: str, param: str) -> FileObject:
        self._drop_old()
        if (entry := self._files.get(id)) is None or entry.owner != owner:
            raise not_found("file", id, param)
        return entry.file

    # ---- batches

    @offered
    async def create(self, client: int, owner: str, batch: Batch, output_age_s: int) -> None:
        """Begin a batch. Raises Refusal if its key has too many, ApiError (404) or RequestError for its input."""
        file = self._file_of(owner, batch.input_file_id, "input_file_id")
        if file.purpose != "batch":
            text = f"input_file_id: its purpose is {file.purpose}; upload it with the purpose batch"
            raise RequestError(text, "input_file_id")
        num, most = len(self._unfinished(owner)), self._limits.key_unfinished
        if num >= most:
            text = f"this key has {num} batches that have not ended, of {most}; wait for one, or cancel it"
            raise Refusal("stored", text)
        own = [one for one in self._batches.values() if one.owner == owner]
        for entry in own[: max(len(own) + 1 - self._limits.key_batches, 0)]:
            if entry.batch.has_ended:
                self._remove_batch(entry.batch.id)
        self._put_back(StoredBatch(owner, batch, output_age_s))

    @offered
    async def batch(self, client: int, owner: str, id: str) -> Batch:
        """Return a batch. Raises ApiError (404)."""
        return self._entry_of(owner, id).batch

    def _entry_of(self, owner: str, id: str) -> StoredBatch:
        self._drop_old()
        if (entry := self._batches.get(id)) is None or entry.owner != owner:
            raise not_found("batch", id, "batch_id")
        return entry

    @offered
    async def batches(self, client: int, owner: str, after: str, limit: int) -> Listed[Batch]:
        """Return some batches of a key, the last ones first. Raises RequestError, see page_of."""
        self._drop_old()
        own = {id: one.batch for id, one in self._batches.items() if one.owner == owner}
        return page_of(own, "batch", after, limit, False)

    @offered
    async def cancel(self, client: int, owner: str, id: str) -> Batch:
        """Cancel a batch that has not ended: at once if none of it has run. Raises ApiError (404)."""
        entry = self._entry_of(owner, id)
        batch = entry.batch
        if not batch.has_ended and batch.cancelling_at is None:
            batch.status, batch.cancelling_at = "cancelling", int(self._now())
            if entry.client is None and batch.in_progress_at is None:
                self._end(entry, Ended("cancelled"))
            else:
                self._keep(entry)
        return batch

    # ---- who runs them

    @offered
    async def take(self, client: int) -> Work | None:
        """Return a batch to run, once there is one; None after a while. Keys with fewer that run come first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_S):
                while not (waiting := [one for one in self._unfinished() if one.client is None]):
                    self._has_work.clear()
                    await self._has_work.wait()
            running = Counter(one.owner for one in self._unfinished() if one.client is not None)
            entry = min(waiting, key=lambda one: (one.batch.cancelling_at is None, running[one.owner]))
            entry.client = client
            return Work(entry.owner, entry.batch, str(self._path("")))
        return None

    @offered
    async def note(self, client: int, id: str, status: str, progress: Progress) -> str:
        """Note how far a batch is. Return why it must stop: cancelled, expired or full; "" if it may go on."""
        entry = self._batches[id]
        batch, now_s = entry.batch, int(self._now())
        batch.note(progress)
        entry.num_bytes = progress.num_bytes
        if status != batch.status and batch.cancelling_at is None:
            batch.status = status
            if getattr(batch, f"{status}_at") is None:
                setattr(batch, f"{status}_at", now_s)
            self._keep(entry)
        if batch.cancelling_at is not None:
            return "cancelled"
        if now_s >= batch.expires_at:
            return "expired"
        return "full" if self._is_over(entry.owner) else ""

    @offered
    async def end(self, client: int, id: str, ended: Ended) -> None:
        """Note how a batch has ended. Its files are complete, under the names of `output_ids`."""
        self._end(self._batches[id], ended)

    @offered
    def put_back(self, client: int, id: str) -> None:
        """Have a batch wait for another process, or for this one."""
        self._put_back(self._batches[id])

    def _put_back(self, entry: StoredBatch) -> None:
        entry.client = None
        self._keep(entry)
        self._has_work.set()

    def _end(self, entry: StoredBatch, ended: Ended) -> None:
        batch, now_s = entry.batch, int(self._now())
        batch.status = ended.status
        if ended.progress is not None:
            batch.note(ended.progress)
        setattr(batch, f"{ended.status}_at", now_s)
        batch.errors = BatchErrors(list(ended.errors)) if ended.errors else None
        sizes = (ended.output_bytes, ended.error_bytes)
        ids = [id if size else None for id, size in zip(output_ids(batch), sizes, strict=True)]
        batch.output_file_id, batch.error_file_id = ids
        for id, size, kind in zip(ids, sizes, ("output", "error"), strict=True):
            if id is not None:
                file = FileObject(
                    id=id,
                    bytes=size,
                    created_at=now_s,
                    expires_at=now_s + min(entry.output_age_s, self._limits.age_s),
                    filename=f"{batch.id}_{kind}.jsonl",
                    purpose="batch_output",
                )
                self._keep(StoredFile(entry.owner, file))
        entry.client, entry.num_bytes = None, 0
        self._keep(entry)
        self._unlink(_answers(batch.id))

    # ---- what is kept

    def _keep(self, entry: StoredFile | StoredBatch) -> None:
        """Keep an entry, new or changed."""
        if isinstance(entry, StoredFile):
            self._files[id := entry.file.id] = entry
        else:
            self._batches[id := entry.batch.id] = entry
        self._write(_PUT, (id, _encode(entry)))

    def _write(self, statement: str, values: tuple[Any, ...]) -> None:
        if self._index is not None:
            try:
                self._index.execute(statement, values)
            except sqlite3.Error as error:
                logger.error("%s: the index of files and batches lacks a change: %s", self._folder, error)

    def _unfinished(self, owner: str | None = None) -> list[StoredBatch]:
        return [one for one in self._batches.values() if not one.batch.has_ended and owner in (None, one.owner)]

    def _remove_file(self, id: str) -> None:
        del self._files[id]
        self._write(_DELETE, (id,))
        self._unlink(id)

    def _remove_batch(self, id: str) -> None:
        del self._batches[id]
        self._write(_DELETE, (id,))

    def _drop_old(self) -> None:
        """Remove what is too old: no file that an unfinished batch reads."""
        now_s = self._now()
        read = {one.batch.input_file_id for one in self._unfinished()}
        for id, entry in list(self._files.items()):
            if (entry.file.expires_at or now_s) < now_s and id not in read:
                self._remove_file(id)
        for id, stored in list(self._batches.items()):
            if stored.batch.has_ended and stored.batch.created_at + 2 * self._limits.age_s < now_s:
                self._remove_batch(id)

    def _sizes(self, owner: str | None) -> list[int]:
        """Return the bytes of each file that counts for a key (None: in all): answers that are written, too."""
        files = [one.file.bytes for one in self._files.values() if owner in (None, one.owner)]
        uploads = [size for _, of, size in self._uploads.values() if owner in (None, of)]
        return [*files, *uploads, *(one.num_bytes for one in self._unfinished(owner))]

    def _check_room(self, owner: str, num_bytes: int) -> None:
        """Raise Refusal if there is no room for a file."""
        limits = self._limits
        for of, num, size, whose in (
            (owner, limits.key_files, limits.key_bytes, "this key"),
            (None, limits.files, limits.num_bytes, "the server"),
        ):
            sizes = self._sizes(of)
            if len(sizes) >= num or sum(sizes) + num_bytes > size:
                has = f"{whose} has {len(sizes)} files of {num} and {sum(sizes)} bytes of {size}"
                remedy = "delete files that are not needed (DELETE /v1/files/ID)"
                raise Refusal("stored", f"{has}, and no room for {num_bytes} more: {remedy}")

    def _is_over(self, owner: str) -> bool:
        limits = self._limits
        return sum(self._sizes(owner)) > limits.key_bytes or sum(self._sizes(None)) > limits.num_bytes

    def _path(self, name: str) -> Path:
        if self._folder is None:
            self._temporary = TemporaryFolder()
            self._folder = self._temporary.path
            logger.info("files and batches are in %s, until the server ends", self._folder)
        return self._folder / name

    def _unlink(self, name: str) -> None:
        """Remove a file of the folder: on a thread, as a large one takes long."""
        path = self._path(name)
        asyncio.get_running_loop().run_in_executor(None, lambda: path.unlink(missing_ok=True))
