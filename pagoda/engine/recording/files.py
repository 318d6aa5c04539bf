"""The files of a recording: FILE, FILE.1, FILE.2, … Each can be replayed by itself; the newest few are kept."""

import logging
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pagoda.base.clock import Clock
from pagoda.base.errors import ConfigError

logger = logging.getLogger("pagoda")

MAX_BYTES = 256 << 20
"""Of one file. From a quarter of it on, the next file begins as soon as no request is unfinished.
When it is full, the next one begins in any case."""
NUM_FILES = 4


class RecordingFiles:
    """Writes lines to the newest file.

    path: of the first. Numbers of an engine that ran before are not used again.
    is_open: lines are written; not after a file was full, until the next one begins, nor after one was not writable.
    """

    def __init__(self, path: Path, clock: Clock, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._clock, self._max_bytes = path, clock, max_bytes
        self._file: BinaryIO | None = None
        self._num_bytes = 0
        self._has_failed = False

    @property
    def is_open(self) -> bool:
        return self._file is not None

    @property
    def has_room(self) -> bool:
        """Whether the file is less than half full."""
        return self.is_open and self._num_bytes < self._max_bytes // 2

    @property
    def is_due(self) -> bool:
        """Whether the next file should begin."""
        return not self._has_failed and (self._file is None or self._num_bytes > self._max_bytes // 4)

    def begin(self) -> None:
        """Begin the next file, and remove those that are too old. Raises OSError if there can be none."""
        self.close()
        numbers = self._numbers()
        number = max(numbers, default=-1) + 1
        self._file, self._num_bytes = self._named(number).open("xb"), 0
        for old in numbers:
            if old <= number - NUM_FILES:
                self._named(old).unlink(missing_ok=True)

    def begin_next(self) -> bool:
        """`begin`; if there can be no next file, end the recording and return False."""
        try:
            self.begin()
        except OSError as error:
            self._fail(error)
        return self.is_open

    def _fail(self, error: OSError) -> None:
        logger.warning("the recording %s ends, because it cannot be written: %s", self._path, error)
        self._has_failed = True

    def _named(self, number: int) -> Path:
        return self._path if not number else self._path.with_name(f"{self._path.name}.{number}")

    def _numbers(self) -> list[int]:
        """Return the numbers of the files that are there."""
        ends = [path.name.removeprefix(self._path.name) for path in self._path.parent.glob(f"{self._path.name}*")]
        return sorted(int(end[1:] or 0) for end in ends if end == "" or (end[0] == "." and end[1:].isdecimal()))

    def write(self, op: str, **values: Any) -> None:
        """Append a line, or the last one if the file is full. Do nothing if no file is open."""
        if self._file is None:
            return
        line = msgspec.json.encode({"op": op, "at": self._clock.now(), **values}) + b"\n"
        self._num_bytes += len(line)
        is_full = self._num_bytes > self._max_bytes
        try:
            self._file.write(b'{"op":"full"}\n' if is_full else line)
            self._file.flush()
        except OSError as error:  # the engine goes on
            self._fail(error)
        if is_full or self._has_failed:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:
                self._fail(error)


def open_files(path: str, clock: Clock) -> RecordingFiles:
    """Return the files of a recording, of which the first has begun. Raises ConfigError if it cannot be written."""
    files = RecordingFiles(Path(path), clock)
    try:
        files.begin()
    except OSError as error:
        raise ConfigError(f"record={path!r} cannot be written ({error}); name a file in a folder that is") from error
    return files
