"""WaitingLine: who waits, in the order of the policy. Swapped requests stand in a line of their own."""

import heapq
from collections.abc import Collection, Iterator

from pagoda.core.request import LoraRef
from pagoda.core.request_table import LiveRequest

_Entry = tuple[tuple[float | int | str, ...], int, LiveRequest]  # (line key, ticket, request)


class WaitingLine:
    """Requests by `line_key`, smallest first.

    Inside, one heap an adapter ("lane"): when a gate closes an adapter for the step, all its requests are passed over
    at once and keep their places, so that a step never walks the line. Removal from the middle leaves a tombstone.
    Every operation is O(log n) in the requests and O(lanes) in the adapters that wait.
    """

    def __init__(self) -> None:
        self._lanes: dict[LoraRef | None, list[_Entry]] = {}
        self._tickets: dict[str, int] = {}  # request id -> its valid entry
        self._next_ticket = 0
        self._arrivals: list[tuple[float, int, LiveRequest]] = []

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tickets

    def push(self, live: LiveRequest) -> None:
        """Put `live` at the place its `line_key` says."""
        self._next_ticket += 1
        self._tickets[live.request_id] = self._next_ticket
        lane = self._lanes.setdefault(live.request.lora, [])
        heapq.heappush(lane, (live.line_key, self._next_ticket, live))
        heapq.heappush(self._arrivals, (live.request.arrival_time_s, self._next_ticket, live))

    def remove(self, live: LiveRequest) -> None:
        """Take `live` out, wherever it stands."""
        del self._tickets[live.request_id]
        lane = self._lanes[live.request.lora]
        self._drop_tombstones(live.request.lora, lane)
        while self._arrivals and not self._is_valid(self._arrivals[0]):
            heapq.heappop(self._arrivals)

    def oldest_arrival_s(self) -> float:
        """When the one that came first arrived; the line is not empty."""
        return self._arrivals[0][0]

    def head(self, closed: Collection[LoraRef] = ()) -> LiveRequest | None:
        """The first in line whose adapter is not `closed`, or None."""
        best: _Entry | None = None
        for lora, lane in self._lanes.items():
            if (best is None or lane[0] < best) and lora not in closed:
                best = lane[0]
        return best[2] if best else None

    def _is_valid(self, entry: _Entry | tuple[float, int, LiveRequest]) -> bool:
        return self._tickets.get(entry[2].request_id) == entry[1]

    def _drop_tombstones(self, lora: LoraRef | None, lane: list[_Entry]) -> None:
        """Keep a valid entry at the top of the lane, or no lane."""
        while lane and not self._is_valid(lane[0]):
            heapq.heappop(lane)
        if not lane:
            del self._lanes[lora]

    def __iter__(self) -> Iterator[LiveRequest]:
        """All, in line order. Sorts: for people and tests, not for steps."""
        entries = [entry for lane in self._lanes.values() for entry in lane if self._is_valid(entry)]
        return (entry[2] for entry in sorted(entries, key=lambda entry: entry[:2]))
