"""Random schedules with all that a scheduler has are replayed with the same decisions, also from later files."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from pagoda.base.config import CacheConfig
from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.core.kv import KVGroupKind, KVGroupSpec, KVShape
from pagoda.core.request import Pin
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.engine.recording.format import read_recording
from pagoda.engine.recording.recorder import RecordingScheduler
from pagoda.engine.recording.replay import replay
from tests.core.test_properties import CALM, QUICK, PhasedMachine, SchedulerMachine, setting_of
from tests.core.traffic import Setting, Traffic, make_request
from tests.engine.recording.recorded_traffic import propose_drafts, record_traffic

SEEN: set[str] = set()
"""What the recordings so far have had in them."""


class _Traffic(Traffic):
    num_right = 0

    def deliver(self) -> object:
        if self.setting.drafts:
            propose_drafts(self, self.num_right)
        return super().deliver()

    def _check_step(self, output: SchedulerOutput, queue: list[str]) -> None:
        """Requests whose adapter is not ready are overtaken, which the core's own tests do not have."""

    def plan(self, *choose: object) -> SchedulerOutput:
        output = super().plan(*choose)  # type: ignore[arg-type]
        SEEN.update(
            name for name in ("drafts", "encoder_inputs", "forks", "swap_in", "copies") if len(getattr(output, name))
        )
        if len(output.beams.copies):
            SEEN.add("beams")
        return output


class RecordedMachine(SchedulerMachine):
    """The traffic of the core's property tests, recorded; adapters take their time, and there are pauses."""

    @initialize(data=st.data(), slow=st.integers(0, 99), with_tokens=st.booleans())
    def build(self, data: st.DataObject, slow: int, with_tokens: bool) -> None:  # type: ignore[override]
        self.folder = tempfile.TemporaryDirectory()
        self.traffic = _Traffic(data.draw(setting_of(self.mode)))
        path = Path(self.folder.name) / "run"
        record_traffic(
            self.traffic,
            path,
            with_tokens=with_tokens,
            max_bytes=data.draw(st.sampled_from([7_000, 25_000])),
            slow=slow,
        )

    def _offer_drafts(self, right: int) -> None:
        self.traffic.num_right = right  # type: ignore[attr-defined]

    @precondition(lambda self: self.count % 4 == 3)
    @rule()
    def pause(self) -> None:
        while self.traffic.in_flight:
            self.traffic.deliver()
        self.traffic.drain()

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "folder"):
            return
        for path in Path(self.folder.name).iterdir():
            lines, _ = read_recording(path)
            SEEN.update(answer for line in lines if "prepared" in line for _, answer in line["prepared"]["answers"])
            if path.name != "run":
                SEEN.add("later file")
            for line in lines:
                if line["op"] == "resume":
                    SEEN.update(name for name in ("prior", "progress") if line[name])
                    SEEN.update(f"resumes {name}" for name, value in line["progress"].items() if value)
                    SEEN.update(["resumes beams"] if (line["sampling"] or {}).get("beam_search") else [])
            found = replay(path)
            assert found.difference is None, (path.name, found.difference)
            assert found.cut in ("", "the file had its largest size")
        self.folder.cleanup()


class RecordedPhases(RecordedMachine, PhasedMachine):
    """The same where a step is all prompts or all decodes."""


@pytest.mark.parametrize("num_examples", [60, pytest.param(120, marks=pytest.mark.slow)])
def test_random_schedules_are_replayed_without_a_difference(num_examples: int) -> None:
    SEEN.clear()
    for machine in (RecordedMachine, RecordedPhases):
        run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=num_examples))
    wanted = {"drafts", "encoder_inputs", "forks", "copies", "beams", "ADAPTER", "failed", "", "later file"}
    wanted |= {"prior", "resumes was_admitted", "resumes has_output"}
    assert wanted <= SEEN


def test_requests_with_other_stop_tokens_share_blocks_as_they_did(tmp_path: Path) -> None:
    options = SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=16)
    traffic = Traffic(Setting(options, CacheConfig(block_size=4)))
    record_traffic(traffic, tmp_path / "run")
    for number, ends in enumerate([(1, 2), ()]):
        traffic.add(make_request(number, [0, 1, 2, 3, 4], SamplingParams(max_tokens=2, stop_token_ids=ends)))
        traffic.drain()
    lines, _ = read_recording(tmp_path / "run")
    hits = [fields["num_cached"] for line in lines for name, fields in line.get("events", ()) if name == "Admitted"]
    assert hits == [0, 4]
    assert replay(tmp_path / "run").difference is None


