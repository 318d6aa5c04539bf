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
        self._events: deque[tuple[str, Event]] = deque()  # with the request's id; "" for events of several requests
        self._held: dict[RequestKey, tuple[str, Held]] = {}
        self._ids: dict[RequestKey, str] = {}  # of unfinished requests: a client may use a handle again

    def note(self, event: Event) -> None:
        """Add an event."""
        request_id = ""
        if isinstance(event, RequestEvent):
            key = event.client, event.handle
            if isinstance(event, Queued):
                self._ids[key] = event.request_id
            request_id = self._ids[key]
            if isinstance(event, Held):
                self._held[key] = request_id, event
            elif isinstance(event, Admitted | Ended):
                self._held.pop(key, None)
            if isinstance(event, Ended) and event.is_last:
                del self._ids[key]
        self._events.append((request_id, event))
        while self._events[0][1].step <= event.step - self._num_steps:
            self._events.popleft()

    def _known(self) -> Iterator[tuple[str, Event]]:
        first = self._events[0][1].step if self._events else 0
        return chain((held for held in self._held.values() if held[1].step < first), self._events)

    def __iter__(self) -> Iterator[Event]:
        """Return the events in the order in which they were written."""
        return (event for _, event in self._known())

    def of_request(self, request_id: str) -> list[RequestEvent]:
        """Return everything that is still known of one request."""
        return [event for name, event in self._known() if name == request_id and isinstance(event, RequestEvent)]
