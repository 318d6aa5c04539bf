"""The course of every request for generated text: parse, check, start, then stream the answer or gather it.

An API (text completions, chat) says how its requests become prompts and parameters (`TextApi.prepare`), and how outputs
become choices of its answers (`AnswerFormat`); everything else is here.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response
from msgspec import UNSET, Struct, UnsetType

from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.inputs.prompts import Prompt
from pagoda.server.answers import Timings, Usage
from pagoda.server.body import read_body
from pagoda.server.generation import Generation
from pagoda.server.json_answer import JsonAnswer
from pagoda.server.sampling_body import SamplingBody
from pagoda.server.state import ServerState, state_of
from pagoda.server.streams import EventStream, cancel_on_disconnect, event
from pagoda.server.turns import Turns
from pagoda.server.usage import usage_of

B = TypeVar("B", bound=SamplingBody, contravariant=True)


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that an answer and all events of its stream begin with.   created: seconds since the epoch."""

    id: str
    created: int
    model: str


class Chunk(Protocol):
    """An event of a stream: one struct per stream, whose fields are set again for every event."""

    choices: list[Any]
    usage: Usage | UnsetType
    timings: Timings | UnsetType


class AnswerFormat(Protocol):
    """Turns the outputs of one generation into the choices of one answer, either of a stream or of a whole one."""

    def chunk(self) -> Any:
        """Return the struct for the events of a stream (a Chunk), without choices."""
        ...

    def opening(self) -> Iterable[Struct]:
        """Return the choices of the events that are sent before anything is generated."""
        ...

    async def chunk_choice(self, index: int, delta: RequestOutput, output: CompletionOutput) -> Struct | None:
        """Return the choice of one event, or None if there is nothing to send yet.   index: of the prompt."""
        ...

    async def add(self, index: int, delta: RequestOutput, output: CompletionOutput) -> None:
        """Add an output to the whole answer.   index: of the prompt."""
        ...

    async def whole(self, usage: Usage, timings: Timings | UnsetType) -> Struct:
        """Return the whole answer."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request: what to generate, and how to answer.   add_special_tokens: as for `Generator.begin`."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    answer_format: Callable[[Head, Generation], AnswerFormat]
    add_special_tokens: bool = True


class TextApi(Protocol[B]):
    """One of OpenAI's APIs for generated text.   id_prefix: of the ids of its answers."""

    id_prefix: str

    async def prepare(self, http: Request, state: ServerState, body: B) -> Prepared:
        """Check what the types of the body cannot express, and render the prompts. Raises ApiError, RequestError."""
        ...


S = TypeVar("S", bound=SamplingBody)


async def respond(http: Request, kind: type[S], api: TextApi[S]) -> Response:
    """Answer a request for generated text.   kind: of the request's body.

    Raises the errors of `read_body`, `prepare` and `Generator.begin`, which the application turns into answers.
    """
    state = state_of(http)
    body = await read_body(http, kind, state.request_limits)
    lora = state.adapter_of(body.model)
    prepared = await api.prepare(http, state, body)
    # Chosen only now: while the prompt was rendered, another request may have taken the same header's id.
    request_id = state.request_id(http, body.request_id, api.id_prefix)
    generation = await state.generator.begin(
        http, body, prepared.prompts, prepared.params, request_id, lora, prepared.add_special_tokens
    )
    with contextlib.ExitStack() as at_end:
        at_end.callback(generation.close)
        head = Head(request_id, int(time.time()), body.model or state.model_names[0])
        answer_format = prepared.answer_format(head, generation)
        if body.stream:
            at_end.pop_all()
            return EventStream(stream_events(generation, answer_format, body), generation.close)
        answer = await cancel_on_disconnect(http, gather(generation, answer_format, body))
        return JsonAnswer(answer)


async def stream_events(
    generation: Generation, answer_format: AnswerFormat, body: SamplingBody
) -> AsyncGenerator[bytes, None]:
    """Yield the answer as server-sent events, the last of them with the usage if that was asked for."""
    options = body.stream_options
    continuous = options is not None and options.continuous_usage_stats
    chunk: Chunk = answer_format.chunk()
    choice: Struct | None
    turns = Turns()
    for choice in answer_format.opening():
        chunk.choices = [choice]
        yield event(chunk)
    async with generation.outputs() as deltas:
        async for index, delta in deltas:
            for output in delta.outputs:
                choice = await answer_format.chunk_choice(index, delta, output)
                if choice is None:
                    continue
                chunk.choices = [choice]
                if continuous:
                    chunk.usage = usage_of(generation)
                yield event(chunk)
                await turns.did(_work(delta, output))
    if options is not None and options.include_usage:
        chunk.choices, chunk.usage = [], usage_of(generation)
        if body.return_timings:
            chunk.timings = generation.timings
        yield event(chunk)


async def gather(generation: Generation, answer_format: AnswerFormat, body: SamplingBody) -> Struct:
    """Return the whole answer."""
    turns = Turns()
    async with generation.outputs() as deltas:
        async for index, delta in deltas:
            for output in delta.outputs:
                await answer_format.add(index, delta, output)
                await turns.did(_work(delta, output))
    return await answer_format.whole(usage_of(generation), generation.timings if body.return_timings else UNSET)


def _work(delta: RequestOutput, output: CompletionOutput) -> int:
    """Return how much work the choice of an output is, in units of Turns."""
    return 2 + len(output.logprobs or ()) + len(delta.prompt_logprobs or ())
