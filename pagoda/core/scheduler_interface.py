"""SchedulerInterface: what the engine asks of a scheduler. `scheduler_cls` names a class of one's own."""

from collections.abc import Callable, Iterable
from typing import Protocol

from pagoda.core.decision_log import DecisionLog
from pagoda.core.events import Fold
from pagoda.core.request import NEW, Progress, Request, RequestKey, RequestState, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from pagoda.core.stats import SchedulerStats
from pagoda.core.view import SchedulerView


class SchedulerInterface(Protocol):
    """Decides what runs in each step. Called by one thread; docs/reference/scheduler-contract.md says what is promised.

    The engine makes it with the arguments of `pagoda.Scheduler`, which most schedulers extend.
    """

    def add_request(self, request: Request, progress: Progress = NEW) -> None:
        """Add `request` to the waiting queue. Raises RequestError, with nothing changed, for one that cannot be had.

        progress: of one that a scheduler had before it started over; `prior_output` are its tokens.
        """
        ...

    def finish_requests(
        self, keys: Iterable[RequestKey], status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> None:
        """End requests in whatever queue they are; those that have ended are ignored.

        Blocks are free at once: steps in flight run before any step that could reuse them.
        """
        ...

    def finish_sequence(
        self, key: RequestKey, index: int, status: RequestStatus = RequestStatus.FINISHED_STOPPED
    ) -> None:
        """End one sequence (a stop string was found in its text); the others continue. Nothing, if it has ended.

        A beam search ends as a whole.
        """
        ...

    def has_unfinished_requests(self) -> bool:
        """Return whether a request has not ended."""
        ...

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. Changes state: called again before the result is back, it plans the step after."""
        ...

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput | None
    ) -> dict[int, EngineCoreOutputs]:
        """Apply the result of a step, in the order of planning. Return what each client gets.

        Of a step with nothing to compute, `model_output` may be None; requests that ended while it was planned are
        still returned.
        """
        ...

    def fail_step(self, scheduler_output: SchedulerOutput, message: str) -> dict[int, EngineCoreOutputs]:
        """Apply that a step raised, in the order of planning. Its sequences end with ERROR and `message`.

        Its events (block moves, rows) must have been applied. Requests that depend on its results in steps that were
        planned after it are computed again.
        """
        ...

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget the content of all device blocks. Return False, with nothing changed, while any is in use.

        preempt_running: preempt all running requests first, and end loads from a tier. Tokens in flight are dropped
        when they come back, so that the next step may compute them again.
        Swapped requests keep their KV in host memory; its full blocks are cached again when they come back.
        """
        ...

    def start_over(self, *, requeue: bool = False) -> list[RequestState] | None:
        """Forget all that was cached or learnt, so that the next steps are planned as by a new scheduler.

        Return the unfinished requests in the order in which that one would be given them; None, with nothing changed,
        while a step is in flight, or a load. Totals, events and the numbers of steps go on.
        requeue: requests that run or are swapped are recomputed. Otherwise None also while a request is unfinished.
        """
        ...

    def subscribe(self, fold: Fold, *, cache: bool = False) -> Callable[[], None]:
        """Give `fold` every event from now on, with `cache` those of the prefix cache, too. Return what ends that.

        It is called while a step is planned or applied: it must neither raise, take long, nor call the scheduler.
        """
        ...

    def make_stats(self) -> SchedulerStats:
        """Return gauges and totals."""
        ...

    def view(self) -> SchedulerView:
        """Return what runs now and who has which blocks, for people who look."""
        ...

    @property
    def explain(self) -> DecisionLog:
        """What happened in the last steps (`decision_log_steps` of them), and why requests wait."""
        ...
