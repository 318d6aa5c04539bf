"""The flight recorder: readable by another process, whatever the writer was doing."""

from pathlib import Path

import numpy as np

from pagoda.engine.flight_recorder import FlightRecorder, request_key


def test_a_step_in_flight_is_seen_with_its_requests(tmp_path: Path) -> None:
    reader = FlightRecorder(tmp_path / "flight", 8, create=True)
    writer = FlightRecorder(tmp_path / "flight", 8)
    assert reader.read().steps_begun == 0
    keys = np.array([request_key("a"), request_key("b"), request_key("a")])
    writer.begin_step(keys)
    record = reader.read()
    assert record.steps_begun - record.steps_ended == 1
    assert set(record.keys.tolist()) == {request_key("a"), request_key("b")}
    writer.end_step()
    record = reader.read()
    assert record.steps_begun == record.steps_ended == 1


def test_the_step_that_runs_is_the_oldest_in_flight(tmp_path: Path) -> None:
    """The next one is submitted before it ends; what is only in the next one is not what a crash is blamed on."""
    recorder = FlightRecorder(tmp_path / "flight", 8, create=True)
    for number in range(9):
        recorder.begin_step(np.array([number, 100]))
        if number:
            assert recorder.read().keys.tolist() == [number - 1, 100]
            recorder.end_step()
        assert recorder.read().keys.tolist() == [number, 100]
    recorder.end_step()
    assert recorder.read().keys.tolist() == [8, 100], "between steps, the last one"
    for number in range(20, 27):  # more in flight than it has room for: the oldest that it has
        recorder.begin_step(np.array([number]))
    assert recorder.read().keys.tolist() == [23]
    recorder.close()


def test_more_rows_than_it_has_room_for_are_cut(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "flight", 2, create=True)
    recorder.begin_step(np.arange(5))
    assert recorder.read().keys.tolist() == [0, 1]
    recorder.close()
