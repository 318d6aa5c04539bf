"""OpenAI's batch files: the requests of an input file, and the output file, which is the journal of a run."""

import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import UNSET

from pagoda.base.abbreviate import shorten
from pagoda.base.errors import ConfigError
from pagoda.server.batches.usage import Tally

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
)
"""Routes that a line may ask for."""
_CHATS = ("/v1/chat/completions", "/v1/responses")
_HOST = re.compile(r"^https?://[^/]*")
_MARK = b"\xef\xbb\xbf"  # begins UTF-8 files of some editors
_ID = "batch_req_"
_BEGIN = b'{"id":"' + _ID.encode()
_MAX_SHOWN_CHARS = 100


class LineError(msgspec.Struct, frozen=True):
    """Why a line was not sent to a route.   code: OpenAI's word for it, where there is one."""

    code: str
    message: str


class Answer(msgspec.Struct, frozen=True):
    """What a route answered, as over HTTP.   body: JSON."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class OutputLine(msgspec.Struct, frozen=True):
    """One line of the output file.   id: has the number of the input's line."""

    id: str
    custom_id: str | None
    response: Answer | None
    error: LineError | None

    @property
    def failure(self) -> str | None:
        """Return why it is no success, or None."""
        if self.error is not None:
            return self.error.message
        if self.response is None or self.response.status_code < 400:
            return None
        try:
            return msgspec.json.decode(self.response.body, type=_Failure).error.message
        except msgspec.MsgspecError:
            return f"status {self.response.status_code}"


class _FailureDetail(msgspec.Struct):
    message: str


class _Failure(msgspec.Struct):
    error: _FailureDetail


class InputLine(msgspec.Struct, frozen=True):
    """One line of the input file.

    number: from 1.   error: why it cannot be sent; its other fields may be empty.
    is_chat: it needs the chat template of the model.   model: as its body names it.
    """

    number: int
    custom_id: str | None = None
    path: str = ""
    body: bytes = b""
    error: LineError | None = None
    is_chat: bool = False
    model: str | None = None

    @property
    def id(self) -> str:
        return f"{_ID}{self.number}"


# ---- the input file


def read_lines(path: Path, max_bytes: int) -> Iterator[InputLine]:
    """Yield the lines of an input file that are not blank; one that cannot be sent has an error.

    max_bytes: of a line; longer ones are not read into memory. A line whose custom_id an earlier one has is an error.
    Raises ConfigError if the file cannot be read.
    """
    numbers: dict[bytes, int] = {}
    try:
        with path.open("rb") as file:
            for number, data in enumerate(_split(file, max_bytes), 1):
                if data is None:
                    message = f"the line is longer than {max_bytes} bytes"
                    yield InputLine(number, error=LineError("line_too_long", message))
                elif data := (data.removeprefix(_MARK) if number == 1 else data).strip():
                    line = _parse(number, data)
                    if line.custom_id is not None:
                        first = numbers.setdefault(_digest(line.custom_id), number)
                        if first != number:
                            message = f"line {first} has the custom_id {_show(line.custom_id)}, too: make them unique"
                            line = InputLine(number, line.custom_id, error=LineError("duplicate_custom_id", message))
                    yield line
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a file with a JSON object per line") from None


def _split(file: Any, max_bytes: int) -> Iterator[bytes | None]:
    """Yield the lines of a file; None for one of more than `max_bytes`."""
    while data := file.readline(max_bytes + 1):
        is_long = len(data) > max_bytes and not data.endswith(b"\n")
        while is_long and data and not data.endswith(b"\n"):
            data = file.readline(max_bytes)
        yield None if is_long else data


class _Fields(msgspec.Struct):
    custom_id: Any = UNSET
    method: Any = UNSET
    url: Any = UNSET
    body: msgspec.Raw = msgspec.Raw()


class _Asked(msgspec.Struct):
    stream: Any = None
    background: Any = None
    chat_template: Any = None
    model: Any = None


