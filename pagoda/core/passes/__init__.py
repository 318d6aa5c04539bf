"""The moves of a step, in the order of the scheduler's outline. Each pass gets the owners that it uses."""

from pagoda.core.passes.admit_waiting import AdmitWaiting
from pagoda.core.passes.commit_outputs import CommitOutputs
from pagoda.core.passes.extend_beams import ExtendBeams
from pagoda.core.passes.finish_plan import FinishPlan
from pagoda.core.passes.fork import Fork
from pagoda.core.passes.resume_swapped import ResumeSwapped
from pagoda.core.passes.run_running import RunRunning

__all__ = ["AdmitWaiting", "CommitOutputs", "ExtendBeams", "FinishPlan", "Fork", "ResumeSwapped", "RunRunning"]
