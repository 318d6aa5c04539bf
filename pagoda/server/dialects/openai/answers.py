"""What the answers of OpenAI's two dialects have in common: token counts, log-probabilities, streams of chunks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from msgspec import UNSET, Struct, UnsetType

from pagoda.base.outputs import Logprob
from pagoda.server.dialects.openai.body import SamplingBody, cache_ttl_s
from pagoda.server.generation import Generation, RequestFigures, as_ms
from pagoda.server.sending import OPENAI_FRAMING, event
from pagoda.server.state import ServerState
from pagoda.server.turn import Piece, Turn, TurnRequest


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    """reasoning_tokens: up to the end of the reasoning, its tags included."""

    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """completion_tokens_details: of models whose chat template has reasoning."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class Timings(RequestFigures, kw_only=True):
    """What `return_timings` returns: llama.cpp's fields of this name, and those of RequestFigures.

    cache_n, prompt_n: tokens of the prompt that were found in the prefix cache, and those that were not.
    queue_reasons: what it waited for before its first step -> milliseconds.
    received: seconds since the epoch.   predicted_n: generated tokens, of all outputs.
    draft_n, draft_n_accepted: only with speculative decoding.
    """

    received: float
    queue_reasons: dict[str, float]
    cache_n: int
    prompt_n: int
    prompt_ms: float | UnsetType = UNSET
    prompt_per_token_ms: float | UnsetType = UNSET
    prompt_per_second: float | UnsetType = UNSET
    predicted_n: int
    predicted_ms: float | UnsetType = UNSET
    predicted_per_token_ms: float | UnsetType = UNSET
    predicted_per_second: float | UnsetType = UNSET
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


def usage_of(generation: Generation) -> Usage:
    """Return the token counts so far."""
    prompt, output = generation.num_prompt_tokens, generation.num_output_tokens
    reasoning = generation.num_reasoning_tokens
    details = None if reasoning is None else CompletionTokensDetails(reasoning)
    return Usage(prompt, output, prompt + output, PromptTokensDetails(generation.num_cached_tokens), details)


def timings_of(generation: Generation) -> Timings:
    """Return the durations so far."""
    figures, times = generation.figures, generation.times
    num_missed = figures.prompt_tokens - figures.cached_tokens
    reasons = times.queue_reasons if times is not None else {}
    timings = Timings(
        **{name: getattr(figures, name) for name in figures.__struct_fields__},
        received=round(time.time() - (time.perf_counter() - generation.arrived_s), 3),
        queue_reasons={reason: as_ms(seconds) for reason, seconds in reasons.items()},
        cache_n=figures.cached_tokens,
        prompt_n=num_missed,
        predicted_n=figures.output_tokens,
        draft_n=figures.draft_tokens,
        draft_n_accepted=figures.accepted_draft_tokens,
    )
    if (prompt_ms := figures.prefill_ms) is not UNSET:
        timings.prompt_ms = prompt_ms
        timings.prompt_per_token_ms, timings.prompt_per_second = _per_token(num_missed, prompt_ms)
    if (decode_ms := figures.decode_ms) is not UNSET:
        timings.predicted_ms = decode_ms
        timings.predicted_per_token_ms, timings.predicted_per_second = _per_token(figures.output_tokens, decode_ms)
    return timings


def _per_token(num_tokens: int, ms: float) -> tuple[float, float]:
    """Return milliseconds per token, and tokens per second; 0 where they have no meaning."""
    return round(ms / num_tokens, 3) if num_tokens else 0.0, round(num_tokens * 1e3 / ms, 2) if ms else 0.0


class Chunk(Protocol):
    """An event of a stream: one struct per stream, whose fields are set again for every event."""

    choices: list[Any]
    usage: Usage | UnsetType | None
    timings: Timings | UnsetType


C = TypeVar("C", bound=Chunk)
W = TypeVar("W", bound=Struct)