def _parse(number: int, data: bytes) -> InputLine:
    try:
        fields = msgspec.json.decode(data, type=_Fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = f"the line cannot be read as a JSON object: {shorten(str(error), _MAX_SHOWN_CHARS)}"
        return InputLine(number, error=LineError("invalid_json_line", message))
    custom_id = fields.custom_id if isinstance(fields.custom_id, str) and fields.custom_id else None
    asked = _asked(fields.body)
    error = _error_of(fields, asked)
    if error is not None:
        return InputLine(number, custom_id, error=error)
    path = _path_of(fields.url)
    is_chat = path in _CHATS and asked.chat_template is None
    model = asked.model if isinstance(asked.model, str) else None
    return InputLine(number, custom_id, path, bytes(fields.body), is_chat=is_chat, model=model)


def _asked(body: msgspec.Raw) -> _Asked:
    """Read what is asked of a body here. Of one that cannot be read, the route says what is wrong."""
    try:
        return msgspec.json.decode(body, type=_Asked)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Asked()


def _error_of(fields: _Fields, asked: _Asked) -> LineError | None:
    """Return why a line cannot be sent, or None."""
    for name in ("custom_id", "method", "url"):
        value = getattr(fields, name)
        if value is UNSET:
            return LineError("missing_required_parameter", f"{name} is missing: it must be a string")
        if not isinstance(value, str) or not value:
            return LineError(f"invalid_{name}", f"{name} must be a string that is not empty (got {_show(value)})")
    if not bytes(fields.body):
        return LineError("missing_required_parameter", "body is missing: it must be the body of the request")
    if fields.method != "POST":
        return LineError("invalid_method", f"method must be POST (got {_show(fields.method)})")
    if _path_of(fields.url) not in PATHS:
        return LineError("invalid_url", f"url must be one of {', '.join(PATHS)} (got {_show(fields.url)})")
    for name in ("stream", "background"):
        if getattr(asked, name) is True:
            return LineError(f"invalid_{name}", f"{name} must be false: the answer is one line; leave it out")
    return None


def _path_of(url: str) -> str:
    """Return the path of a URL, which may begin with any server's address."""
    return _HOST.sub("", url).rstrip("/")


def _show(value: object) -> str:
    return shorten(repr(value), _MAX_SHOWN_CHARS)


def _digest(custom_id: str | None) -> bytes:
    return hashlib.blake2b(repr(custom_id).encode(), digest_size=16).digest()


# ---- the output file


parse_output = msgspec.json.Decoder(OutputLine).decode


class JournalInUse(ConfigError):
    """Another run writes an output file."""


class Journal:
    """The output file. What is complete in it when a run begins is done; a torn last line is cut.

    One run has the file at a time. A line is passed to the system before `write` returns, so that the end of this
    process, however it comes, loses none. The first failure is kept for the summary, and what the others tell is added
    up in `tally`.
    Raises ConfigError for a file that cannot be written, that another run has, or that is no output of this kind.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done: dict[int, bytes] = {}
        self.num_bytes = self.num_failed = 0
        self.first_failure: str | None = None
        self.tally = Tally()
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self._take()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def num_done(self) -> int:
        return len(self._done)

    def has(self, line: InputLine) -> bool:
        """Return whether a line is done. Raises ConfigError if the answer is to a line with another custom_id."""
        digest = self._done.get(line.number)
        if digest is not None and digest != _digest(line.custom_id):
            raise ConfigError(
                f"{self._path} has an answer to line {line.number} of another input, or of one that was changed since: "
                "give another output file"
            )
        return digest is not None

    def write(self, line: OutputLine) -> None:
        """Append a line. Raises ConfigError if it cannot be written."""
        data = memoryview(msgspec.json.encode(line) + b"\n")
        size = len(data)
        try:
            while data:  # not buffered: what a full disk refused would fail once more when the file is closed
                data = data[os.write(self._file.fileno(), data) :]
        except OSError as error:
            raise self._unwritable(error) from None
        self._note(line, size)

    def _take(self) -> None:
        """Lock the file, and read what is done."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalInUse(f"another run writes {self._path}: wait for it, or give another output file") from None
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise ConfigError(f"{self._path} is a device or a pipe: give an output file, from which a run can go on")
        try:
            self._file.seek(0)
            if not _BEGIN.startswith(self._file.read(len(_BEGIN))):
                raise self._foreign(1)  # before a line of any length is read
            self._file.seek(0)
            end = 0
            for count, data in enumerate(self._file, 1):
                if not data.endswith(b"\n"):
                    if not (data.startswith(_BEGIN) or _BEGIN.startswith(data)):
                        raise self._foreign(count)
                    os.truncate(self._file.fileno(), end)
                    break
                try:
                    self._note(parse_output(data), len(data))
                except ValueError:  # msgspec's errors are of this kind, too
                    raise self._foreign(count) from None
                end += len(data)
        except OSError as error:
            raise self._unwritable(error) from None

    def _note(self, line: OutputLine, num_bytes: int) -> None:
        """Count a line as done. Raises ValueError for an id that is not of a batch, or of a line that is done."""
        number = int(line.id.removeprefix(_ID))
        if line.id != f"{_ID}{number}" or number in self._done:
            raise ValueError(line.id)
        self._done[number] = _digest(line.custom_id)
        self.num_bytes += num_bytes
        failure = line.failure
        if failure is not None:
            self.num_failed += 1
            self.first_failure = self.first_failure or f"line {number}: {failure}"
        elif line.response is not None:
            self.tally.add(line.response.body)

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(
            f"{self._path} exists, and its line {number} is no answer of run-batch: give another output file"
        )

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self._path} cannot be written: {error.strerror}; give another output file")
