"""Suspects: whatever kills engines and when, every request ends, and only those that kill engines are rejected."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.core.events import Ended, Events
from pagoda.core.request import Request, RequestKey, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine.clients.journal import MAX_DEATHS, Journal, JournalEntry, Suspects
from pagoda.engine.flight_recorder import FlightRecord, FlightRecorder, packed_key

NEVER = 99


@dataclass(frozen=True)
class Kind:
    """A request that emits `length` tokens per sequence, unless it kills each engine in its step `fatal_step`."""

    length: int = 3
    fatal_step: int = NEVER  # counted in the engine that it is in, from 0
    num_seqs: int = 1


class Server:
    """A journal, the suspects, and engine processes that die; sends requests as ProcessClient does."""

    def __init__(self) -> None:
        self.journal = Journal()
        self.suspects = Suspects(self.journal)
        self.kinds: dict[str, Kind] = {}
        self.ends: dict[str, str] = {}
        self.num_deaths = 0
        self._num_processes = 0
        self._start()

    def _start(self) -> None:
        self.engine: dict[str, int] = {}  # steps of each request in this engine
        self.num_steps = 0
        self.last_batch: list[str] = []
        self._num_processes += 1
        for entry in self.suspects.begin(self._num_processes):
            self._enter(entry)
        self._send_next()

    def _enter(self, entry: JournalEntry) -> None:
        name = entry.request.request_id
        assert name not in self.engine, "sent twice"
        self.suspects.sent(entry)
        self.engine[name] = 0

    def _send_next(self) -> None:
        while entries := self.suspects.next():
            for entry in entries:
                self._enter(entry)

    def add(self, kind: Kind) -> None:
        name = f"request {len(self.kinds)}"
        self.kinds[name] = kind
        params = SamplingParams(n=kind.num_seqs, max_tokens=kind.length)
        entry = self.journal.add(
            JournalEntry.of(Request(name, np.arange(4, dtype=np.int32), params, handle=len(self.kinds)))
        )
        if not self.suspects.is_probing:
            self._enter(entry)

    def key(self, name: str) -> RequestKey:
        return (0, list(self.kinds).index(name) + 1)

    def abort(self, name: str) -> None:
        self.journal.close(self.key(name))
        self.engine.pop(name, None)
        self.ends[name] = "aborted"
        self._send_next()

    def step(self, batch: list[str]) -> None:
        """Run a step with some of the requests in the engine."""
        assert batch, "no request can run"
        self.last_batch = batch
        self.num_steps += 1
        killers = [self.kinds[name] for name in batch if self.engine[name] == self.kinds[name].fatal_step]
        if killers:
            self.die()
            return
        for name in batch:
            self.engine[name] += 1
            self._emit(name)
        if self.suspects.is_probing:
            self._send_next()

    def _emit(self, name: str) -> None:
        """Emit one token of each sequence of a request; finish it after the last one."""
        entry = self.journal.get(self.key(name))
        assert entry is not None
        handle, count = entry.request.handle, entry.request.num_seqs
        ends = len(entry.tokens[0]) + 1 == self.kinds[name].length
        done = RequestStatus.FINISHED_LENGTH_CAPPED
        outputs = EngineCoreOutputs(
            handles=np.full(count, handle, np.int64),
            sequences=np.arange(count, dtype=np.int32),
            counts=np.ones(count, np.int32),
            token_ids=np.ones(count, np.int32),
            events=Events(Ended(1, 0.0, 0, handle, name, sequence, done) for sequence in range(count)),
        )
        self.journal.record({0: outputs if ends else dataclasses.replace(outputs, events=Events())})
        if ends:
            del self.engine[name]
            self.ends[name] = "answered"

    def die(self, killed_from_outside: bool = False, in_step: bool = True) -> None:
        """End the engine during a step, or after its last one."""
        keys = frozenset(packed_key(self.key(name)) for name in self.last_batch)
        self.num_deaths += 1
        flight = FlightRecord(self.num_steps, self.num_steps - (in_step and self.num_steps > 0), keys)
        for entry in self.suspects.assign_blame(flight, killed_from_outside):
            self.ends[entry.request.request_id] = "rejected"
        self._start()

    def run_to_the_end(self) -> None:
        while len(self.journal):
            self.step(list(self.engine))
            assert self.num_deaths < 500, "engines die for ever"


innocents = st.builds(Kind, length=st.integers(1, 6), num_seqs=st.integers(1, 3))
killers = st.builds(Kind, length=st.just(9), fatal_step=st.integers(0, 1), num_seqs=st.integers(1, 3))
late_killers = st.builds(Kind, length=st.just(9), fatal_step=st.integers(2, 6))


def play(server: Server, data: st.DataObject, kinds: st.SearchStrategy[Kind], num_outside_kills: int) -> None:
    """Play a random schedule: arrivals, steps with some of the requests, aborts, and kills from outside."""
    for _ in range(data.draw(st.integers(1, 40), "events")):
        event = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "step", "abort", "kill"]))
        if event == "add":
            server.add(data.draw(kinds))
        elif event == "step" and server.engine:
            server.step(data.draw(st.lists(st.sampled_from(list(server.engine)), min_size=1, unique=True)))
        elif event == "abort" and len(server.journal) > 3:
            server.abort(data.draw(st.sampled_from([entry.request.request_id for entry in server.journal])))
        elif event == "kill" and num_outside_kills:
            num_outside_kills -= 1
            server.die(killed_from_outside=True, in_step=data.draw(st.booleans()))
    server.run_to_the_end()
    assert set(server.ends) == set(server.kinds)


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_only_the_requests_that_kill_engines_are_rejected(data: st.DataObject) -> None:
    server = Server()
    play(server, data, innocents | killers, num_outside_kills=1)
    for name, kind in server.kinds.items():
        expected = "answered" if kind.fatal_step == NEVER else "rejected"
        assert server.ends[name] in (expected, "aborted")


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_every_request_ends_after_a_bounded_number_of_deaths(data: st.DataObject) -> None:
    """With requests that kill engines after they have been cleared, which may be taken for others."""
    server = Server()
    num_outside_kills = 6
    play(server, data, innocents | killers | late_killers, num_outside_kills)
    assert server.num_deaths <= MAX_DEATHS * len(server.kinds) + num_outside_kills


def test_a_killer_is_rejected_after_two_deaths_alone_and_three_in_company() -> None:
    alone = Server()
    alone.add(Kind(length=9, fatal_step=1))
    alone.run_to_the_end()
    assert (alone.num_deaths, set(alone.ends.values())) == (2, {"rejected"})

    busy = Server()
    for _ in range(3):
        busy.add(Kind(length=50))
    busy.add(Kind(length=9, fatal_step=1))
    busy.run_to_the_end()
    assert (busy.num_deaths, list(busy.ends.values()).count("rejected")) == (3, 1)


def test_kills_from_outside_blame_no_request_however_many_there_are() -> None:
    server = Server()
    for _ in range(3):
        server.add(Kind(length=2 * MAX_DEATHS))
    for _ in range(2 * MAX_DEATHS - 1):
        server.step(list(server.engine))
        server.die(killed_from_outside=True)
        assert not server.suspects.is_probing
        assert len(server.engine) == 3
    server.run_to_the_end()
    assert set(server.ends.values()) == {"answered"}


def test_suspects_are_replayed_one_at_a_time_and_others_wait_until_all_are_cleared() -> None:
    server = Server()
    for _ in range(3):
        server.add(Kind(length=9))
    server.add(Kind(length=9))
    server.step(["request 0", "request 1"])
    server.die()
    server.add(Kind(length=9))
    assert list(server.engine) == ["request 0"]
    server.step(["request 0"])
    assert list(server.engine) == ["request 0"]
    server.step(["request 0"])
    assert list(server.engine) == ["request 0", "request 1"]
    server.step(["request 0", "request 1"])
    assert len(server.engine) == 2
    server.step(["request 1"])
    assert len(server.engine) == 5
    server.run_to_the_end()
    assert set(server.ends.values()) == {"answered"}


def test_a_rejected_request_explains_the_deaths_of_others() -> None:
    """A long request is next to more killers than it may take part in deaths."""
    server = Server()
    server.add(Kind(length=100))
    for _ in range(MAX_DEATHS + 1):
        server.add(Kind(length=9, fatal_step=1))
        while len(server.journal) > 1:
            server.step(list(server.engine))
    server.run_to_the_end()
    assert server.ends.pop("request 0") == "answered"
    assert set(server.ends.values()) == {"rejected"}


def test_an_id_used_again_is_not_sent_twice() -> None:
    server = Server()
    for _ in range(2):
        server.add(Kind())
    server.step(list(server.engine))
    server.die()
    second = server.journal.close(server.key("request 1"))
    assert second is not None
    server.journal.add(JournalEntry.of(second.request))
    server._enter(server.journal.get(server.key("request 1")))  # type: ignore[arg-type]
    server.run_to_the_end()
    assert set(server.ends.values()) == {"answered"}


def test_a_request_is_not_blamed_for_an_earlier_one_with_the_same_id() -> None:
    """Its client left during the step that killed the engine, and tried again."""
    server = Server()
    for _ in range(2):
        server.add(Kind(length=3))
    server.step(list(server.engine))
    first = server.journal.close(server.key("request 0"))
    assert first is not None
    server.suspects.sent(server.journal.add(JournalEntry.of(dataclasses.replace(first.request, handle=9))))
    flight = FlightRecord(2, 1, frozenset((packed_key((0, 1)), packed_key((0, 2)))))
    assert server.suspects.assign_blame(flight, killed_from_outside=False) == []
    assert [entry.request.key for entry in server.journal if entry.is_suspect] == [(0, 2)]


def test_with_two_stages_the_request_in_the_younger_step_is_found(tmp_path: Path) -> None:
    """Both steps ran when the engine died: that of the other requests is older."""
    server = Server()
    for kind in (Kind(), Kind(), Kind(fatal_step=0)):
        server.add(kind)
    recorder = FlightRecorder(tmp_path / "flight", 8, 2, 2, create=True)
    for names in (["request 0", "request 1"], ["request 2"]):
        recorder.begin_step(np.array([packed_key(server.key(name)) for name in names]))
    assert server.suspects.assign_blame(recorder.read(), killed_from_outside=False) == []
    recorder.close()
    assert [entry.request.request_id for entry in server.journal if entry.is_suspect] == list(server.kinds)
    server._start()
    server.run_to_the_end()
    assert server.ends == {"request 0": "answered", "request 1": "answered", "request 2": "rejected"}
    assert server.num_deaths == 2, "it was probed after others, then alone"


def test_a_beam_search_is_cleared_by_its_steps_since_it_emits_nothing_before_its_end() -> None:
    journal = Journal()
    suspects = Suspects(journal)
    params = SamplingParams(n=2, max_tokens=50, beam_search=BeamSearchOptions())
    for handle, name in enumerate(("beams", "other"), 1):
        entry = journal.add(JournalEntry.of(Request(name, np.arange(6, dtype=np.int32), params, handle=handle)))
        suspects.begin(1)
        suspects.sent(entry)
    assert suspects.assign_blame(FlightRecord(0, 0, frozenset()), killed_from_outside=False) == []
    assert [entry.request.request_id for entry in suspects.begin(2)] == ["beams"]
    for num_tokens in (4, 2, 2):
        suspects.note_computed(num_tokens)
        assert suspects.next() == []
    suspects.note_computed(2)
    assert [entry.request.request_id for entry in suspects.next()] == ["other"]
