"""Log lines of all processes of a server: one per event, with time, level and process, on standard error."""

import json
import logging
import sys
import time
from typing import Any

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
FIELDS = "fields"
"""Attribute of a log record with its fields for machines: `logger.info(text, extra={FIELDS: {...}})`."""


def configure_logging(process: str, level: str | int = "info", form: str = "text") -> None:
    """Write the log of this process to standard error.

    process: what its lines call it.   level: in LEVELS, or a number of `logging`, of pagoda's own lines; of libraries
        only warnings are shown.
    form: in FORMATS.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if form == "json" else TextLines(process))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("pagoda").setLevel(level.upper() if isinstance(level, str) else level)
    logging.captureWarnings(True)


class TextLines(logging.Formatter):
    """`2026-11-24 12:00:00.000 INFO api[17] message`; a traceback follows on lines of its own, which are indented.

    So callers cannot write lines, not even in the text of an exception, nor control a terminal.
    """

    def __init__(self, process: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)s {process}[%(process)d] %(message)s", "%Y-%m-%d %H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {_printable(line)}" for line in super().formatException(ei).splitlines())


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class JsonLines(logging.Formatter):
    """An object per line: time (UTC), level, process, pid, logger, message, the record's fields, traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
