"""DecisionLog: the events of the last steps, and why each waiting request waits. Off unless asked for."""

from collections import deque
from collections.abc import Iterator

from pagoda.core.events import Admitted, Ended, Event, Held, Queued, RequestEvent


class DecisionLog:
    """What happened in the last `num_steps` steps. With 0 it is off.

    Of a request that waits, why it was held stays known, however long ago that was written.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._events: deque[Event] = deque()
        self._held: dict[tuple[int, int], Held] = {}  # by client and handle
        self._ids: dict[tuple[int, int], str] = {}

    def note(self, event: Event) -> None:
        """Add an event."""
        match event:
            case Queued():
                self._ids[event.client, event.handle] = event.request_id
            case Held():
                self._held[event.client, event.handle] = event
            case Admitted() | Ended():
                self._held.pop((event.client, event.handle), None)
            case _:
                pass
        self._events.append(event)
        while self._events[0].step <= event.step - self._num_steps:
            oldest = self._events.popleft()
            if isinstance(oldest, Ended) and oldest.is_last:
                del self._ids[oldest.client, oldest.handle]

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        """Yield (step, event), in the order in which they were written."""
        first = self._events[0].step if self._events else 0
        yield from ((held.step, held) for held in self._held.values() if held.step < first)
        yield from ((event.step, event) for event in self._events)

    def of_request(self, request_id: str) -> list[tuple[int, Event]]:
        """Return (step, event) for everything that is still known of one request."""
        return [
            (step, event)
            for step, event in self
            if isinstance(event, RequestEvent) and self._ids.get((event.client, event.handle)) == request_id
        ]
