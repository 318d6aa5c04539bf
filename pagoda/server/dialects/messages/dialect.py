"""POST /v1/messages, /v1/messages/count_tokens: Anthropic's API.

What has no counterpart here is ignored: hosted tools and citations.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from pagoda.base.sampling_params import SamplingParams
from pagoda.base.text import encodable_json
from pagoda.server.body_reader import run_for_body
from pagoda.server.dialects.messages.bodies import (
    CountTokensRequest,
    MessagesRequest,
    cache_ttl_s,
    conversation_of,
    system_text,
)
from pagoda.server.dialects.messages.cache_diagnosis import Diagnosis, Diagnostics, Fingerprint, digest
from pagoda.server.errors import ApiError, error_type
from pagoda.server.render import count_prompt_tokens
from pagoda.server.respond import respond_to
from pagoda.server.routing import Router
from pagoda.server.sending import Framing, event, json_response
from pagoda.server.served_model import ServedModel
from pagoda.server.state import ServerState, state_of
from pagoda.server.turn import (
    CallDelta,
    Piece,
    ReasoningDelta,
    TextDelta,
    Turn,
    TurnEnd,
    TurnEvent,
    TurnRequest,
    naming_fields,
)

# ---- answers


class MessageUsage(Struct, frozen=True):
    """input_tokens: of the prompt, without those that the prefix cache had."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class Block(Struct):
    """A part of an answer: a text, a thought or a call. Only the fields of its type are sent."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class MessageAnswer(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    diagnostics: Diagnostics | UnsetType | None = UNSET


class MessageDelta(Struct, kw_only=True):
    """What an event adds. Only the fields of its type are sent; the last event of a message has no type here."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Struct, kw_only=True):
    """An event of a stream. Only the fields of its type are sent."""

    type: str
    message: MessageAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Block | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class TokenCountAnswer(Struct, frozen=True):
    input_tokens: int


class MessageErrorDetail(Struct, frozen=True):
    type: str
    message: str


class MessageError(Struct, frozen=True):
    error: MessageErrorDetail
    request_id: str
    type: Literal["error"] = "error"


_TOO_LONG = re.compile(r"maximum context length is (\d+) tokens.* the prompt has (?:at least )?(\d+) tokens")


def message_error(error: ApiError, request_id: str) -> MessageError:
    """Return an error in Anthropic's format."""
    message = error.message
    if found := _TOO_LONG.search(message):
        most, size = map(int, found.groups())
        # What Claude Code looks for. The longest prompt is a little shorter than the context.
        message = f"prompt is too long: {size} tokens > {min(most, size - 1)} maximum. {message}"
    special = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
    return MessageError(MessageErrorDetail(special.get(error.status, error_type(error.status)), message), request_id)


