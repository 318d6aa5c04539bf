"""The breakdown of a run adds up to the run."""

import pytest

from pagoda.cli.bench.throughput import breakdown
from pagoda.worker.calls import StepProfile

PARTS = {"events": 0.1, "inputs": 0.2, "forward": 7.0, "sampling": 0.5}


def test_the_parts_add_up_to_the_run() -> None:
    ops = {"linear": 4.0, "logits": 1.0, "attention": 1.0, "rms_norm": 0.3, "gate": 0.2}
    rows = {row["part"]: row["secs"] for row in breakdown(StepProfile(100, PARTS, ops, 50, 2e-5), 9.0)}
    assert sum(rows.values()) == pytest.approx(9.0)
    assert rows["barriers (estimated)"] == pytest.approx(0.1)
    assert rows["linear layers"] == pytest.approx(3.9)
    assert rows["lm_head"] == pytest.approx(1.0)
    assert rows["elementwise"] == pytest.approx(0.5)
    assert rows["forward, the rest"] == pytest.approx(0.5)
    assert rows["worker's Python"] == pytest.approx(0.3)
    assert rows["scheduling and output"] == pytest.approx(1.2)


def test_a_forward_op_by_op_is_one_part() -> None:
    rows = {row["part"]: row["secs"] for row in breakdown(StepProfile(100, PARTS, {}, 0, 0.0), 9.0)}
    assert rows["forward"] == 7.0
    assert sum(rows.values()) == pytest.approx(9.0)
    assert "linear layers" not in rows