def test_a_file_that_begins_after_an_empty_step_counts_from_there(tmp_path: Path) -> None:
    options = SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=16, pipeline_depth=2)
    traffic = Traffic(Setting(options, CacheConfig(block_size=4)))
    record_traffic(Traffic(traffic.setting), tmp_path / "other")
    head = (tmp_path / "other").stat().st_size
    record_traffic(traffic, tmp_path / "run", max_bytes=4 * head + 4)  # the next file is due after the first request
    for number in range(2):
        traffic.add(make_request(number, [0, 1, 2, 3, 4], SamplingParams(max_tokens=1)))
        traffic.plan()
        traffic.plan()  # nothing is left to compute
        traffic.deliver()
        if number == 0:
            assert not traffic.scheduler.has_unfinished_requests()
            traffic.in_flight.clear()
    lines, _ = read_recording(tmp_path / "run.1")
    assert [fields["step"] for name, fields in lines[1]["events"] if name == "Queued"] == [0]
    assert replay(tmp_path / "run.1").difference is None


def test_steps_go_on_when_a_file_is_full_of_the_requests_that_it_begins_with(tmp_path: Path) -> None:
    traffic = Traffic(Setting(SchedulerOptions(), CacheConfig(block_size=4)))
    record_traffic(traffic, tmp_path / "run", with_tokens=True, max_bytes=7000)
    long = SamplingParams(max_tokens=1, stop_token_ids=tuple(range(100, 2000)))
    traffic.add(make_request(0, [0, 1, 2, 3, 4], long))
    assert RecordingScheduler.schedule(traffic.scheduler).total_num_scheduled_tokens == 5  # type: ignore[arg-type]
    assert all(path.read_text().endswith('{"op":"full"}\n') for path in tmp_path.iterdir())


def test_a_search_that_ends_before_its_late_result_is_replayed_with_what_it_cached(tmp_path: Path) -> None:
    options = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=16)
    traffic = Traffic(Setting(options, CacheConfig(block_size=4), beams=True))
    record_traffic(traffic, tmp_path / "run")
    search = SamplingParams(n=2, max_tokens=4, temperature=0.0, beam_search=BeamSearchOptions())
    traffic.add(make_request(0, [0, 1, 2, 3, 4, 5], search))
    traffic.plan()
    traffic.abort(["r0"])
    traffic.deliver()
    traffic.add(make_request(1, [0, 1, 2, 3, 4, 5], SamplingParams(max_tokens=2)))
    traffic.drain()
    lines, _ = read_recording(tmp_path / "run")
    hits = [fields["num_cached"] for line in lines for name, fields in line.get("events", ()) if name == "Admitted"]
    assert hits == [0, 4]
    assert replay(tmp_path / "run").difference is None


def test_a_file_that_begins_after_pins_gives_out_blocks_as_its_replay(tmp_path: Path) -> None:
    shape = KVShape(num_heads=1, key_dim=1, value_dim=1)
    groups = (KVGroupSpec(KVGroupKind.FULL, 0, (0,), shape), KVGroupSpec(KVGroupKind.WINDOW, 6, (1,), shape))
    options = SchedulerOptions(max_num_seqs=3, max_num_batched_tokens=24)
    traffic = Traffic(Setting(options, CacheConfig(block_size=4), groups=groups, num_blocks=22))
    record_traffic(traffic, tmp_path / "run", max_bytes=7000)
    for number in range(4):
        sampling = SamplingParams(n=1 + number % 2, max_tokens=4)
        traffic.add(make_request(number, [1, 2, 3], sampling, pin=None if number % 2 else Pin(60, "a")))
        traffic.drain()
    files = sorted(tmp_path.iterdir())
    firsts = [read_recording(path)[0][1] for path in files[1:]]
    assert any(line["op"] == "add" and line["pin"] is None for line in firsts)
    assert [replay(path).difference for path in files] == [None] * len(files)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [RecordedMachine, RecordedPhases])
def test_random_schedules_are_replayed_at_length(machine: type[RecordedMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(CALM, max_examples=900, stateful_step_count=60))
