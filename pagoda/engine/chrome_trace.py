"""ChromeTrace: what an engine does, in the trace format of Chrome, which Perfetto shows.

One track has the steps of each replica, each request has one with what it does: waits, and for what, or runs. An arrow
goes from a request that was preempted to the one that it made room for. Times are microseconds since the beginning.
Traces of several engines that began together can be joined to one.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagoda.core.events import (
    Admitted,
    ClientEvent,
    DraftsVerified,
    Encoded,
    Ended,
    Failed,
    FirstToken,
    Held,
    Limited,
    Loaded,
    Pinned,
    Preempted,
    Queued,
    Routed,
    Swapped,
)
from pagoda.core.request import Reason
from pagoda.engine.step_strip import StepNote

MAX_ENTRIES = 200_000

Entry = dict[str, Any]


@dataclass(slots=True)
class _Track:
    """A request.   phase: what it does, since `since_us`; "": nothing any more, or not known."""

    tid: int
    phase: str
    since_us: float


class ChromeTrace:
    """A trace that begins now, of events and steps as they are reported.

    began_s: on the engine's clock.   number, name: of the engine, of several whose traces are joined.
    At most MAX_ENTRIES; what comes later is counted and left out, as are unreported steps.
    """

    def __init__(self, began_s: float, number: int = 0, name: str = "") -> None:
        self._began_s = began_s
        self._steps, self._requests = 2 * number + 1, 2 * number + 2  # "processes" of the trace
        self._first_arrow = number * MAX_ENTRIES
        self._entries: list[Entry] = []
        self._tracks: dict[tuple[int, int], _Track] = {}
        self._num_arrows = 0
        self._num_left_out = 0
        self._last_numbers: dict[int, int] = {}  # by replica
        of = f" of {name}" if name else ""
        self._name("process_name", self._steps, 0, f"engine{of}")
        self._name("process_name", self._requests, 0, f"requests{of}")

    def begin_with(self, client: int, handle: int, name: str, last: ClientEvent | None) -> None:
        """Add a request that is there already.   last: what happened to it last, None if the engine has not seen it."""
        phase = "waits: the engine to see it" if last is None else _phase_since(last) or "runs"
        self._track(client, handle, name, phase)

    def add_step(self, note: StepNote) -> None:
        """Add a step that has ended. One that ended before the trace began is ignored."""
        if note.ended_s <= self._began_s:
            return
        of_replica = f" of replica {note.replica}" if note.replica else ""
        if last := self._last_numbers.get(note.replica, 0):  # with what was not noted, or not read in time
            self._num_left_out += max(0, note.number - last - 1)
        else:
            self._name("thread_name", self._steps, note.replica + 1, f"steps{of_replica}")
        self._last_numbers[note.replica] = note.number
        begin_us = self._us(note.began_s)
        tokens = {"prompt": note.num_prompt_tokens, "sampled": note.num_sampled, "drafted": note.num_drafted}
        size = {**tokens, "preempted": note.num_preempted}
        self._add(
            "X",
            f"step {note.step}",
            self._steps,
            note.replica + 1,
            begin_us,
            dur=round(self._us(note.ended_s) - begin_us, 3),
            args=size,
        )
        self._add("C", f"tokens of steps{of_replica}", self._steps, 0, begin_us, args=tokens)

    def add(self, event: ClientEvent) -> None:
        """Add an event. One from before the trace began, which arrives late, only changes what a request does."""
        if isinstance(event, DraftsVerified):  # of many requests: a counter
            counts = {"drafted": sum(event.num_drafted), "accepted": sum(event.num_accepted)}
            self._add("C", "drafts", self._steps, 0, self._us(event.time_s), args=counts)
            return
        now_us = self._us(event.time_s)
        label = event.request_id if isinstance(event, Queued) else f"request {event.handle}"
        track = self._track(event.client, event.handle, label, "")
        if (phase := _phase_since(event)) is not None:
            self._turn(track, phase, now_us)
        match event:
            case Admitted():
                cached = {"tokens": event.num_tokens, "cached": event.num_cached or 0, "blocks": event.num_blocks}
                self._mark(track, "admitted", now_us, **cached)
            case Preempted():
                self._mark(track, f"preempted ({event.mode})", now_us, lost_tokens=event.lost_tokens)
                self._arrow(track, event, now_us)
            case Ended():
                how = event.status.finish_reason or event.status.name
                self._mark(track, f"sequence {event.sequence} ended: {how}", now_us)
                if event.is_last:
                    self._turn(track, "", now_us)
            case Limited():
                self._mark(track, f"limited: {event.reason.value}", now_us)
            case Swapped():
                self._mark(track, "swapped out" if event.to_host else "swapped in", now_us, blocks=event.num_blocks)
            case Loaded():
                self._mark(track, "loaded from a tier", now_us, tokens=event.num_loaded, of=event.num_tokens)
            case FirstToken():
                self._mark(track, "first token", now_us)
            case Failed():
                self._mark(track, "a row failed", now_us)
            case Routed():
                self._mark(track, f"sent to replica {event.replica}: {event.because}", now_us)
            case Queued() | Held():
                pass  # a phase, without a mark
            case Encoded() | Pinned():
                pass  # small, and many

    def written(self, now_s: float) -> dict[str, Any]:
        """Return the trace up to now, for JSON. Call it once, at the end."""
        for track in self._tracks.values():
            self._turn(track, "", self._us(now_s))
        return {
            "traceEvents": self._entries,
            "displayTimeUnit": "ms",
            "otherData": {"left_out": self._num_left_out},
        }

    def _us(self, time_s: float) -> float:
        return round(max(0.0, time_s - self._began_s) * 1e6, 3)

    def _add(self, kind: str, name: str, pid: int, tid: int, ts: float, **more: Any) -> None:
        if len(self._entries) < MAX_ENTRIES:
            self._entries.append({"ph": kind, "name": name, "pid": pid, "tid": tid, "ts": ts, **more})
        else:
            self._num_left_out += 1

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self._add("M", kind, pid, tid, 0, args={"name": name})

    def _track(self, client: int, handle: int, name: str, phase: str) -> _Track:
        """Return the track of a request; one that is new does `phase` since the trace began."""
        track = self._tracks.get((client, handle))
        if track is None:
            track = self._tracks[client, handle] = _Track(len(self._tracks) + 1, phase, 0.0)
            self._name("thread_name", self._requests, track.tid, name)
        return track

    def _turn(self, track: _Track, phase: str, now_us: float) -> None:
        """End what the request does, and begin something else."""
        if track.phase and now_us > track.since_us:
            self._add(
                "X", track.phase, self._requests, track.tid, track.since_us, dur=round(now_us - track.since_us, 3)
            )
        track.phase, track.since_us = phase, now_us

    def _mark(self, track: _Track, name: str, now_us: float, **args: int) -> None:
        if now_us > 0:
            self._add("i", name, self._requests, track.tid, now_us, s="t", args=args)

    def _arrow(self, victim: _Track, event: Preempted, now_us: float) -> None:
        if now_us <= 0 or event.for_client is None or event.for_handle is None:
            return
        cause = self._tracks.get((event.for_client, event.for_handle))
        if cause is None or cause is victim or not cause.phase:
            return
        self._num_arrows += 1
        arrow = {"cat": "preempted", "id": self._first_arrow + self._num_arrows}
        for kind, track, more in (("s", victim, {}), ("f", cause, {"bp": "e"})):
            self._add(kind, "makes room for", self._requests, track.tid, now_us, **arrow, **more)


def _phase_since(event: ClientEvent) -> str | None:
    """Return what a request does from an event on; None if the event does not say so."""
    match event:
        case Queued():
            return f"waits: {Reason.TURN.value}"
        case Held():
            return f"waits: {event.reason.value}"
        case Admitted():
            return "runs"
        case Preempted():
            return "waits: preempted"
        case _:
            return None


def joined(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one trace of several that are `written`, of different numbers."""
    return {
        **traces[0],
        "traceEvents": list(itertools.chain.from_iterable(one["traceEvents"] for one in traces)),
        "otherData": {"left_out": sum(one["otherData"]["left_out"] for one in traces)},
    }
