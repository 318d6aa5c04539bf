"""StepsInFlight: which rows stay pinned after their sequence has left them."""

import numpy as np

from pagoda.core.in_flight import StepsInFlight
from pagoda.core.scheduler_output import SchedulerOutput


def planned(step: int, rows: list[int]) -> SchedulerOutput:
    named = np.array(rows, np.int32)
    numbers = np.arange(len(rows), dtype=np.int32)
    return SchedulerOutput(step, named, np.zeros_like(named), np.ones_like(named), named, numbers, len(rows))


def test_a_row_is_pinned_only_by_the_last_step_that_contains_it() -> None:
    """Otherwise rows evicted by the step that admits them could use up the table, and hold others back."""
    in_flight = StepsInFlight()
    in_flight.opened(planned(1, [0, 1]), None)
    in_flight.opened(planned(2, [0]), None)
    assert [in_flight.last_step_with(row) for row in (0, 1, 2)] == [2, 1, 0]
