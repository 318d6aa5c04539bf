"""The course of every request for generated text: parse, check, start, then stream the answer or gather it.

An API (text completions, chat) says how its requests become prompts and parameters (`PlanAnswer`), and how outputs
become choices of its answers (`AnswerFormat`); everything else is here.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.inputs.prompts import Prompt
from pagoda.engine.outputs.mailbox import GatheredPart
from pagoda.server.answers import Timings, Usage
from pagoda.server.generation import Generation, RawPrompts
from pagoda.server.sampling_body import SamplingBody
from pagoda.server.sending import EventStream, cancel_on_disconnect, event, json_response, run_sized
from pagoda.server.state import ServerState, state_of


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that an answer and all events of its stream begin with.   created: seconds since the epoch."""

    id: str
    created: int
    model: str


class Chunk(Protocol):
    """An event of a stream: one struct per stream, whose fields are set again for every event."""

    choices: list[Any]
    usage: Usage | UnsetType | None
    timings: Timings | UnsetType


WholeOutput = tuple[int, RequestOutput, CompletionOutput]
"""Index of the prompt, its last delta, and one of its outputs, whole."""


class AnswerFormat(Protocol):
    """Turns the outputs of one generation into the choices of one answer, either of a stream or of a whole one.

    `chunk_choice` and `whole` may be called on a thread.
    """

    def chunk(self) -> Any:
        """Return the struct for the events of a stream (a Chunk), without choices."""
        ...

    def opening(self, chunk: Any) -> Iterable[Struct]:
        """Iterate over the choices of the events of `chunk` that are sent before anything is generated."""
        ...

    def chunk_choice(self, index: int, delta: RequestOutput, output: CompletionOutput) -> Struct | None:
        """Return the choice of one event, or None if there is nothing to send yet.   index: of the prompt."""
        ...

    def whole(self, outputs: Sequence[WholeOutput], timings: Timings | UnsetType) -> Struct:
        """Return the whole answer."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """A checked request: what to generate, and how to answer.   add_special_tokens: as for RawPrompts."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    answer_format: Callable[[Head, Generation], AnswerFormat]
    add_special_tokens: bool = True


B = TypeVar("B", bound=SamplingBody)
PlanAnswer = Callable[[Request, ServerState, B], Awaitable[AnswerPlan]]
"""Checks what the types of a body cannot express, and renders its prompts. Raises ApiError, RequestError."""


async def respond(http: Request, kind: type[B], id_prefix: str, plan: PlanAnswer[B]) -> Response:
    """Answer a request for generated text.   kind: of the request's body.   id_prefix: of the answer's id.

    Raises the errors of `BodyReader.read`, `plan` and `RequestStarter.begin`, which the app turns into answers.
    """
    state = state_of(http)
    body = await state.bodies.read(http, kind)
    lora = state.adapter_of(body.model)
    http.scope["state"]["timings"]["model"] = body.model or state.model_names[0]
    num_outputs = body.num_prompts * body.num_outputs
    async with state.starter.admitted(http, body.num_prompts, num_outputs, body.asked_tokens[1]) as place:
        planned = await plan(http, state, body)
        # Chosen only now: while the prompt was rendered, another request may have taken the same header's id.
        request_id = state.request_id(http, body.request_id, id_prefix, len(planned.prompts))
        params = [planned.params] * len(planned.prompts)
        asked = RawPrompts(planned.prompts, params, (), lora, planned.add_special_tokens)
        generation = await state.starter.begin(http, place, body, asked, request_id)
    with contextlib.ExitStack() as at_end:
        at_end.callback(generation.close)
        head = Head(request_id, int(time.time()), body.model or state.model_names[0])
        answer_format = planned.answer_format(head, generation)
        if body.stream:
            at_end.pop_all()
            return EventStream(stream_events(generation, answer_format, body, state.forces_usage), generation.close)
        return await cancel_on_disconnect(http, whole_answer(generation, answer_format, body))


async def stream_events(
    generation: Generation, answer_format: AnswerFormat, body: SamplingBody, forces_usage: bool = False
) -> AsyncGenerator[bytes, None]:
    """Yield the answer as server-sent events.

    The last has the usage, if that was asked for or is forced, and the timings, if those were asked for.
    """
    options = body.stream_options
    has_usage = forces_usage or (options is not None and options.include_usage)
    is_continuous = forces_usage if options is None else has_usage and options.continuous_usage_stats
    chunk: Chunk = answer_format.chunk()
    chunk.usage = None if has_usage else UNSET
    for choice in answer_format.opening(chunk):
        chunk.choices = [choice]
        if is_continuous:
            chunk.usage = generation.usage
        yield event(chunk)

    def events(index: int, delta: RequestOutput) -> bytes:
        encoded: list[bytes] = []
        for output in delta.outputs:
            choice = answer_format.chunk_choice(index, delta, output)
            if choice is not None:
                chunk.choices = [choice]
                if is_continuous:
                    chunk.usage = generation.usage
                if body.timings_per_token:
                    chunk.timings = generation.timings
                encoded.append(event(chunk))
        return b"".join(encoded)

    begun: set[int] = set()
    async with generation.outputs() as deltas:
        async for index, delta in deltas:
            size = sum(len(output.logprobs or ()) for output in delta.outputs)
            if index not in begun:  # the first one may come with log-probabilities of the prompt, or its text
                begun.add(index)
                size += generation.requests[index].num_prompt_tokens
            encoded = await run_sized(size, lambda index=index, delta=delta: events(index, delta))
            if encoded:
                yield encoded
    if has_usage or body.wants_timings:
        chunk.choices, chunk.usage = [], generation.usage if has_usage else UNSET
        if body.wants_timings:
            chunk.timings = generation.timings
        yield event(chunk)


async def whole_answer(generation: Generation, answer_format: AnswerFormat, body: SamplingBody) -> Response:
    """Return the response with the whole answer."""
    gathered: dict[tuple[int, int], GatheredPart] = {}
    last: dict[int, RequestOutput] = {}
    async with generation.outputs() as deltas:
        async for index, delta in deltas:
            last[index] = delta
            for output in delta.outputs:
                if (part := gathered.get((index, output.index))) is not None:
                    part.add(output)
                else:
                    gathered[index, output.index] = GatheredPart.of(output)
    timings = generation.timings if body.wants_timings else UNSET

    def respond_whole() -> Response:
        outputs = [(index, last[index], gathered[index, at].merged()) for index, at in sorted(gathered)]
        return json_response(answer_format.whole(outputs, timings))

    return await run_sized(generation.usage.total_tokens, respond_whole)
