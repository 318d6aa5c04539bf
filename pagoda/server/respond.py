"""The course of every turn: read the body, admit it, render, start, then stream the answer or gather it.

What is particular to an API is in its dialect (dialects/).
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Generic

from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.engine.outputs.mailbox import GatheredPart
from pagoda.server.body_reader import run_for_body
from pagoda.server.generation import Generation
from pagoda.server.history import SampledTurn
from pagoda.server.render import Rendered, render
from pagoda.server.request_starter import RawPrompts
from pagoda.server.request_state import request_state
from pagoda.server.sending import EventStream, cancel_on_disconnect, json_response, run_sized
from pagoda.server.served_model import ServedModel
from pagoda.server.state import state_of
from pagoda.server.turn import A, Answer, B, Dialect, Piece, Turn, naming_fields

_PLAIN_TOKENS = 16
"""So many tokens without log-probabilities take at most as long as one with them."""


async def respond(http: Request, dialect: Dialect[B, Answer]) -> Response:
    """Answer a request in a dialect.

    Raises the errors of `BodyReader.read`, the dialect, `render` and `RequestStarter.begin`, which the app turns into
    answers.
    """
    return await respond_to(http, dialect, await state_of(http).bodies.read(http, dialect.body))


async def respond_to(http: Request, dialect: Dialect[B, Answer], body: B) -> Response:
    """Answer a request whose body has been read. Raises as `respond`."""
    return await respond_with(http, await begin_turn(http, dialect, body))


async def respond_with(http: Request, running: "RunningTurn[Answer]") -> Response:
    """Answer with a turn that has begun."""
    if running.is_stream:
        return EventStream(running.frames(), running.close, running.answer.framing)
    with contextlib.closing(running):
        return await cancel_on_disconnect(http, running.whole())


async def begin_turn(http: Request, dialect: Dialect[B, A], body: B) -> "RunningTurn[A]":
    """Have the engine begin with a request whose body has been read. The caller must close the turn.

    Raises as `respond`.
    """
    state = state_of(http)
    picked = state.pick(http, body.model)
    request = await run_for_body(http, lambda: dialect.request(body, picked.model))
    params, num_prompts = request.params, request.num_prompts
    with naming_fields(request.origin):
        admitted = picked.model.starter.admitted(http, num_prompts, num_prompts * params.n, params.max_tokens)
        async with admitted as place:
            rendered = await render(http, picked.model, request)
            # Chosen only now: while the prompt was rendered, another request may have taken the same header's id.
            request_id = state.request_id(http, request.request_id, dialect.id_prefix, num_prompts)
            asked = RawPrompts(
                [one.prompt for one in rendered],
                [one.params for one in rendered],
                lora=picked.lora,
                add_special_tokens=request.add_special_tokens,
                priority=request.priority,
                cache_salt=request.cache_salt,
                is_stream=request.is_stream,
                cache_ttl_s=request.cache_ttl_s,
            )
            generation = await picked.model.starter.begin(http, place, asked, request_id)
    with contextlib.ExitStack() as at_error:
        at_error.callback(generation.close)
        sampled = _sampled_turn(http, picked.model, rendered)
        turn = Turn(
            *(request_id, int(time.time()), picked.name, request, generation, picked.model.llm.text),
            **({} if sampled is None else {"seal": sampled.seal, "note": sampled.note}),
        )
        running = RunningTurn(generation, rendered, dialect.answer(body, turn, state), request.is_stream, sampled)
        at_error.pop_all()
        return running


def _sampled_turn(http: Request, model: ServedModel, rendered: Sequence[Rendered]) -> SampledTurn | None:
    """Return what keeps the outputs of a turn for the next one; None if none is to be found again."""
    history, opened = model.history, [one.open_message for one in rendered]
    if history is None or not any(opened):
        return None
    return SampledTurn(history, history.owner_of(request_state(http).caller), opened, [one.form for one in rendered])


class RunningTurn(Generic[A]):
    """Makes an answer of the outputs of a generation, which counts until this is closed.

    sampled: what keeps the outputs for the next turn, None: nothing.
    """

    def __init__(
        self,
        generation: Generation,
        rendered: Sequence[Rendered],
        answer: A,
        is_stream: bool,
        sampled: SampledTurn | None = None,
    ) -> None:
        self._generation = generation
        self._sampled = sampled
        self.answer = answer
        self.is_stream = is_stream
        self.close = generation.close
        self._retells = answer.framing.retells
        self._retelling: list[Piece] = []
        self._readers = [[one.new_reader() for _ in range(one.params.n)] for one in rendered]

    @property
    def num_tokens(self) -> int:
        """Those of its prompts and outputs so far."""
        return self._generation.num_tokens

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames of a streamed answer."""
        if opening := self.answer.opening():
            yield opening
        begun: set[int] = set()
        async with self._generation.outputs() as deltas:
            async for index, delta in deltas:
                size = 0
                for output in delta.outputs:
                    size += len(output.logprobs or ())
                if index not in begun:  # the first one may come with log-probabilities of the prompt, or its text
                    begun.add(index)
                    size += self._generation.requests[index].num_prompt_tokens
                encoded = await run_sized(size, partial(self._frames, index, delta))
                if self._retelling:
                    encoded += await run_sized(self.size_so_far, self._retold)
                if self._sampled is not None and delta.finished:  # before the client can send its next turn
                    await self._sampled.remember()
                if encoded:
                    yield encoded
        size = self.size_so_far if self._retells else 0
        if closing := await run_sized(size, self.answer.closing):
            yield closing

    def cut(self) -> bytes:
        """Return the last frames of an answer to one prompt that ends now, because its client has left.

        What the reader holds back comes out, so that the arguments of a call are JSON as in any other answer.
        """
        output = CompletionOutput(0, "", [], finish_reason="abort")
        end = Piece(0, RequestOutput(self._generation.request_id), output, self._readers[0][0].read(output))
        return self._retold() + self.answer.frames(end) + self.answer.closing()

    @property
    def size_so_far(self) -> int:
        """The size of what has been sent so far, for `run_sized`."""
        num_tokens, params = self._generation.num_output_tokens, self._generation.sampling
        has_logprobs = params is not None and params.logprobs is not None
        return num_tokens if has_logprobs else num_tokens // _PLAIN_TOKENS

    def _frames(self, index: int, delta: RequestOutput) -> bytes:
        frames: list[bytes] = []
        for output in delta.outputs:
            piece = self._piece(index, delta, output)
            if self._retells and (self._readers[index][output.index].ends_part(piece.events) or self._retelling):
                self._retelling.append(piece)
            else:
                frames.append(self.answer.frames(piece))
        return b"".join(frames)

    def _retold(self) -> bytes:
        """Return the frames of pieces that end a part of the answer, which is then repeated, and of those after."""
        pieces, self._retelling = self._retelling, []
        return b"".join(map(self.answer.frames, pieces))

    async def whole(self) -> Response:
        """Return the response with the whole answer."""
        gathered: dict[tuple[int, int], GatheredPart] = {}
        last: dict[int, RequestOutput] = {}
        async with self._generation.outputs() as deltas:
            async for index, delta in deltas:
                last[index] = delta
                for output in delta.outputs:
                    if (part := gathered.get((index, output.index))) is not None:
                        part.add(output)
                    else:
                        gathered[index, output.index] = GatheredPart.of(output)

        def respond_whole() -> Response:
            outputs = [(index, gathered[index, at].merged()) for index, at in sorted(gathered)]
            pieces = [self._piece(index, last[index], output) for index, output in outputs]
            return json_response(self.answer.whole(pieces))

        response = await run_sized(self.num_tokens, respond_whole)
        if self._sampled is not None:
            await self._sampled.remember()
        return response

    def _piece(self, index: int, delta: RequestOutput, output: CompletionOutput) -> Piece:
        """Return what an output has said, after counting its reasoning, and what it has sampled."""
        if self._sampled is not None:
            self._sampled.add(index, output)
        reader = self._readers[index][output.index]
        before = reader.num_reasoning_tokens
        piece = Piece(index, delta, output, reader.read(output))
        if reader.reasons:
            known = self._generation.num_reasoning_tokens or 0
            piece.num_reasoning_tokens = reader.num_reasoning_tokens - before
            self._generation.num_reasoning_tokens = known + piece.num_reasoning_tokens
        return piece
