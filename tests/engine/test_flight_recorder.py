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


def test_more_rows_than_it_has_room_for_are_cut(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "flight", 2, create=True)
    recorder.begin_step(np.arange(5))
    assert recorder.read().keys.tolist() == [0, 1]
    recorder.close()
