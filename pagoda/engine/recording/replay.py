"""Replay a recording, and find where the scheduler of this version decides otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from pagoda.base.errors import PagodaError
from pagoda.engine.recording.format import RecordedSettings, read_recording
from pagoda.engine.recording.player import Player


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


def replay(path: Path, changed: Mapping[str, object] | None = None) -> Replay:
    """Run a recording again, up to the first difference. changed: options of the scheduler to set otherwise.

    Raises ConfigError for a file that cannot be replayed.
    """
    lines, cut = read_recording(path)
    settings = dict(lines[0]["settings"])
    settings["options"] = {**settings["options"], **(changed or {})}
    player = Player(
        msgspec.convert(settings, RecordedSettings, strict=False), lines, with_tokens=lines[0]["with_tokens"]
    )
    for number, line in enumerate(lines[1:], 2):
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


def _difference(number: int, player: Player, recorded: list[Any], replayed: list[Any]) -> Difference:
    """Name the first entry of a call that differs: an event if one does, else the counts of the step."""
    differing = [pair for pair in zip_longest(recorded, replayed, fillvalue="nothing") if pair[0] != pair[1]]
    mine, theirs = differing[min(1, len(differing) - 1)]  # the counts of a step come first, and say less
    return Difference(number, player.num_steps, str(mine), str(theirs))
