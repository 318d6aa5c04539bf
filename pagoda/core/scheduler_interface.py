"""SchedulerInterface: what the engine asks of a scheduler. `scheduler_cls` names a class of one's own."""

from collections.abc import Callable, Iterable
from typing import Protocol

from pagoda.core.decision_log import DecisionLog
from pagoda.core.events import Fold
from pagoda.core.request import Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from pagoda.core.stats import SchedulerStats
from pagoda.core.view import SchedulerView


class SchedulerInterface(Protocol):
    """Decides what runs in each step. Called by one thread; docs/reference/scheduler-contract.md says what is promised.

    The engine makes it with the arguments of `pagoda.Scheduler`, which most schedulers extend.
    """

    def add_request(self, request: Request) -> None:
        """Add `request` to the waiting queue. Raises RequestError, with nothing changed, for one that cannot be had."""
        ...

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> None:
        """End requests wherever they are; ignore ids that have ended."""
        ...

    def finish_sequence(self, request_id: str, index: int, status: RequestStatus) -> None:
        """End one sequence of a request; the others continue."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Return whether a request has not ended."""
        ...

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. Called again before the result is back, it plans the step after."""
        ...

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput | None
    ) -> dict[int, EngineCoreOutputs]:
        """Apply the result of a step, in the order of planning; None: it computed nothing. Return outputs by client."""
        ...

    def fail_step(self, scheduler_output: SchedulerOutput, message: str) -> dict[int, EngineCoreOutputs]:
        """Apply that a step raised: what it computed ends with `message`. Return outputs by client."""
        ...

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget all cached prefixes. Return False, with nothing changed, if blocks are in use."""
        ...

    def start_over(self) -> bool:
        """Forget all that was cached or learnt, so that the next steps are planned as by a new scheduler.

        Return False, with nothing changed, while a request is unfinished or a step in flight. Totals, events and the
        numbers of steps go on.
        """
        ...

    def subscribe(self, fold: Fold, *, cache: bool = False) -> Callable[[], None]:
        """Give `fold` every event from now on, with `cache` those of the prefix cache, too. Return what ends that."""
        ...

    def make_stats(self) -> SchedulerStats:
        """Return gauges and totals."""
        ...

    def view(self) -> SchedulerView:
        """Return what runs now and who has which blocks, for people who look."""
        ...

    @property
    def explain(self) -> DecisionLog:
        """What happened in the last steps, and why requests wait."""
        ...
