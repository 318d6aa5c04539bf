"""Replay a recording, and find where the scheduler of this version, or a model, does otherwise."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from pagoda.base.errors import ConfigError, PagodaError
from pagoda.engine.executor import Executor
from pagoda.engine.recording.compare import MedianTimes, SlowStep, StepComparison, TokenDifference
from pagoda.engine.recording.format import Line, RecordedSettings, read_recording
from pagoda.engine.recording.player import Player
from pagoda.engine.recording.selection import Selection

StartModel = Callable[[RecordedSettings, Mapping[str, Any]], tuple[Executor, int]]
"""Starts an executor for a recording, of whose engine these are the settings; returns the size of its vocabulary, too.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call after which both differ.   line: of the file, from 1.   step: planned last."""

    line: int
    step: int
    recorded: str
    replayed: str


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay has found.

    num_steps: planned.   cut: why the recording is not of a whole run; "" if all its requests have ended.
    token, times, slow, num_tokens: of the model that computed the steps; none without one.
    """

    num_requests: int
    num_steps: int
    cut: str
    difference: Difference | None
    num_tokens: int = 0
    token: TokenDifference | None = None
    times: list[MedianTimes] = field(default_factory=list[MedianTimes])
    slow: SlowStep | None = None


def replay(
    path: Path,
    changed: Mapping[str, object] | None = None,
    selection: Selection | None = None,
    *,
    speed: float = 0.0,
    start_model: StartModel | None = None,
    factor: float = 2.0,
) -> Replay:
    """Run a recording again, up to the first decision that differs.

    changed: options of the scheduler to set otherwise.   selection: what is compared.
    speed: how many times as fast as recorded the calls are made; 0: as fast as possible.
    start_model: compute the steps again, too.   factor: by which a step's time may differ.
    Raises ConfigError for a file that cannot be replayed.
    """
    lines, cut = read_recording(path)
    head, selection = lines[0], selection or Selection()
    selection.begin_s = head["at"]
    options = {**head["settings"]["options"], **(changed or {})}
    settings = msgspec.convert({**head["settings"], "options": options}, RecordedSettings, strict=False)
    if start_model is None:
        return _run(lines, cut, settings, selection, speed, None)
    executor, vocab_size = start_model(settings, head["engine"])
    try:
        if not settings.options.async_scheduling:  # a model that samples otherwise goes on as recorded
            settings = replace(settings, options=replace(settings.options, has_followers=True))
        comparison = StepComparison(executor, vocab_size, selection, with_tokens=head["with_tokens"], factor=factor)
        found = _run(lines, cut, settings, selection, speed, comparison)
    finally:
        executor.shutdown()
    return replace(
        found,
        num_tokens=comparison.num_tokens,
        token=comparison.token,
        times=comparison.times(),
        slow=comparison.slow,
    )


def _run(
    lines: list[Line],
    cut: str,
    settings: RecordedSettings,
    selection: Selection,
    speed: float,
    comparison: StepComparison | None,
) -> Replay:
    player = Player(settings, lines, with_tokens=lines[0]["with_tokens"], comparison=comparison)
    difference: Difference | None = None
    began_s = time.monotonic()
    for number, line in enumerate(lines[1:], 2):
        if speed:
            time.sleep(max(0.0, began_s + (line["at"] - selection.begin_s) / speed - time.monotonic()))
        if line["op"] in ("add", "resume"):
            selection.add(line)
        recorded = [*([line["digest"]] if "digest" in line else []), *line["events"]]
        try:
            replayed = player.play(line)
        except ConfigError:
            raise
        except (PagodaError, LookupError, ValueError) as error:
            text = f"it cannot go on: {type(error).__name__}: {error}"
            difference = Difference(number, player.num_steps, str(recorded), text)
            break
        if not selection.has(line, player.num_steps):
            continue
        recorded, replayed = selection.of_call(recorded), selection.of_call(replayed)
        if replayed != recorded:
            difference = _difference(number, player.num_steps, recorded, replayed)
            break
    if not cut and difference is None and player.num_unfinished:
        cut = f"{player.num_unfinished} requests had not ended: the engine died, or still ran"
    return Replay(player.num_requests, player.num_steps, cut, difference)


def _difference(number: int, step: int, recorded: list[Any], replayed: list[Any]) -> Difference:
    """Name the first entry of a call that differs: an event if one does, else the counts of the step."""
    differing = [pair for pair in zip_longest(recorded, replayed, fillvalue="nothing") if pair[0] != pair[1]]
    mine, theirs = differing[min(1, len(differing) - 1)]  # the counts of a step come first, and say less
    return Difference(number, step, str(mine), str(theirs))
