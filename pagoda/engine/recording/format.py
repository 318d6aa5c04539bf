"""The format of a recording: one JSON object per line, one line per call of a scheduler.

    {"op": "begin", ...}    the settings that the scheduler was made with, and those of the engine
    {"op": "add", ...}      a request: its parameters and its prompt, as made-up tokens
    {"op": "resume", ...}   one that was unfinished when the file before was full: "progress" is what it had come to
    {"op": "finish" | "finish_sequence" | "reset", ...}
    {"op": "schedule", "step", "digest", "events", "prepared"}    what was decided, and what was ready by then
    {"op": "update" | "fail", ...}    what the step gave: tokens as made up, seconds, rows that failed
    {"op": "full"}          the file has its largest size: nothing follows

Each has "at", seconds on the engine's clock. Steps count from 1 in each file. Ids of requests are r1, r2, …
"""

import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pagoda.base.config import CacheConfig
from pagoda.base.errors import ConfigError
from pagoda.core.events import Event
from pagoda.core.kv import KVGroupSpec
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import SchedulerOutput

VERSION = 4
Line = dict[str, Any]
_UNSAID = ("time_s", "request_id", "message", "stop_reason")
"""Fields of events that differ between runs, or name what callers sent."""


def described(event: Event, num_before: int = 0) -> list[Any]:
    """Return what a run and its replay must agree on, as JSON has it.   num_before: steps before the file."""
    fields = {name for kind in type(event).__mro__ for name in getattr(kind, "__slots__", ())}
    values = {name: getattr(event, name) for name in sorted(fields) if name not in _UNSAID}
    values["step"] -= num_before
    return [type(event).__name__, msgspec.json.decode(msgspec.json.encode(values, enc_hook=str))]


def digest_of(output: SchedulerOutput) -> list[int]:
    """Return rows, tokens, and a checksum of what a step computes in which blocks."""
    digest = 0
    tables = [table for init in output.admitted for table in init.block_ids]
    delta, moves = output.block_delta, (output.swap_out, output.swap_in, output.copies)
    arrays = (output.rows, output.start, output.num_new, output.sample_rows, delta.block_ids, *moves, *tables)
    for array in arrays:
        digest = zlib.crc32(np.ascontiguousarray(array).tobytes(), digest)
    return [len(output.rows), output.total_num_scheduled_tokens, digest]


@dataclass(frozen=True, slots=True)
class RecordedSettings:
    """What a scheduler is made with. The seed of the prefix cache's hashes is left out: it may be a secret."""

    options: SchedulerOptions
    cache: CacheConfig
    kv_groups: tuple[KVGroupSpec, ...]
    num_blocks: int
    max_model_len: int
    num_host_blocks: int = 0
    encoder_decoder: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", replace(self.options, prefix_hash_seed=0))


def read_recording(path: Path) -> tuple[list[Line], str]:
    """Return the lines, and where the file is cut ("" if it is not). Raises ConfigError for another kind of file."""
    lines: list[Line] = []
    cut = ""
    for number, data in enumerate(path.read_bytes().splitlines(), 1):
        try:
            lines.append(msgspec.json.decode(data, type=dict[str, Any]))
        except msgspec.DecodeError:
            cut = f"the file is cut in line {number}"
            break
    if not lines or lines[0].get("op") != "begin":
        raise ConfigError(f"{path} is not a recording: its first line has no settings; make one with --record FILE")
    if lines[0]["version"] != VERSION:
        raise ConfigError(f"{path} has version {lines[0]['version']} of the format; this is a reader of {VERSION}")
    if lines[-1]["op"] == "full":
        cut = "the file had its largest size"
        lines.pop()
    return lines, cut
