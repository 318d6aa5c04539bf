"""What docs/howto/why-is-it-slow.md quotes of a recorded run is still what a server says: fields, and words."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import fields

from pagoda.core import events
from pagoda.core.request import AdmitKind, Reason, RequestStatus
from pagoda.engine.chrome_trace import ChromeTrace
from pagoda.metrics.prometheus import REJECTION_REASONS
from pagoda.server.dialects.openai.answers import Timings
from pagoda.server.event_words import in_timeline, in_words
from pagoda.server.prefix_misses import PrefixMiss
from pagoda.server.seen_requests import OtherRequests, RequestList, RequestTimeline, TimelineEntry

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "howto" / "why-is-it-slow.md").read_text()
TEMPLATE = (ROOT / "benchmarks" / "slow_server.txt").read_text()
OF = (1, 0.5, 0, 7)
SAMPLES: list[events.ClientEvent] = [
    events.Queued(*OF, "cmpl-x", 5, 1, 0),
    *(events.Held(*OF, reason, 0, 9, 5) for reason in Reason),
    *(events.Held(*OF, Reason.BLOCKS, 0, 6, 5),),
    *(
        events.Admitted(*OF, kind, tokens, cached, 4, 1, blocks, 3)
        for kind in AdmitKind
        for tokens, cached, blocks in ((1, 0, 1), (5, 4, 2), (5, 0, 1), (5, 0, 2))
    ),
    *(events.Preempted(*OF, 0, handle, mode, 5, 2) for mode in ("recompute", "swap") for handle in (8, 7)),
    *(events.Limited(*OF, 0, reason) for reason in Reason),
    events.FirstToken(*OF, 5),
    events.Ended(*OF, "cmpl-x", 0, RequestStatus.FINISHED_LENGTH_CAPPED),
]


def plain(text: str) -> str:
    """Return a text without its numbers and ids."""
    return re.sub(r"\d+", "N", re.sub(r"\b(chat)?cmpl-[\w-]+", "ID", text))


def quotes() -> list[Any]:
    found: list[Any] = []
    for block in re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        decoder, rest = json.JSONDecoder(), block.strip()
        while rest:
            value, end = decoder.raw_decode(rest)
            found.append(value)
            rest = rest[end:].strip()
    return found


def objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(one)


def test_it_is_its_template_with_quotes_and_answers_ten_questions() -> None:
    assert re.findall(r"^## (\d+)\. .+", PAGE, re.MULTILINE) == [str(number) for number in range(1, 11)]
    assert PAGE.count("**Answer**: ") == 10
    parts = re.split(r"\{\w+\}", TEMPLATE)
    assert len(parts) > 25
    at = 0
    for part in parts:
        assert part in PAGE[at:], f"run benchmarks/slow_server.py again, or add to its template: {part}"
        at = PAGE.index(part, at) + len(part)


def test_its_fields_are_those_of_answers() -> None:
    kinds = (RequestTimeline, PrefixMiss, TimelineEntry, OtherRequests, RequestList, Timings)
    known = {one.encode_name for kind in kinds for one in fields(kind)} | {"error", "message", "type", "param", "code"}
    trace = {"ph", "name", "pid", "tid", "ts", "s", "args", "cat", "id", "bp", "dur", "lost_tokens"}
    reasons = {reason.value for reason in Reason} | {"admission and tokenizing", "the engine to see it", "its turn"}
    for one in (found for quote in quotes() for found in objects(quote)):
        allowed = trace if "ph" in one or one.keys() <= {"name", "lost_tokens"} else known
        assert one.keys() <= allowed or one.keys() <= reasons, one


def test_its_words_are_those_of_events() -> None:
    said = {plain(what) for event in SAMPLES if (what := in_words(event, lambda *_: "cmpl-y")) is not None}
    timeline = [one["what"] for quote in quotes() for one in objects(quote) if "at_ms" in one]
    assert len(timeline) > 30
    ends = {"arrived", "ended: length", "ended: stop", "ended: abort"}
    entries = {plain(what) for event in SAMPLES if (what := in_timeline(event, lambda *_: "cmpl-y")) is not None}
    assert {plain(what) for what in timeline} <= entries | ends
    rows = [one["reason"] for quote in quotes() for one in objects(quote) if one.get("reason")]
    assert len(rows) >= 4
    for reason in rows:
        begin, _, rest = plain(reason).partition("; ")
        assert begin in said | {"waits for its turn in the queue", "abort"}, reason
        assert re.fullmatch(r"|held by .*|prompts that are computed: .*", rest), reason


def test_its_trace_is_what_a_trace_has() -> None:
    trace = ChromeTrace(0.0)
    trace.begin_with(0, 8, "cmpl-y", events.FirstToken(1, 0.0, 0, 8, 5))
    for event in SAMPLES:
        trace.add(event)
    made = [(one["ph"], plain(one["name"])) for one in trace.written(1.0)["traceEvents"]]
    names = {*made, *(("X", plain(f"waits: {reason.value}")) for reason in Reason), ("X", "waits: preempted")}
    quoted = {(one["ph"], plain(one["name"])) for quote in quotes() for one in objects(quote) if "ph" in one}
    assert {kind for kind, _ in quoted} == {"M", "i", "s", "f", "X"}
    assert quoted <= names | {("X", "runs")}


def test_the_metric_that_it_names_is_one() -> None:
    (line,) = re.findall(r'^vllm:admission_rejections_total\{.*reason="(\w+)"\}', PAGE, re.MULTILINE)
    assert line in REJECTION_REASONS
