"""POST /v1/responses: OpenAI's Responses, as agents such as Codex use them.

`conversation_of` (input.py) makes the conversation of a body and of items from earlier turns, and
`ResponseWriter` (events.py) events and the answer of what is generated, apart from HTTP. A store of responses
goes around the two: it gives `ResponsesDialect` the earlier items, and keeps the events and the answer.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from msgspec import Raw
from msgspec.json import encode
from starlette.responses import Response

from pagoda.base.sampling_params import SamplingParams
from pagoda.server.conversation import check_chat
from pagoda.server.dialects.openai.body import cache_ttl_s
from pagoda.server.dialects.responses.bodies import InputItem, ReasoningParam, ResponsesRequest, TextParam
from pagoda.server.dialects.responses.events import (
    ResponseAnswer,
    ResponseConversation,
    ResponseReasoning,
    ResponseWriter,
    error_code,
)
from pagoda.server.dialects.responses.input import conversation_of
from pagoda.server.dialects.responses.tools import ResponsesToolChoice, ResponsesTools
from pagoda.server.errors import ApiError, ErrorDetail, ErrorResponse, error_type
from pagoda.server.sending import EventStream
from pagoda.server.served_model import ServedModel
from pagoda.server.state import ServerState
from pagoda.server.turn import Turn, TurnRequest, naming_fields


def response_error(error: ApiError, request_id: str) -> ErrorResponse:
    """Return an error in OpenAI's format, with the codes that agents understand."""
    return ErrorResponse(ErrorDetail(error.message, error_type(error.status), error.param, error_code(error)))


class ResponsesDialect:
    """OpenAI's Responses, of one request."""

    body = ResponsesRequest
    id_prefix = "resp_"

    def __init__(self, earlier: Sequence[InputItem] = ()) -> None:
        """earlier: items before those of the body."""
        self._earlier = earlier
        self._writer: ResponseWriter  # made with the request, because that may run on a thread

    def request(self, body: ResponsesRequest, model: ServedModel) -> TurnRequest:
        tools = ResponsesTools(body.tools or ())
        conversation, made = conversation_of(body, tools, self._earlier)
        structure = body.structure
        with naming_fields(made.origin):
            limits = model.llm.input_processor.limits.of_request
            check_chat(limits, conversation.messages, conversation.tools, None, None)
            params = SamplingParams.of_model(
                {"max_tokens": None, **model.default_sampling},
                max_tokens=body.max_output_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                seed=body.seed,
                logprobs=body.num_logprobs,
                structured_outputs=structure,
            )
        request_id = uuid.uuid4().hex  # a response may be asked for later, so its id is not that of a header
        is_summary = body.reasoning is not None and body.reasoning.summary not in (None, "none")
        response = _new_response(body, params, tools, self.id_prefix + request_id, body.model or model.names[0])
        self._writer = ResponseWriter(response, tools.named, is_summary)
        return TurnRequest(
            params,
            conversation,
            is_stream=body.stream,
            request_id=request_id,
            cache_ttl_s=cache_ttl_s(body.prompt_cache_key, body.prompt_cache_retention),
            origin=made.origin,
        )

    def answer(self, body: ResponsesRequest, turn: Turn, state: ServerState) -> ResponseWriter:
        self._writer.turn = turn
        if body.includes("reasoning.encrypted_content"):
            self._writer.seal = turn.seal
        return self._writer

    def failed(self, error: ApiError) -> Response:
        """Return the stream of a response that fails before anything is generated."""

        async def events() -> AsyncGenerator[bytes, None]:
            yield self._writer.opening()
            raise error

        return EventStream(events(), framing=self._writer.framing)


def _new_response(
    body: ResponsesRequest, params: SamplingParams, tools: ResponsesTools, response_id: str, model: str
) -> ResponseAnswer:
    """Return a response without output."""
    asked, choice = body.reasoning or ReasoningParam(), body.tool_choice
    return ResponseAnswer(
        id=response_id,
        created_at=int(time.time()),
        model=model,
        instructions=Raw(encode(body.instructions)),
        tools=Raw(encode(tools.kept)),
        tool_choice=Raw(encode(choice.shown if isinstance(choice, ResponsesToolChoice) else choice or "auto")),
        text=Raw(encode(_shown_text(body.text or TextParam()))),
        metadata=Raw(encode(body.metadata or {})),
        reasoning=ResponseReasoning(asked.effort, asked.summary),
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        temperature=params.temperature,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        user=body.user,
        store=body.store,
        background=body.background,
        previous_response_id=body.previous_response_id,
        conversation=None if body.conversation_id is None else ResponseConversation(body.conversation_id),
    )


def _shown_text(text: TextParam) -> dict[str, Any]:
    verbosity = {} if text.verbosity is None else {"verbosity": text.verbosity}
    return {"format": text.format or {"type": "text"}, **verbosity}
