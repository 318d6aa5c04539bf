"""When grammars and adapters were ready: noted while a scheduler asks, and answered again when it is replayed."""

from collections import defaultdict, deque
from collections.abc import Iterable

from pagoda.base.errors import RequestError
from pagoda.core.request import Reason, Request, RequestKey
from pagoda.core.state import Preparations

Answer = tuple[str, str]
"""A request that was asked for, and the name of the reason why it was not ready; "" if it was, or FAILED."""
FAILED = "failed"


class NotedPreparations:
    """Preparations whose answers are noted.   taken: (answers, requests that were woken) since the last `take`."""

    def __init__(self, inner: Preparations) -> None:
        self._inner = inner
        self.forget, self.pin, self.unpin = inner.forget, inner.pin, inner.unpin
        self._answers: list[tuple[RequestKey, str]] = []
        self._woken: list[RequestKey] = []

    def take(self) -> tuple[list[tuple[RequestKey, str]], list[RequestKey]]:
        """Return the answers and the woken requests since the last call."""
        taken, self._answers, self._woken = (self._answers, self._woken), [], []
        return taken

    def why_not_ready(self, request: Request) -> Reason | None:
        answer = FAILED
        try:
            reason = self._inner.why_not_ready(request)
            answer = "" if reason is None else reason.name
            return reason
        finally:
            if request.grammar is not None or request.lora is not None:
                self._answers.append((request.key, answer))

    def take_woken(self) -> list[RequestKey]:
        woken = list(self._inner.take_woken())
        self._woken += woken
        return woken


class ReplayedPreparations:
    """Preparations that answer as it was noted. What was not asked then is ready."""

    def __init__(self) -> None:
        self._answers: defaultdict[str, deque[str]] = defaultdict(deque)
        self._woken: list[RequestKey] = []

    def give(self, answers: Iterable[Answer], woken: list[RequestKey]) -> None:
        """Set the answers for the next step."""
        self._answers.clear()
        for label, answer in answers:
            self._answers[label].append(answer)
        self._woken = woken

    def why_not_ready(self, request: Request) -> Reason | None:
        answers = self._answers[request.request_id]
        answer = answers.popleft() if answers else ""
        if answer == FAILED:
            raise RequestError("it could not be prepared when it was recorded")
        return Reason[answer] if answer else None

    def take_woken(self) -> list[RequestKey]:
        woken, self._woken = self._woken, []
        return woken

    def forget(self, request: Request) -> None:
        pass

    def pin(self, request: Request) -> None:
        pass

    def unpin(self, request: Request) -> None:
        pass
