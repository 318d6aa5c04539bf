"""/v1/files: OpenAI's files, which batches read and write."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from typing import Annotated, BinaryIO

from msgspec import Meta, field
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pagoda.base.server_config import MAX_UPLOAD_BYTES
from pagoda.server.batches.records import FileFound, FileObject
from pagoda.server.batches.service import FileService
from pagoda.server.body import Body, one_of
from pagoda.server.errors import ApiError
from pagoda.server.forms import read_form
from pagoda.server.listing import Listed, page_asked
from pagoda.server.request_state import request_state
from pagoda.server.routing import Router
from pagoda.server.sending import json_response, on_thread
from pagoda.server.state import state_of
from pagoda.server.stored.asking import NOT_FOUND, Deleted, not_found, owner_of

router = Router(errors=NOT_FOUND)
_PATH = "/v1/files/{file_id}"
_CHUNK_BYTES = 256 * 2**10
_LONGEST_PAGE = 10_000
_LONGEST_NAME = 256
AgeSeconds = Annotated[int, Meta(ge=3_600, le=2_592_000)]


class FileRequest(Body, kw_only=True, frozen=True):
    """POST /v1/files

    file: The file: for a batch, a JSON object per line.
    purpose: What it is for: batch; others are only kept.
    anchor: Since when its age counts.
    seconds: How old it gets; 30 days, if not given.
    """

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    anchor: Annotated[str, one_of("created_at")] | None = field(default=None, name="expires_after[anchor]")
    seconds: AgeSeconds | None = field(default=None, name="expires_after[seconds]")


class FileList(Listed[FileObject], frozen=True):
    """Files of a key."""


@router.post("/v1/files", body=FileRequest, answer=FileObject, is_form=True)
async def create_file(http: Request) -> Response:
    """Upload a file, which belongs to the key that is used: a form with the file and the fields below."""
    state = state_of(http)
    request_state(http).body_bytes = 0  # of a prompt
    async with state.model.starter.admitted(http, 1, is_read=False, needs_engine=False) as place:
        place.start()
        length = http.headers.get("content-length", "")
        most = min(int(length), MAX_UPLOAD_BYTES) if length.isascii() and length.isdecimal() else MAX_UPLOAD_BYTES
        upload = await state.owned.ask(FileService.begin_upload, owner_of(http), most)
        is_kept = False
        try:
            async with read_form(http, FileRequest, "a file") as (form, file):
                num_bytes = await on_thread(lambda: _write(file, upload.path))
            now_s = int(time.time())
            answer = FileObject(
                id=upload.id,
                bytes=num_bytes,
                created_at=now_s,
                expires_at=None if form.seconds is None else now_s + form.seconds,
                filename=os.path.basename(form.file)[-_LONGEST_NAME:] or "upload",
                purpose=form.purpose,
            )
            answer = await state.owned.ask(FileService.end_upload, owner_of(http), answer)
            is_kept = True
        finally:
            if not is_kept:
                state.owned.tell(FileService.drop_upload, upload.id)
    return json_response(answer)


def _write(file: UploadFile, path: str) -> int:
    """Write what was uploaded to a file. Return its size. Raises ApiError (413, 507)."""
    size = file.size or 0
    if size > MAX_UPLOAD_BYTES:
        raise ApiError(413, f"file: {size} bytes are more than {MAX_UPLOAD_BYTES}", "file")
    try:
        file.file.seek(0)
        with open(path, "xb") as target:
            while data := file.file.read(_CHUNK_BYTES):
                target.write(data)
            return target.tell()
    except OSError as error:
        raise ApiError(507, f"the file cannot be kept: {error.strerror}; ask the operator", "file") from None


@router.get("/v1/files", answer=FileList, query=("purpose", "after", "limit", "order"))
async def list_files(http: Request) -> Response:
    """List the files of the key that is used: the last ones first, unless `order` is asc."""
    after, limit, is_ascending = page_asked(http, _LONGEST_PAGE, _LONGEST_PAGE)
    purpose = http.query_params.get("purpose", "")
    page = await state_of(http).owned.ask(FileService.files, owner_of(http), purpose, after, limit, is_ascending)
    return await asyncio.to_thread(json_response, page)


async def _found(http: Request) -> FileFound:
    """Return the file that is asked for. Raises ApiError (404)."""
    return await state_of(http).owned.ask(FileService.file, owner_of(http), http.path_params["file_id"])


@router.get(_PATH, answer=FileObject)
async def get_file(http: Request) -> Response:
    """Return what is known of a file."""
    return json_response((await _found(http)).file)


@router.get(f"{_PATH}/content", answer="application/octet-stream")
async def get_file_content(http: Request) -> Response:
    """Return the content of a file."""
    found = await _found(http)
    try:
        file = await asyncio.to_thread(open, found.path, "rb")
    except OSError:
        raise not_found("file", found.file.id, "file_id") from None
    headers = {"Content-Length": str(found.file.bytes), "X-Content-Type-Options": "nosniff"}
    return StreamingResponse(_content(file), media_type="application/octet-stream", headers=headers)


async def _content(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    with file:
        while data := await on_thread(lambda: file.read(_CHUNK_BYTES)):
            yield data


@router.delete(_PATH, answer=Deleted)
async def delete_file(http: Request) -> Response:
    """Delete a file. One that a batch still reads is a 400."""
    id = http.path_params["file_id"]
    await state_of(http).owned.ask(FileService.delete_file, owner_of(http), id)
    return json_response(Deleted(id, "file"))
