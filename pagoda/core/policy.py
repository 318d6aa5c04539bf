"""Policies: who is first in line, and who must go when memory runs out."""

from collections.abc import Iterable
from itertools import count
from typing import Protocol

from pagoda.base.config import SchedulingPolicy
from pagoda.core.request import Request
from pagoda.core.request_table import LiveRequest

LineKey = tuple[float | int | str, ...]


class Policy(Protocol):
    """Orders the waiting line by key (smallest first) and picks victims."""

    def key(self, request: Request) -> LineKey:
        """Place of a newcomer."""
        ...

    def key_on_return(self, live: LiveRequest) -> LineKey:
        """Place of a request that was preempted."""
        ...

    def victim(self, running: Iterable[LiveRequest]) -> LiveRequest:
        """Who is thrown out of `running` (not empty, oldest admission first)."""
        ...


class FirstComeFirstServed:
    """Order of arrival; a victim goes back to the front. The newest running request is the victim."""

    def __init__(self) -> None:
        self._next_last = count()
        self._next_front = count(-1, -1)

    def key(self, request: Request) -> LineKey:
        return (next(self._next_last),)

    def key_on_return(self, live: LiveRequest) -> LineKey:
        return (next(self._next_front),)

    def victim(self, running: Iterable[LiveRequest]) -> LiveRequest:
        return next(reversed(running))  # type: ignore[call-overload]  # a dict view


class MostUrgentFirst:
    """Smallest priority number first, then arrival, then id; a victim takes its ordinary place again.

    The victim is the largest (priority, arrival) wherever it stands; of equals, the one admitted first.
    """

    def key(self, request: Request) -> LineKey:
        return (request.priority, request.arrival_time_s, request.request_id)

    def key_on_return(self, live: LiveRequest) -> LineKey:
        return self.key(live.request)

    def victim(self, running: Iterable[LiveRequest]) -> LiveRequest:
        return max(running, key=lambda live: (live.request.priority, live.request.arrival_time_s))


POLICIES: dict[SchedulingPolicy, type[FirstComeFirstServed] | type[MostUrgentFirst]] = {
    SchedulingPolicy.FCFS: FirstComeFirstServed,
    SchedulingPolicy.PRIORITY: MostUrgentFirst,
}