class ChunkedAnswer(ABC, Generic[C, W]):
    """An answer whose stream is of chunks.   chunk: the event that is sent next.

    The last has the usage, if that was asked for or is forced, and the timings, if those were asked for.
    """

    framing = OPENAI_FRAMING

    def __init__(
        self, body: SamplingBody, turn: Turn, state: ServerState, chunk: Callable[..., C], whole: Callable[..., W]
    ) -> None:
        """chunk, whole: make an event, and a whole answer."""
        self.turn = turn
        self.generation = turn.generation
        self.writes_ids = state.writes_ids(body)  # tokens of log-probabilities
        self._timings = (body.wants_timings, body.timings_per_token)
        options = body.stream_options
        forces_usage = state.config.answer_defaults.enable_force_include_usage
        self._has_usage = forces_usage or (options is not None and options.include_usage)
        self._is_continuous = self._has_usage and (forces_usage if options is None else options.continuous_usage_stats)
        self._head = {"id": turn.id, "created": turn.created, "model": turn.model}
        self._whole = whole
        self.chunk = chunk(**self._head, choices=[])
        self.chunk.usage = None if self._has_usage else UNSET

    def opening_choices(self) -> Iterable[Struct]:
        """Iterate over the choices that are sent before anything is generated."""
        return ()

    @abstractmethod
    def choice(self, piece: Piece) -> Struct | None:
        """Return the choice of one event, or None if there is nothing to send yet."""

    @abstractmethod
    def whole(self, pieces: Sequence[Piece]) -> W:
        """Return the whole answer."""

    def answer_of(self, choices: Sequence[Struct]) -> W:
        """Return the whole answer with these choices."""
        return self._whole(**self._head, choices=choices, usage=usage_of(self.generation), timings=self._last_timings)

    @property
    def _last_timings(self) -> Timings | UnsetType:
        """Those of all, if they were asked for."""
        return timings_of(self.generation) if self._timings[0] else UNSET

    def opening(self) -> bytes:
        return b"".join(self._event(choice) for choice in self.opening_choices())

    def frames(self, piece: Piece) -> bytes:
        if (choice := self.choice(piece)) is None:
            return b""
        if self._timings[1]:
            self.chunk.timings = timings_of(self.generation)
        return self._event(choice)

    def closing(self) -> bytes:
        if not self._has_usage and not self._timings[0]:
            return b""
        chunk = self.chunk
        chunk.choices, chunk.usage = [], usage_of(self.generation) if self._has_usage else UNSET
        chunk.timings = self._last_timings
        return event(chunk)

    def _event(self, choice: Struct) -> bytes:
        self.chunk.choices = [choice]
        if self._is_continuous:
            self.chunk.usage = usage_of(self.generation)
        return event(self.chunk)


def turn_request(body: SamplingBody, **given: Any) -> TurnRequest:
    """Return the request of a body.   given: what the two APIs have in different forms."""
    field = body.asked_tokens[0]
    return TurnRequest(
        is_stream=body.stream,
        request_id=body.request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        cache_ttl_s=cache_ttl_s(body.prompt_cache_key, body.prompt_cache_retention),
        origin=lambda param: field if param == "max_tokens" else param,
        **given,
    )


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt token: token id -> its log-probability; None for the first token."""


LogprobDicts = Sequence[dict[int, Logprob] | None]


def prompt_logprobs(logprobs: LogprobDicts) -> PromptLogprobs:
    """Return, per prompt token, token id -> its log-probability; None for the first."""
    return [
        None
        if entry is None
        else {str(i): PromptLogprob(finite(v.logprob), v.rank, v.decoded_token) for i, v in entry.items()}
        for entry in logprobs
    ]


def token_text(token_id: int, entry: dict[int, Logprob]) -> str:
    decoded = entry[token_id].decoded_token
    return decoded if decoded is not None else id_text(token_id)


def shown_token(token_id: int, entry: dict[int, Logprob], as_ids: bool) -> str:
    return id_text(token_id) if as_ids else token_text(token_id, entry)


def id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def finite(value: float) -> float:
    """Return the value with -inf replaced by -9999.0, as OpenAI does: JSON has no infinity."""
    return max(value, -9999.0)
