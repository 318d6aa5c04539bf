"""Policies: the order of the queues, and which request is preempted when memory runs out."""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Protocol

from pagoda.base.config import SchedulingPolicy
from pagoda.core.request import Request
from pagoda.core.request_state import RequestState, SortKey


class Policy(Protocol):
    """Orders the queues by key (smallest first) and picks victims."""

    def key(self, request: Request) -> SortKey:
        """Return the sort key of a new request."""
        ...

    def key_on_return(self, request: RequestState) -> SortKey:
        """Return the sort key of a request that was preempted."""
        ...

    def victim(self, running: Iterable[RequestState]) -> RequestState:
        """Return the request of `running` to preempt (not empty, oldest admission first)."""
        ...

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        """Whether `running` may be preempted only to let `waiting` enter."""
        ...


class FirstComeFirstServed:
    """Order of arrival. The newest running request is the victim, and returns to the front of the queue."""

    def __init__(self) -> None:
        self._next_last = count()
        self._next_front = count(-1, -1)

    def key(self, request: Request) -> SortKey:
        return (next(self._next_last),)

    def key_on_return(self, request: RequestState) -> SortKey:
        return (next(self._next_front),)

    def victim(self, running: Iterable[RequestState]) -> RequestState:
        return next(reversed(running))  # type: ignore[call-overload]  # a dict view

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        return False


class MostUrgentFirst:
    """Smallest priority number first, then arrival, then id.

    The victim has the largest (priority, arrival); of equals, the one admitted first. It returns to its usual place.
    """

    def key(self, request: Request) -> SortKey:
        return (request.priority, request.arrival_time_s, request.request_id)

    def key_on_return(self, request: RequestState) -> SortKey:
        return self.key(request.spec)

    def victim(self, running: Iterable[RequestState]) -> RequestState:
        return max(running, key=lambda request: (request.spec.priority, request.spec.arrival_time_s))

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        return self.key(waiting.spec) < self.key(running.spec)


POLICIES: dict[SchedulingPolicy, Callable[[], Policy]] = {
    SchedulingPolicy.FCFS: FirstComeFirstServed,
    SchedulingPolicy.PRIORITY: MostUrgentFirst,
}
