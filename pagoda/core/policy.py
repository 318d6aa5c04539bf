"""The order in which requests wait: RequestQueue keeps it, a policy decides it, and which request is preempted."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import count
from typing import Protocol

from pagoda.base.config import SchedulingPolicy
from pagoda.core.request import LoraRef, Request, RequestKey, RequestState, SortKey

_Entry = tuple[SortKey, int, RequestState]  # (sort key, ticket, request)


def key_of(request: RequestState) -> Hashable:
    """Return what is skipped as a whole: the LoRA adapter. None: requests without one."""
    return request.spec.lora.identity if request.spec.lora is not None else None


class RequestQueue:
    """Requests by `sort_key`, smallest first; of equal ones, the one that was pushed first.

    Inside, one sorted list per key of `key_of`, and the heads of these lists, sorted: when a key is skipped for a step,
    all its requests are passed over at once and keep their places. Requests that were set aside keep theirs, too, and
    are not considered before they are woken. So a step never walks the queue. What leaves is removed at once.

    For each held request that is not set aside, it keeps the last step in which its reason was true: `note_held`.
    """

    def __init__(self) -> None:
        self._lists: dict[Hashable, list[_Entry]] = {}
        self._heads: list[_Entry] = []
        self._entries: dict[RequestKey, _Entry] = {}  # those set aside included
        self._aside: set[RequestKey] = set()
        self._held: dict[RequestKey, int] = {}  # step in which the reason was true; 0 of those that were woken since
        self._num_with: Counter[str] = Counter()  # by name of an adapter; never 0
        self._arrivals: list[float] | None = None  # sorted; kept from when they are first asked for
        self._tickets = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._entries

    def push(self, request: RequestState) -> int:
        """Insert `request` at the place of its `sort_key`. Return its `position`."""
        if self._arrivals is not None:
            insort(self._arrivals, request.spec.arrival_time_s)
        entry = self._entries[request.key] = (request.sort_key, next(self._tickets), request)
        if request.spec.lora is not None:
            self._num_with[request.spec.lora.name] += 1
        at = self._insert(entry)
        return at if len(self._lists) == 1 else self.position(request)

    def remove(self, request: RequestState) -> None:
        """Remove `request` from any place."""
        if self._arrivals is not None:
            del self._arrivals[bisect_left(self._arrivals, request.spec.arrival_time_s)]
        entry, lora = self._entries.pop(request.key), request.spec.lora
        self._held.pop(request.key, None)
        if lora is not None:
            self._num_with[lora.name] -= 1
            if not self._num_with[lora.name]:
                del self._num_with[lora.name]
        if request.key in self._aside:
            self._aside.remove(request.key)
        else:
            self._unlink(entry)

    def set_aside(self, request: RequestState) -> None:
        """Do not consider `request` before `wake`."""
        self._unlink(self._entries[request.key])
        self._held.pop(request.key, None)
        self._aside.add(request.key)

    def wake(self, key: RequestKey) -> None:
        """Consider a request again that was set aside. Ignore others."""
        if key in self._aside:
            self._aside.remove(key)
            self._held[key] = 0
            self._insert(self._entries[key])

    def note_held(self, request: RequestState, step: int) -> None:
        """`request` has a reason to wait, which is true in `step`."""
        self._held[request.key] = step

    def take_passed_over(self, step: int) -> list[RequestState]:
        """Return those whose reason was not found to be true in `step`, in order, and forget that they had one."""
        passed = sorted(self._entries[key] for key, held in self._held.items() if held < step)
        for _, _, request in passed:
            del self._held[request.key]
        return [request for _, _, request in passed]

    def _insert(self, entry: _Entry) -> int:
        """Return its place among the requests of its key."""
        entries = self._lists.setdefault(key_of(entry[2]), [])
        at = bisect_left(entries, entry)
        entries.insert(at, entry)
        if at == 0:
            if len(entries) > 1:
                del self._heads[bisect_left(self._heads, entries[1])]
            insort(self._heads, entry)
        return at

    def _unlink(self, entry: _Entry) -> None:
        key = key_of(entry[2])
        entries = self._lists[key]
        at = bisect_left(entries, entry)
        del entries[at]
        if at == 0:
            del self._heads[bisect_left(self._heads, entry)]
            if entries:
                insort(self._heads, entries[0])
            else:
                del self._lists[key]

    def peek(self, num_skipped: int = 0) -> RequestState | None:
        """Return the first request, ignoring the first `num_skipped` keys (see `key_of`); None if there is none."""
        return self._heads[num_skipped][2] if num_skipped < len(self._heads) else None

    def position(self, request: RequestState) -> int:
        """Return how many requests come before `request`, without those that are set aside."""
        entry = self._entries[request.key]
        return sum(bisect_left(entries, entry) for entries in self._lists.values())

    def num_deferred(self, has_room: Callable[[LoraRef], bool]) -> int:
        """Return how many are set aside, or wait with an adapter for which there is no room."""
        loras = [(entries[0][2].spec.lora, len(entries)) for entries in self._lists.values()]
        return len(self._aside) + sum(num for lora, num in loras if lora is not None and not has_room(lora))

    def adapter_names(self) -> set[str]:
        """Return the names of the LoRA adapters that requests wait with."""
        return set(self._num_with)

    def oldest_arrival_s(self) -> float:
        """Return the earliest arrival time of its requests; it must not be empty."""
        if self._arrivals is None:
            self._arrivals = sorted(entry[2].spec.arrival_time_s for entry in self._entries.values())
        return self._arrivals[0]

    def in_turn(self) -> list[RequestState]:
        """Return those that are not set aside, in order. Sorts, as `__iter__` does."""
        return [request for request in self if request.key not in self._aside]

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
    """Smallest priority number first, then arrival, then the client's order: prompts of one call arrive together.

    The victim has the largest (priority, arrival); of equals, the one admitted first. It returns to its usual place.
    """

    def key(self, request: Request) -> SortKey:
        return (request.priority, request.arrival_time_s, *request.key)

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
