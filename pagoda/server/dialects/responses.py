"""POST /v1/responses: OpenAI's Responses, as agents such as Codex use them.

`conversation_of` (responses_input.py) makes the conversation of a body and of items from earlier turns, and
`ResponseWriter` (response_events.py) events and the answer of what is generated, apart from HTTP. A store of responses
goes around the two: it gives `ResponsesDialect` the earlier items, and keeps the events and the answer.
"""

import uuid
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.sampling_params import SamplingParams
from pagoda.server.conversation import check_chat
from pagoda.server.dialects.chat import ChatLogprob, chat_logprobs
from pagoda.server.dialects.response_events import (
    ResponseAnswer,
    ResponseEvent,
    ResponseReasoning,
    ResponseUsage,
    ResponseWriter,
    error_code,
)
from pagoda.server.dialects.responses_bodies import InputItem, ReasoningParam, ResponsesRequest, TextParam
from pagoda.server.dialects.responses_input import conversation_of
from pagoda.server.errors import ApiError, ErrorDetail, ErrorResponse, error_type
from pagoda.server.respond import respond
from pagoda.server.routing import Router
from pagoda.server.sending import Framing, event
from pagoda.server.served_model import ServedModel
from pagoda.server.state import ServerState
from pagoda.server.turn import Piece, Turn, TurnRequest, naming_fields

_encode = msgspec.json.Encoder().encode


def response_error(error: ApiError, request_id: str) -> ErrorResponse:
    """Return an error in OpenAI's format, with the codes that agents understand."""
    return ErrorResponse(ErrorDetail(error.message, error_type(error.status), error.param, error_code(error)))


router = Router(error_form=response_error)


@router.post("/v1/responses", answer=ResponseAnswer, chunk=ResponseEvent, body=ResponsesRequest)
async def create_response(http: Request) -> Response:
    """Generate the assistant's next turn, in the form of OpenAI's Responses."""
    return await respond(http, ResponsesDialect())


class ResponsesDialect:
    """OpenAI's Responses, of one request."""

    body = ResponsesRequest
    id_prefix = "resp_"

    def __init__(self, earlier: Sequence[InputItem] = ()) -> None:
        """earlier: items before those of the body."""
        self._earlier = earlier
        self._response: ResponseAnswer  # made with the request, because that may run on a thread

    def request(self, body: ResponsesRequest, model: ServedModel) -> TurnRequest:
        conversation, made = conversation_of(body, self._earlier)
        given = {
            "max_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "seed": body.seed,
            "logprobs": body.num_logprobs,
            "structured_outputs": body.structure,
        }
        with naming_fields(made.origin):
            limits = model.llm.input_processor.limits.of_request
            check_chat(limits, conversation.messages, conversation.tools, None, None)
            params = SamplingParams.of_model(
                {"max_tokens": None, **model.default_sampling},
                **{name: one for name, one in given.items() if one is not None},
            )
        self._response = _new_response(body, params)
        # A response may be asked for later, so its id is its own, and not that of a header.
        return TurnRequest(params, conversation, is_stream=body.stream, request_id=uuid.uuid4().hex, origin=made.origin)

    def answer(self, body: ResponsesRequest, turn: Turn, state: ServerState) -> "ResponseFrames":
        response = self._response
        response.id, response.created_at, response.model = turn.id, turn.created, turn.model
        is_summary = body.reasoning is not None and body.reasoning.summary not in (None, "none")
        return ResponseFrames(ResponseWriter(response, is_summary), turn)


def _new_response(body: ResponsesRequest, params: SamplingParams) -> ResponseAnswer:
    """Return a response without what is known when it has begun."""
    asked = body.reasoning or ReasoningParam()
    return ResponseAnswer(
        id="",
        created_at=0,
        model="",
        instructions=Raw(_encode(body.instructions)),
        tools=Raw(b"[]"),
        tool_choice=Raw(b'"auto"'),
        text=Raw(_encode(body.text or TextParam(format={"type": "text"}))),
        metadata=Raw(_encode(body.metadata or {})),
        reasoning=ResponseReasoning(asked.effort, asked.summary),
        max_output_tokens=body.max_output_tokens,
        parallel_tool_calls=True,
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        temperature=params.temperature,
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        user=body.user,
    )


class ResponseFrames:
    """Sends the events of a response."""

    def __init__(self, writer: ResponseWriter, turn: Turn) -> None:
        self._writer = writer
        self._turn = turn
        self.framing = Framing(self._failed, b"")

    def opening(self) -> bytes:
        return _frames(self._writer.begin())

    def frames(self, piece: Piece) -> bytes:
        return _frames(self._writer.add(piece.events, self._logprobs(piece)))

    def closing(self) -> bytes:
        return _frames(self._writer.end(ResponseUsage.of(self._turn.generation)))

    def whole(self, pieces: Sequence[Piece]) -> ResponseAnswer:
        for piece in pieces:
            self._writer.add(piece.events, self._logprobs(piece))
        self._writer.end(ResponseUsage.of(self._turn.generation))
        return self._writer.response

    def _failed(self, error: ApiError, request_id: str) -> bytes:
        return _frames(self._writer.fail(error))

    def _logprobs(self, piece: Piece) -> Sequence[ChatLogprob]:
        output, num_top = piece.output, self._turn.request.params.logprobs
        if output.logprobs is None or num_top is None:
            return ()
        return chat_logprobs(output.token_ids, output.logprobs, num_top).content


def _frames(events: Iterable[ResponseEvent]) -> bytes:
    return b"".join(event(one, one.type) for one in events)
