"""The order in which requests wait: RequestQueue keeps it, a policy decides it, and which request is preempted."""

import heapq
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from itertools import count
from typing import Protocol

from pagoda.base.config import SchedulingPolicy
from pagoda.core.request import Request, RequestState, SortKey

_Entry = tuple[SortKey, int, RequestState]  # (sort key, ticket, request)


def key_of(request: RequestState) -> Hashable:
    """Return what is skipped as a whole: the LoRA adapter. None: requests without one."""
    return request.spec.lora.identity if request.spec.lora is not None else None


class RequestQueue:
    """Requests by `sort_key`, smallest first.

    Inside, one heap per key: when a key is skipped for the step, all its requests are passed over at once and keep
    their places, so that a step never walks the queue. Removal from the middle leaves a tombstone.
    Every operation is O(log n) in the requests and O(keys) in the keys that wait.
    """

    def __init__(self) -> None:
        self._heaps: dict[Hashable, list[_Entry]] = {}
        self._tickets: dict[str, int] = {}  # request id -> its valid entry
        self._next_ticket = 0
        self._arrivals: list[tuple[float, int, RequestState]] = []

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tickets

    def push(self, request: RequestState) -> None:
        """Insert `request` at the place of its `sort_key`."""
        self._next_ticket += 1
        self._tickets[request.request_id] = self._next_ticket
        heap = self._heaps.setdefault(key_of(request), [])
        heapq.heappush(heap, (request.sort_key, self._next_ticket, request))
        if len(self._arrivals) > 2 * len(self._tickets) + 16:  # skipped requests come back step after step
            self._arrivals = [entry for entry in self._arrivals if self._is_valid(entry)]
            heapq.heapify(self._arrivals)
        heapq.heappush(self._arrivals, (request.spec.arrival_time_s, self._next_ticket, request))

    def adapter_names(self) -> set[str]:
        """Return a name of each LoRA adapter that requests wait with."""
        return {heap[0][2].spec.lora.name for heap in self._heaps.values() if heap[0][2].spec.lora is not None}

    def remove(self, request: RequestState) -> None:
        """Remove `request` from any place."""
        del self._tickets[request.request_id]
        key = key_of(request)
        self._drop_tombstones(key, self._heaps[key])
        while self._arrivals and not self._is_valid(self._arrivals[0]):
            heapq.heappop(self._arrivals)

    def oldest_arrival_s(self) -> float:
        """Return the earliest arrival time of its requests; it must not be empty."""
        return self._arrivals[0][0]

    def peek(self, skipped_keys: Collection[Hashable] = ()) -> RequestState | None:
        """Return the first request whose key is not skipped, or None."""
        best: _Entry | None = None
        for key, heap in self._heaps.items():
            if (best is None or heap[0] < best) and key not in skipped_keys:
                best = heap[0]
        return best[2] if best else None

    def _is_valid(self, entry: _Entry | tuple[float, int, RequestState]) -> bool:
        return self._tickets.get(entry[2].request_id) == entry[1]

    def _drop_tombstones(self, key: Hashable, heap: list[_Entry]) -> None:
        """Keep a valid entry at the top of the heap, or no heap."""
        while heap and not self._is_valid(heap[0]):
            heapq.heappop(heap)
        if not heap:
            del self._heaps[key]

    def __iter__(self) -> Iterator[RequestState]:
        """Return all requests in order. Sorts: for people and tests, not for steps."""
        entries = [entry for heap in self._heaps.values() for entry in heap if self._is_valid(entry)]
        return (entry[2] for entry in sorted(entries, key=lambda entry: entry[:2]))


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
