"""A transcription as plain text, subtitles (srt, vtt) or JSON."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pagoda.base.outputs import TranscriptionOutput


def as_text(output: TranscriptionOutput) -> str:
    """Return the text, one line per segment."""
    lines = [segment.text.strip() for segment in output.segments]
    return "".join(f"{line}\n" for line in lines if line)


def as_srt(output: TranscriptionOutput) -> str:
    """Return SubRip subtitles."""
    entries = [
        f"{number}\n{_clock(segment.start, ',')} --> {_clock(segment.end, ',')}\n{_line(segment.text)}\n"
        for number, segment in enumerate(output.segments, 1)
    ]
    return "\n".join(entries)


def as_vtt(output: TranscriptionOutput) -> str:
    """Return WebVTT subtitles."""
    entries = [
        f"{_clock(segment.start, '.')} --> {_clock(segment.end, '.')}\n{_line(segment.text)}\n"
        for segment in output.segments
    ]
    return "\n".join(["WEBVTT\n", *entries])


def as_json(output: TranscriptionOutput) -> str:
    """Return everything, as the verbose_json of OpenAI's API, with the file's name."""
    return msgspec.json.format(msgspec.json.encode(as_object(output)), indent=2).decode() + "\n"


def as_object(output: TranscriptionOutput) -> dict[str, Any]:
    """Return the fields as JSON values. Times are rounded to hundredths of a second."""
    found = dataclasses.asdict(output)
    if output.words is None:
        del found["words"]
    for timed in [*found["segments"], *found.get("words", ())]:
        timed |= {name: round(timed[name], 2) for name in ("start", "end")}
    return found


FORMATS: Mapping[str, Callable[[TranscriptionOutput], str]] = {
    "txt": as_text,
    "srt": as_srt,
    "vtt": as_vtt,
    "json": as_json,
}


def _clock(seconds: float, point: str) -> str:
    """Return hours, minutes, seconds and milliseconds."""
    ms = max(0, round(seconds * 1000))
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"


def _line(text: str) -> str:
    """Return a text that cannot end its entry early, nor look like another's times."""
    return " ".join(text.replace("-->", "->").split())
