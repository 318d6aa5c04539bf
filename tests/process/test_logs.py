"""Lines of the log: one per event, as text or JSON."""

import json
import logging
import re
import sys

import pytest

from pagoda.process.logs import FIELDS, JsonLines, TextLines


def record(message: str, *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("pagoda.server", logging.WARNING, __file__, 1, message, args, None)
    setattr(made, FIELDS, fields)
    return made


def test_a_line_of_text_has_time_level_and_process() -> None:
    line = TextLines("api").format(record("%d ends", 3))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} WARNING api\[\d+\] 3 ends", line)


def test_callers_cannot_write_lines_of_their_own() -> None:
    for form in (TextLines("api"), JsonLines("api")):
        assert len(form.format(record("path %s", "/x\r\n2026-01-01\x85INFO\u2028api[1] forged")).splitlines()) == 1


def test_a_traceback_in_text_has_no_lines_that_look_like_those_of_the_log() -> None:
    made = record("failed")
    with pytest.raises(ValueError, match="x") as caught:
        raise ValueError("x\n2026-01-01 00:00:00.000 INFO api[1] forged\x1b[2J\r2026")
    made.exc_info = (caught.type, caught.value, caught.tb)
    first, *lines = TextLines("api").format(made).splitlines()
    assert first.endswith("failed")
    assert all(line.startswith("  ") and line.isprintable() for line in lines)
    assert "  2026-01-01 00:00:00.000 INFO api[1] forged\\x1b[2J" in lines


def test_a_line_of_json_has_the_fields_of_its_event() -> None:
    line = json.loads(JsonLines("engine").format(record("served %s", "ü", tokens=5)))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert (line["level"], line["process"], line["logger"]) == ("warning", "engine", "pagoda.server")
    assert (line["message"], line["tokens"]) == ("served ü", 5)


def test_a_traceback_is_a_field_of_its_line() -> None:
    made = record("failed")
    with pytest.raises(ValueError, match="cause") as caught:
        raise ValueError("cause")
    made.exc_info = (caught.type, caught.value, caught.tb) if sys.version_info else None
    text = JsonLines("api").format(made)
    assert len(text.splitlines()) == 1
    assert "ValueError: cause" in json.loads(text)["traceback"]
