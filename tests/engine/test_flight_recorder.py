"""The flight recorder: readable by another process, whatever the writer was doing."""

from pathlib import Path

import numpy as np
import pytest

from pagoda.base.config import EngineConfig
from pagoda.engine.clients.engine_link import open_recorder
from pagoda.engine.flight_recorder import FlightRecorder, packed_key
from pagoda.process.child_process import RendezvousDir


def test_a_step_in_flight_is_seen_with_its_requests(tmp_path: Path) -> None:
    reader = FlightRecorder(tmp_path / "flight", 8, 2, create=True)
    writer = FlightRecorder(tmp_path / "flight", 8, 2)
    assert reader.read().steps_begun == 0
    keys = np.array([packed_key((0, 1)), packed_key((1, 1)), packed_key((0, 1))])
    writer.begin_step(keys)
    record = reader.read()
    assert record.steps_begun - record.steps_ended == 1
    assert record.keys == {packed_key((0, 1)), packed_key((1, 1))}
    writer.end_step()
    record = reader.read()
    assert record.steps_begun == record.steps_ended == 1


def test_the_step_that_runs_is_the_oldest_in_flight(tmp_path: Path) -> None:
    """The next one is submitted before it ends; what is only in the next one is not what a crash is blamed on."""
    recorder = FlightRecorder(tmp_path / "flight", 8, 4, create=True)
    for number in range(9):
        recorder.begin_step(np.array([number, 100]))
        if number:
            assert recorder.read().keys == {number - 1, 100}
            recorder.end_step()
        assert recorder.read().keys == {number, 100}
    recorder.end_step()
    assert recorder.read().keys == {8, 100}, "between steps, the last one"
    for number in range(20, 27):  # more in flight than it has room for: the oldest that it has
        recorder.begin_step(np.array([number]))
    assert recorder.read().keys == {23}
    recorder.close()


@pytest.mark.parametrize(("num_slots", "num_stages"), [(2, 2), (7, 3), (6, 6)])
def test_with_stages_all_steps_that_run_are_seen(num_slots: int, num_stages: int, tmp_path: Path) -> None:
    """As many as there are stages, the oldest in flight: a crash may be the work of each of them."""
    recorder = FlightRecorder(tmp_path / "flight", 8, num_slots, num_stages, create=True)
    assert recorder.read().keys == set()
    for number in range(3 * num_slots):
        if number >= num_slots:
            recorder.end_step()
        recorder.begin_step(np.array([number, 100]))
        first = max(number - num_slots + 1, 0)
        running = range(first, min(first + num_stages, number + 1))
        assert recorder.read().keys == {*running, 100}
    for _ in range(num_slots):
        recorder.end_step()
    assert recorder.read().keys == {3 * num_slots - 1, 100}, "between steps, the last one"
    recorder.close()


@pytest.mark.parametrize(
    ("options", "depth", "num_stages"),
    [
        ({}, 1, 1),
        ({"async_scheduling": True}, 2, 1),
        ({"pipeline_parallel_size": 6}, 6, 6),
        ({"pipeline_depth": 5}, 5, 1),
    ],
)
def test_an_engine_of_any_depth_keeps_the_steps_that_run(
    options: dict[str, object], depth: int, num_stages: int
) -> None:
    place = RendezvousDir()
    recorder = open_recorder(place, EngineConfig.from_options(**options), create=True)
    place.remove()
    for number in range(depth):
        recorder.begin_step(np.array([number]))
    assert recorder.read().keys == set(range(num_stages))
    recorder.close()


def test_more_rows_than_it_has_room_for_are_cut(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "flight", 2, 2, create=True)
    recorder.begin_step(np.arange(5))
    assert recorder.read().keys == {0, 1}
    recorder.close()
