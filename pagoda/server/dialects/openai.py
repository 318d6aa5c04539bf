"""What OpenAI's two dialects have in common: streams of one kind of chunk, each with the choice that it is about."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from msgspec import UNSET, Struct, UnsetType

from pagoda.server.answers import Timings, Usage
from pagoda.server.sampling_body import SamplingBody
from pagoda.server.sending import event
from pagoda.server.state import ServerState
from pagoda.server.turn import Piece, Turn, TurnRequest


class Chunk(Protocol):
    """An event of a stream: one struct per stream, whose fields are set again for every event."""

    choices: list[Any]
    usage: Usage | UnsetType | None
    timings: Timings | UnsetType


class ChunkedAnswer(ABC):
    """An answer whose stream is of chunks.

    The last has the usage, if that was asked for or is forced, and the timings, if those were asked for.
    """

    def __init__(self, body: SamplingBody, turn: Turn, state: ServerState, chunk: Chunk) -> None:
        self.turn = turn
        self.generation = turn.generation
        self.writes_ids = state.writes_ids(body)  # tokens of log-probabilities
        self._timings = (body.wants_timings, body.timings_per_token)
        options = body.stream_options
        self._has_usage = state.forces_usage or (options is not None and options.include_usage)
        self._is_continuous = self._has_usage and (
            state.forces_usage if options is None else options.continuous_usage_stats
        )
        self._chunk = chunk
        chunk.usage = None if self._has_usage else UNSET

    def opening_choices(self) -> Iterable[Struct]:
        """Iterate over the choices that are sent before anything is generated."""
        return ()

    @abstractmethod
    def choice(self, piece: Piece) -> Struct | None:
        """Return the choice of one event, or None if there is nothing to send yet."""

    @abstractmethod
    def whole(self, pieces: Sequence[Piece]) -> Struct:
        """Return the whole answer."""

    @property
    def timings(self) -> Timings | UnsetType:
        """Those of a whole answer, if they were asked for."""
        return self.generation.timings if self._timings[0] else UNSET

    def opening(self) -> bytes:
        return b"".join(self._event(choice) for choice in self.opening_choices())

    def frames(self, piece: Piece) -> bytes:
        if (choice := self.choice(piece)) is None:
            return b""
        if self._timings[1]:
            self._chunk.timings = self.generation.timings
        return self._event(choice)

    def closing(self) -> bytes:
        if not self._has_usage and not self._timings[0]:
            return b""
        chunk = self._chunk
        chunk.choices, chunk.usage = [], self.generation.usage if self._has_usage else UNSET
        chunk.timings = self.timings
        return event(chunk)

    def _event(self, choice: Struct) -> bytes:
        self._chunk.choices = [choice]
        if self._is_continuous:
            self._chunk.usage = self.generation.usage
        return event(self._chunk)


def turn_request(body: SamplingBody, **given: Any) -> TurnRequest:
    """Return the request of a body.   given: what the two APIs have in different forms."""
    field = body.asked_tokens[0]
    return TurnRequest(
        is_stream=body.stream,
        request_id=body.request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        origin=lambda param: field if param == "max_tokens" else param,
        **given,
    )
