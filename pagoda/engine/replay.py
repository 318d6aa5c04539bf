"""Replay a recording: make its calls on a scheduler of this version, and find where that decides otherwise."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pagoda.base.clock import VirtualClock
from pagoda.base.errors import ConfigError, PagodaError
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import LoraRef, MediaItem, Request, RequestStatus
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.recording import VERSION, RecordedSettings, described, digest_of

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call after which both differ.   line: of the file, from 1.   step: planned last."""

    line: int
    step: int
    recorded: str
    replayed: str


@dataclass(frozen=True, slots=True)
class Replay:
    """num_steps: planned alike.   cut: why the recording is not of a whole run; "" if all its requests have ended."""

    num_requests: int
    num_steps: int
    cut: str
    difference: Difference | None


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
    return lines, cut


def replay(path: Path, changed: Mapping[str, object] | None = None) -> Replay:
    """Run a recording again, up to the first difference. changed: options of the scheduler to set otherwise.

    Raises ConfigError for a file that cannot be replayed.
    """
    lines, cut = read_recording(path)
    settings = dict(lines[0]["settings"])
    settings["options"] = {**settings["options"], **(changed or {})}
    player = _Player(msgspec.convert(settings, RecordedSettings, strict=False), lines)
    for number, line in enumerate(lines[1:], 2):
        if line["op"] == "full":
            break
        try:
            replayed = player.play(line)
        except (PagodaError, LookupError, ValueError) as error:
            replayed = [f"{type(error).__name__}: {error}"]
        recorded = [*([line["digest"]] if "digest" in line else []), *line["events"]]
        if replayed != recorded:
            return Replay(player.num_requests, player.num_steps, cut, _difference(number, player, recorded, replayed))
    if not cut and player.num_unfinished:
        cut = f"{player.num_unfinished} requests had not ended: the engine died, or still ran"
    return Replay(player.num_requests, player.num_steps, cut, None)


def _difference(number: int, player: "_Player", recorded: list[Any], replayed: list[Any]) -> Difference:
    """Name the first entry of a call that differs: an event if one does, else the counts of the step."""
    differing = [pair for pair in zip_longest(recorded, replayed, fillvalue="nothing") if pair[0] != pair[1]]
    mine, theirs = differing[min(1, len(differing) - 1)]  # the counts of a step come first, and say less
    return Difference(number, player.num_steps, str(mine), str(theirs))


class _Player:
    """A scheduler, and what the lines so far said of its requests."""

    def __init__(self, settings: RecordedSettings, lines: list[Line]) -> None:
        self.num_requests = self.num_steps = 0
        self._clock = VirtualClock()
        self._scheduler = Scheduler(
            settings.options,
            settings.cache,
            settings.kv_groups,
            settings.num_blocks,
            settings.max_model_len,
            self._clock,
            num_host_blocks=settings.num_host_blocks,
            encoder_decoder=settings.encoder_decoder,
        )
        self._outputs: dict[int, SchedulerOutput] = {}
        self._events: list[Any] = []
        self._scheduler.subscribe(lambda event: self._events.append(described(event)))
        self._ends: dict[str, set[int]] = defaultdict(set)
        for line in lines:
            for label, token in (line.get("result") or {}).get("ends", ()):
                self._ends[label].add(token)

    @property
    def num_unfinished(self) -> int:
        return sum(self._scheduler.get_request_counts())

    def play(self, line: Line) -> list[Any]:
        """Make the call. Return what it decided, as the recording has it."""
        self._clock.advance(max(line["at"] - self._clock.now(), 0.0))
        before = list[Any]()
        match line["op"]:
            case "add":
                self._scheduler.add_request(self._request(line))
                self.num_requests += 1
            case "finish":
                self._scheduler.finish_requests(line["ids"], RequestStatus[line["status"]])
            case "finish_sequence":
                self._scheduler.finish_sequence(line["id"], line["index"], RequestStatus[line["status"]])
            case "reset":
                self._scheduler.reset_prefix_cache(line["preempt_running"])
            case "schedule":
                output = self._outputs[line["step"]] = self._scheduler.schedule()
                self.num_steps += 1
                before = [digest_of(output)]
            case "update":
                output, result = self._outputs.pop(line["step"]), line["result"]
                self._scheduler.update_from_output(output, result and _result(output, result))
            case "fail":
                self._scheduler.fail_step(self._outputs.pop(line["step"]), "failed when it was recorded")
            case op:
                raise ConfigError(f"a recording of version {VERSION} has no {op!r}")
        taken, self._events[:] = self._events.copy(), []
        return before + taken

    def _request(self, line: Line) -> Request:
        if line["unsupported"]:
            raise ConfigError(f"{line['id']} is a beam search, whose log-probabilities are not recorded")
        sampling = None
        if line["sampling"] is not None:
            sampling = SamplingParams(**line["sampling"], stop_token_ids=tuple(self._ends[f"stop {line['id']}"]))
        embeds = None
        if line["embeds"] is not None:
            count, name = line["embeds"]
            embeds = np.full((count, 1), int(name[:4], 16), np.float32)
        return Request(
            line["id"],
            np.array(line["prompt"], np.int32),
            sampling,
            pooling=None if sampling is not None else PoolingParams(),
            arrival_time_s=line["arrival_time_s"],
            priority=line["priority"],
            client_index=line["client_index"],
            handle=line["handle"],
            eos_token_ids=tuple(self._ends[f"eos {line['id']}"]),
            lora=LoraRef(line["lora"], digest=line["lora"]) if line["lora"] is not None else None,
            cache_salt=line["cache_salt"],
            skip_prefix_read=line["skip_prefix_read"],
            media=tuple(MediaItem(name, offset, length) for name, offset, length in line["media"]),
            encoder_len=line["encoder_len"],
            prior_output=tuple(tuple(tokens) for tokens in line["prior"]),
            prompt_embeds=embeds,
        )


def _result(output: SchedulerOutput, line: Line) -> ModelRunnerOutput:
    tokens: list[list[int]] = line["sampled"]
    if len(tokens) != len(output.sample_rows):
        raise ValueError(f"{len(tokens)} samples were recorded, {len(output.sample_rows)} were planned")
    counts = np.array([len(one) for one in tokens], np.int32)
    sampled = np.full((len(tokens), max(counts.tolist(), default=1) or 1), -1, np.int32)
    for number, one in enumerate(tokens):
        sampled[number, : len(one)] = one
    return ModelRunnerOutput(
        output.step,
        sampled,
        counts,
        pooled=dict.fromkeys(line["pooled"], np.zeros(1, np.float32)),
        failed=dict.fromkeys(line["failed"], "failed when it was recorded"),
        refused=frozenset(line["refused"]),
        duration_s=line["duration_s"],
        swap_s=line["swap_s"],
        drafts={int(row): np.zeros(count, np.int32) for row, count in line["drafts"].items()},
    )
