"""The order in which requests wait: RequestQueue keeps it, a policy decides it, and which request is preempted."""

from bisect import bisect_left, bisect_right, insort
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
    """Requests by `sort_key`, smallest first; of equal ones, the one that was pushed first.

    Inside, one sorted list per key: when a key is skipped for the step, all its requests are passed over at once and
    keep their places, so that a step never walks the queue. What leaves is removed at once, and never kept.
    """

    def __init__(self) -> None:
        self._lists: dict[Hashable, list[_Entry]] = {}
        self._entries: dict[str, _Entry] = {}  # by request id
        self._tickets = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def push(self, request: RequestState) -> None:
        """Insert `request` at the place of its `sort_key`."""
        entry = (request.sort_key, next(self._tickets), request)
        self._entries[request.request_id] = entry
        insort(self._lists.setdefault(key_of(request), []), entry)

    def remove(self, request: RequestState) -> None:
        """Remove `request` from any place."""
        entry, key = self._entries.pop(request.request_id), key_of(request)
        entries = self._lists[key]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._lists[key]

    def peek(self, skipped_keys: Collection[Hashable] = (), after: RequestState | None = None) -> RequestState | None:
        """Return the first request whose key is not skipped, or None. after: a request of the queue to search after."""
        passed = self._entries[after.request_id] if after is not None else None
        best: _Entry | None = None
        for key, entries in self._lists.items():
            at = bisect_right(entries, passed) if passed is not None else 0
            if at < len(entries) and (best is None or entries[at] < best) and key not in skipped_keys:
                best = entries[at]
        return best[2] if best is not None else None

    def position(self, request: RequestState) -> int:
        """Return how many of its requests come before `request`."""
        entry = self._entries[request.request_id]
        return sum(bisect_left(entries, entry) for entries in self._lists.values())

    def adapter_names(self) -> set[str]:
        """Return a name of each LoRA adapter that requests wait with."""
        first = [entries[0][2].spec.lora for entries in self._lists.values()]
        return {lora.name for lora in first if lora is not None}

    def oldest_arrival_s(self) -> float:
        """Return the earliest arrival time of its requests; it must not be empty. Walks the queue."""
        return min(entry[2].spec.arrival_time_s for entry in self._entries.values())

    def __iter__(self) -> Iterator[RequestState]:
        """Return all requests in order. Sorts: for people and tests, not for steps."""
        return (entry[2] for entry in sorted(self._entries.values(), key=lambda entry: entry[:2]))


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
