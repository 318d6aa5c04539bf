"""Forms with a file (multipart/form-data)."""

import contextlib
import importlib.util
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import Request

from pagoda.base.errors import RequestError
from pagoda.server.body import Body
from pagoda.server.body_reader import parse_fields
from pagoda.server.state import state_of

F = TypeVar("F", bound=Body)

_MAX_FIELDS = 32
_MAX_FIELD_BYTES = 64 * 2**10


@contextlib.asynccontextmanager
async def read_form(
    http: Request, kind: type[F], what: str, lists: Sequence[str] = (), refused: tuple[str, ...] = ()
) -> AsyncGenerator[tuple[F, UploadFile], None]:
    """Read a form: its field `file` goes to disk from 1 MB on, as it comes. Raises RequestError.

    what: the file is.   lists: fields that may be given several times.   refused: how fields begin that are not served.
    """
    state = state_of(http)
    if importlib.util.find_spec("python_multipart") is None:
        raise RequestError("this server cannot read uploads: install it with pip install python-multipart")
    if not http.headers.get("content-type", "").startswith("multipart/form-data"):
        raise RequestError("the body is not a form with a file; send one with Content-Type: multipart/form-data")
    _check_charset(http.headers["content-type"])
    async with http.form(max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES) as given:
        fields: dict[str, Any] = {}
        for name in given:
            values = [value if isinstance(value, str) else value.filename or "upload" for value in given.getlist(name)]
            fields[name] = values if name in lists else values[-1]
        file = given.get("file")
        if not isinstance(file, UploadFile):
            raise RequestError(f"file: expected {what} in a form (multipart/form-data)", "file")
        known = {one.encode_name for one in msgspec.structs.fields(kind)}
        unknown = [name for name in fields if name not in known]
        if refused and (found := next((name for name in unknown if name.startswith(refused)), None)):
            raise RequestError(f"{found[:64]}: not supported; leave it out", found[:64])
        if unknown:
            state.bodies.note_unknown(http, unknown, len(unknown))
        limits = state.model.llm.input_processor.limits.of_request
        yield parse_fields({k: v for k, v in fields.items() if k in known}, kind, limits), file


def _check_charset(content_type: str) -> None:
    """Raise RequestError for another charset than UTF-8: a client does not choose the codec of its fields."""
    from python_multipart.multipart import parse_options_header

    charset = parse_options_header(content_type)[1].get(b"charset", b"utf-8")
    if charset.lower() not in (b"utf-8", b"utf8"):
        raise RequestError("Content-Type: the charset of a form must be utf-8; leave it out")
