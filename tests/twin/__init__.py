"""The twin: the scheduler written a second time, from its contract alone, with plain objects and plain loops.

It is slow and obvious on purpose. Random traffic drives the twin and the real scheduler side by side; what they decide
must be equal. It takes and returns the plain records of `tests.conformance.replay`, not SchedulerOutput.
"""

from tests.twin.scheduler import WHY_ENDED, TwinScheduler

__all__ = ["WHY_ENDED", "TwinScheduler"]