class MessageModel(Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class MessageModelList(Struct, frozen=True, kw_only=True):
    data: list[MessageModel]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


def is_client(scope: Scope) -> bool:
    """Return whether a request is from a client of this API, all of which send the header `anthropic-version`."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def model_list(state: ServerState) -> MessageModelList:
    """Return the models as Anthropic's clients read them."""
    names = state.models.all_names
    return MessageModelList(data=[model_card(state, one) for one in names], first_id=names[0], last_id=names[-1])


def model_card(state: ServerState, name: str) -> MessageModel:
    created = datetime.fromtimestamp(state.started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    longest = state.models.pick(name).model.max_model_len
    return MessageModel(id=name, display_name=name, created_at=created, max_input_tokens=longest, max_tokens=longest)


router = Router(error=MessageError, error_form=message_error)


@router.post("/v1/messages", answer=MessageAnswer, chunk=MessageEvent, body=MessagesRequest)
async def create_message(http: Request) -> Response:
    """Generate the assistant's next message, in the form of Anthropic's API."""
    state = state_of(http)
    body = await state.bodies.read(http, MessagesRequest)
    diagnosis = None
    if body.diagnostics is not None:
        now = await run_for_body(http, lambda: _fingerprint(body))
        diagnosis = await Diagnosis.of(
            http, state.pick(http, body.model).model, now, body.diagnostics.previous_message_id
        )
    return await respond_to(http, MessagesDialect(diagnosis), body)


def _fingerprint(body: MessagesRequest) -> Fingerprint:
    system, others = system_text(body.system), (body.thinking, body.tool_choice, body.output_config)
    return Fingerprint(
        body.model or "", digest(system), digest(body.tools), digest(others), [digest(one) for one in body.messages]
    )


@router.post("/v1/messages/count_tokens", answer=TokenCountAnswer, body=CountTokensRequest)
async def count_tokens(http: Request) -> Response:
    """Return how many tokens the prompt of /v1/messages would have."""
    state = state_of(http)
    body = await state.bodies.read(http, CountTokensRequest)
    picked = state.pick(http, body.model)
    conversation, made = await run_for_body(http, lambda: conversation_of(body))
    async with picked.model.starter.admitted(http, 1, needs_engine=False):
        with naming_fields(made.origin):
            num_tokens = await count_prompt_tokens(http, picked.model, conversation)
        return json_response(TokenCountAnswer(num_tokens))


class MessagesDialect:
    """Anthropic's messages."""

    body = MessagesRequest
    id_prefix = "msg_"

    def __init__(self, diagnosis: Diagnosis | None = None) -> None:
        """diagnosis: of the request, if it asks for one."""
        self._diagnosis = diagnosis

    def request(self, body: MessagesRequest, model: ServedModel) -> TurnRequest:
        conversation, made = conversation_of(body)
        structure = body.structure
        with naming_fields(made.origin):
            params = SamplingParams.of_model(
                model.default_sampling,
                max_tokens=min(body.max_tokens, model.max_model_len),  # Claude Code asks for 32,000 of any model
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
                stop=body.stop_sequences or None,
                seed=body.seed,
                structured_outputs=structure,
            )
        return TurnRequest(
            params, conversation, is_stream=body.stream, cache_ttl_s=cache_ttl_s(body), origin=made.origin
        )

    def answer(self, body: MessagesRequest, turn: Turn, state: ServerState) -> "MessageWriter":
        return MessageWriter(body, turn, self._diagnosis)


class MessageWriter:
    """Writes an answer as blocks, of which one is open at a time."""

    framing = Framing(lambda error, request_id: event(message_error(error, request_id), "error"), b"", retells=True)

    def __init__(self, body: MessagesRequest, turn: Turn, diagnosis: Diagnosis | None = None) -> None:
        self._body = body
        self._turn = turn
        self._diagnosis = diagnosis
        self._index = -1  # of the last block
        self._open: str | None = None  # its type
        self._thought = ""
        self._has_begun = False
        self._end: TurnEnd | None = None

    def opening(self) -> bytes:
        return b""  # the first event has the number of cached tokens, which is known with the first token

    def frames(self, piece: Piece) -> bytes:
        events = [one for event in self._visible(piece) for one in self._events_of(event)]
        return self._begin() + b"".join(event(one, one.type) for one in events)

    def closing(self) -> bytes:
        reason, sequence = self._reason(self._end)
        last = MessageDelta(stop_reason=reason, stop_sequence=sequence)
        events = [
            *self._close(),
            MessageEvent(type="message_delta", delta=last, usage=self._usage),
            MessageEvent(type="message_stop"),
        ]
        return self._begin() + b"".join(event(one, one.type) for one in events)

    def whole(self, pieces: Sequence[Piece]) -> MessageAnswer:
        """Return the message that the events of a stream make, in one."""
        answer = self._message()
        arguments: dict[int, list[str]] = {}
        events = [one for piece in pieces for event in self._visible(piece) for one in self._events_of(event)]
        for one in (*events, *self._close()):
            if one.content_block is not UNSET:
                answer.content.append(one.content_block)
            elif one.delta is not UNSET:
                _extend(answer.content[-1], one.delta)
                if one.delta.partial_json is not UNSET:
                    arguments.setdefault(len(answer.content) - 1, []).append(one.delta.partial_json)
        for at, parts in arguments.items():
            answer.content[at].input = encodable_json("".join(parts))
        if answer.content and self._end is not None and self._end.reason == "abort":
            answer.stop_reason = "pause_turn"  # a client that sends the answer back has it continued
        else:
            answer.stop_reason, answer.stop_sequence = self._reason(self._end)
        return answer

    def _message(self) -> MessageAnswer:
        message = MessageAnswer(id=self._turn.id, model=self._turn.model, content=[], usage=self._usage)
        if self._diagnosis is not None:
            message.diagnostics = self._diagnosis.diagnostics(self._turn)
        return message

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return event(MessageEvent(type="message_start", message=self._message()), "message_start")

    @property
    def _usage(self) -> MessageUsage:
        counts = self._turn.generation
        num_cached = counts.num_cached_tokens
        return MessageUsage(counts.num_prompt_tokens - num_cached, num_cached, counts.num_output_tokens)

    def _visible(self, piece: Piece) -> list[TurnEvent]:
        """Return the events of a piece; without thoughts, unless they were asked for."""
        return [one for one in piece.events if self._body.thinks or not isinstance(one, ReasoningDelta)]

    def _events_of(self, said: TurnEvent) -> list[MessageEvent]:
        match said:
            case ReasoningDelta(text):
                begun = self._into("thinking", Block("thinking", thinking="", signature=""))
                self._thought += text
                return [*begun, self._delta(MessageDelta(type="thinking_delta", thinking=text))]
            case TextDelta(text):
                begun = self._into("text", Block("text", text=""))
                return [*begun, self._delta(MessageDelta(type="text_delta", text=text))]
            case CallDelta(_, arguments, call_id, name):
                begun = []
                if name is not None:
                    call = Block("tool_use", id=call_id or "", name=name, input={})
                    begun = [*self._close(), *self._into("tool_use", call)]
                if arguments:
                    begun.append(self._delta(MessageDelta(type="input_json_delta", partial_json=arguments)))
                return begun
            case _:
                self._end = said
                if self._diagnosis is not None:
                    self._diagnosis.note(self._turn)
                return []

    def _into(self, kind: str, block: Block) -> list[MessageEvent]:
        """Open a block, after closing another one, unless one of this kind is open."""
        if self._open == kind:
            return []
        closed = self._close()
        self._index += 1
        self._open = kind
        return [*closed, MessageEvent(type="content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[MessageEvent]:
        """Close the open block, if there is one; a thought is signed before."""
        events: list[MessageEvent] = []
        if self._open == "thinking":
            events.append(self._delta(MessageDelta(type="signature_delta", signature=self._signature())))
        if self._open is not None:
            events.append(MessageEvent(type="content_block_stop", index=self._index))
        self._open, self._thought = None, ""
        return events

    def _signature(self) -> str:
        """Return what clients must find in a thought, or they break, and send back: the sampled tokens, sealed."""
        return self._turn.seal() or base64.b64encode(hashlib.sha256(self._thought.encode()).digest()).decode()

    def _delta(self, delta: MessageDelta) -> MessageEvent:
        return MessageEvent(type="content_block_delta", index=self._index, delta=delta)

    def _reason(self, end: TurnEnd | None) -> tuple[str, str | None]:
        """Return why the answer ended, and the stop sequence that ended it. Raises ApiError if it was aborted."""
        if end is None:
            return "end_turn", None
        if end.reason == "abort":  # which none of the API's reasons says
            raise ApiError(400, "the request was aborted before its answer was complete")
        if end.reason == "length":
            is_full = self._turn.generation.num_output_tokens < self._body.max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        if end.reason == "tool_calls":
            return "tool_use", None
        return ("stop_sequence", end.stop_reason) if isinstance(end.stop_reason, str) else ("end_turn", None)


def _extend(block: Block, delta: MessageDelta) -> None:
    """Add to a block what a delta says, but for arguments."""
    for name in ("text", "thinking", "signature"):
        if (more := getattr(delta, name)) is not UNSET:
            setattr(block, name, getattr(block, name) + more)
