"""DecisionLog: the events of the last steps, and why each waiting request waits. Off unless asked for."""

from collections import deque
from collections.abc import Iterator
from itertools import chain

from pagoda.core.events import Admitted, Ended, Event, Held, Queued, RequestEvent
from pagoda.core.request import RequestKey


class DecisionLog:
    """What happened in the last `num_steps` steps. With 0 it is off.

    Of a request that waits, why it was held stays known, however long ago that was written.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._events: deque[Event] = deque()
        self._held: dict[RequestKey, Held] = {}  # by client and handle
        self._ids: dict[RequestKey, str] = {}

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

    def __iter__(self) -> Iterator[Event]:
        """Return the events in the order in which they were written."""
        first = self._events[0].step if self._events else 0
        return chain((held for held in self._held.values() if held.step < first), self._events)

    def of_request(self, request_id: str) -> list[RequestEvent]:
        """Return everything that is still known of one request."""
        events = [event for event in self if isinstance(event, RequestEvent)]
        return [event for event in events if self._ids.get((event.client, event.handle)) == request_id]
