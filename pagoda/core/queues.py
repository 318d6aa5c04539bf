"""RequestQueue: waiting requests, or swapped ones, in the order of the policy."""

import heapq
from collections.abc import Collection, Hashable, Iterator

from pagoda.core.request import RequestState, SortKey

_Entry = tuple[SortKey, int, RequestState]  # (sort key, ticket, request)


def key_of(request: RequestState) -> Hashable:
    """Return what Skip.KEY skips as a whole: the LoRA adapter, whichever gate asks. None: requests without one."""
    return request.spec.lora.identity if request.spec.lora is not None else None


class RequestQueue:
    """Requests by `sort_key`, smallest first.

    Inside, one heap per key: when a gate skips a key for the step, all its requests are passed over at once and keep
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
