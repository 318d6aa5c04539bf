"""POST /v1/messages, /v1/messages/count_tokens: Anthropic's API.

What has no counterpart here is ignored: hosted tools and citations.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, ValidationError, convert, field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.base.text import encodable_json
from pagoda.server.body import Body, Flag, Int32, ModelBody, Name, Seed, TokenCount, UnservedField, one_of
from pagoda.server.body_reader import run_for_body
from pagoda.server.conversation import check_chat, check_named
from pagoda.server.dialects.cache_diagnosis import Diagnosis, Diagnostics, Fingerprint, digest
from pagoda.server.dialects.transcript import Transcript, function_tool
from pagoda.server.errors import ApiError, error_type
from pagoda.server.render import count_prompt_tokens
from pagoda.server.respond import respond_to
from pagoda.server.routing import Router
from pagoda.server.sending import Framing, event, json_response
from pagoda.server.served_model import ServedModel
from pagoda.server.state import ServerState, state_of
from pagoda.server.thinking import Thinking
from pagoda.server.turn import (
    CallDelta,
    Conversation,
    Piece,
    ReasoningDelta,
    TextDelta,
    Turn,
    TurnEnd,
    TurnEvent,
    TurnRequest,
    naming_fields,
)

# ---- requests


class CacheControl(Body, frozen=True):
    """Keep the prefix in the cache rather than others.

    ttl: For so long after its last use.
    """

    ttl: Annotated[str, one_of("5m", "1h")] = "5m"

    @property
    def seconds(self) -> int:
        return 300 if self.ttl == "5m" else 3600


class ContentBlock(Struct, frozen=True):
    """A part of a message, a tool's result or the system prompt.

    type: Which of the fields it has.
    text: Of type text.
    thinking: What the assistant thought before.
    signature: Of a thought: the server's own.
    source: Of an image or a document: where it is.
    id, name, input: Of a call: its id, the tool and the arguments.
    tool_use_id: Of a result: the id of its call.
    content: Of a result.
    cache_control: As of the whole request.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[ContentBlock] | None" = None
    cache_control: CacheControl | None = None


class InputMessage(Body, frozen=True):
    """A message.

    role: user, assistant or system.
    content: A text, or a list of blocks of type text, image, thinking, tool_use or tool_result.
    """

    role: Annotated[str, one_of("user", "assistant", "system")]
    content: str | list[ContentBlock]


class ToolParam(Struct, frozen=True):
    """A tool that the client runs.

    name: What calls name.
    input_schema: JSON schema of its arguments; hosted tools, which have none, are left out.
    description: What it does, for the model to read.
    strict: The arguments obey the schema by construction.
    cache_control: As of the whole request.
    """

    name: Name
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoiceParam(Body, frozen=True):
    """Whether a tool is called.

    type: Whether there is a call, and which.
    name: Of type tool: the tool.
    disable_parallel_tool_use: At most one call.
    """

    type: Annotated[str, one_of("auto", "any", "tool", "none")]
    name: str | None = None
    disable_parallel_tool_use: Flag = False


class ThinkingParam(Body, frozen=True):
    """Whether the model thinks before it answers, if its template can say so; what it thinks is sent only if it does.

    type: Whether it thinks.
    budget_tokens: Most tokens of what it thinks: then it answers.
    """

    type: Annotated[str, one_of("enabled", "disabled", "adaptive")]
    budget_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class DiagnosticsParam(Struct, frozen=True):
    """previous_message_id: the client's previous message; None: this is the first."""

    previous_message_id: str | None = None


class CountTokensRequest(ModelBody, kw_only=True, frozen=True):
    """POST /v1/messages/count_tokens

    messages: The conversation; the answer continues a last message of the assistant.
    system: The system prompt, a text or a list of text blocks.
    tools: What the model may call.
    tool_choice: Whether it calls a tool, and which.
    thinking: Whether it thinks first.
    output_config: `format`: of type json_schema, with a `schema` that the text follows; `effort`: how much it thinks.
    cache_control: Keep the prefix in the cache rather than others; the longest time of any part counts.
    """

    unserved: ClassVar[Mapping[str, UnservedField]] = {
        "mcp_servers": UnservedField("MCP servers; let the client run its tools")
    }
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[ContentBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: dict[str, Any] | None = None
    cache_control: CacheControl | None = None

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(model=self.model)
        limits.check_counts(self.messages, self.tools)
        made = Conversion(self)
        if not made.messages:
            raise RequestError("messages: have no content", "messages")
        with naming_fields(made.origin):
            check_chat(limits, made.messages, made.tools, None, None)
        limits.check_values({"output_config": self.output_config}, "grammar_chars")
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not made.tools:
            raise RequestError("tool_choice: needs tools", "tool_choice")
        if choice is not None and choice.type == "tool":
            check_named("tool_choice.name", choice.name, made.tools)

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def thinking_asked(self) -> Thinking:
        """How much it thinks; as the template has it where nothing is said."""
        if self.thinking is None or not self.thinks:
            return Thinking(is_on=None if self.thinking is None else False)
        effort = (self.output_config or {}).get("effort")
        return Thinking(True, effort if isinstance(effort, str) else None, self.thinking.budget_tokens)

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """The form of the text. Raises RequestError."""
        form = (self.output_config or {}).get("format")
        if form is None:
            return None
        if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            raise RequestError("output_config.format: expected type json_schema and a schema", "output_config.format")
        return StructuredOutputsParams(json=form["schema"], source="output_config.format")


class MessagesRequest(CountTokensRequest, kw_only=True, frozen=True):
    """POST /v1/messages

    max_tokens: Most tokens of the answer.
    stream: Send the answer as events, as it is generated.
    temperature: How random the output is: 0 takes the most likely token.
    top_p: Sample from the most likely tokens that have this probability together.
    top_k: Sample from so many most likely tokens.
    stop_sequences: Texts that end the output; they are cut off.
    seed: Makes the output repeatable; not a field of Anthropic's.
    diagnostics: Tell why no more of the prompt was cached, compared with that of `previous_message_id`.
    """

    max_tokens: TokenCount
    stream: Flag = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    stop_sequences: list[str] = field(default_factory=list)
    seed: Seed | None = None
    diagnostics: DiagnosticsParam | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        limits.check("stop_strings", len(self.stop_sequences), "stop_sequences")
        if self.diagnostics is not None:
            limits.check_names(**{"diagnostics.previous_message_id": self.diagnostics.previous_message_id})


class Conversion(Transcript):
    """A conversation in the form that chat templates read."""

    def __init__(self, body: CountTokensRequest) -> None:
        super().__init__()
        self.seals = [
            block.signature
            for message in body.messages
            for block in (message.content if message.role == "assistant" else ())
            if isinstance(block, ContentBlock) and block.signature is not None
        ]
        self._numbers: list[int] = []  # of tools
        if system := _system_text(body.system):
            self.add_system("system", system)
        for index, message in enumerate(body.messages):
            place = f"messages[{index}]"
            blocks = message.content
            blocks = [ContentBlock("text", blocks)] if isinstance(blocks, str) else blocks
            match message.role:
                case "assistant":
                    self.add(place, _assistant(blocks, place))
                case "system":
                    self.add_system(place, "".join(_text_of(block, place) for block in blocks))
                case _:
                    self._add_user(place, blocks)
        self.tools: list[dict[str, Any]] = []
        for index, tool in enumerate(body.tools or ()):
            if tool.input_schema is not None:
                self._numbers.append(index)
                self.tools.append(function_tool(tool.name, tool.input_schema, tool.description, tool.strict))
        self.join_texts()

    def origin(self, param: str) -> str:
        """Return the caller's name of a field."""
        if found := re.match(r"tools\[(\d+)\]", param):
            return f"tools[{self._numbers[int(found[1])]}].input_schema"
        return {"stop": "stop_sequences", "truncate_prompt_tokens": ""}.get(param, super().origin(param))

    def _add_user(self, place: str, blocks: Sequence[ContentBlock]) -> None:
        """Add the results of tools, then the rest with the images of the results."""
        parts: list[dict[str, Any]] = []
        for at, block in enumerate(blocks):
            where = f"{place}.content[{at}]"
            if block.type != "tool_result":
                parts += _parts(block, where)
                continue
            inner = block.content or ""
            shown = [part for one in (() if isinstance(inner, str) else inner) for part in _parts(one, where)]
            text = inner if isinstance(inner, str) else "\n".join(one["text"] for one in shown if "text" in one)
            self.add(place, {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": text})
            parts += [one for one in shown if "text" not in one]
        self.add_parts(place, parts)


_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""What Claude Code writes in front of its system prompt: with a new number in every request, nothing after it would be
found in the prefix cache."""


def _system_text(system: str | list[ContentBlock] | None) -> str:
    blocks = [ContentBlock("text", system)] if isinstance(system, str) else system or []
    texts = [_BILLING.sub("", _text_of(block, f"system[{at}]")) for at, block in enumerate(blocks)]
    return "\n".join(text for text in texts if text)


def _cache_ttl_s(body: CountTokensRequest) -> int | None:
    """Return the longest time for which a part of the request is to be cached."""
    marked: list[CacheControl | None] = [body.cache_control, *(tool.cache_control for tool in body.tools or ())]
    for blocks in (body.system, *(message.content for message in body.messages)):
        for block in () if isinstance(blocks, str | None) else blocks:
            marked.append(block.cache_control)
            marked += [inner.cache_control for inner in block.content or () if not isinstance(inner, str)]
    return max((mark.seconds for mark in marked if mark is not None), default=None)


def _text_of(block: ContentBlock, where: str) -> str:
    if block.type != "text" or block.text is None:
        raise RequestError(f"{where}: expected a text block, got type {block.type!r:.80}", where)
    return block.text


def _parts(block: ContentBlock, where: str) -> list[dict[str, Any]]:
    """Return a block as parts of a message, of which a document may be several. Raises RequestError."""
    source = block.source or {}
    if block.type != "document" or source.get("type") != "content":
        return [_part(block, where)]
    try:
        inner = convert(source.get("content"), str | list[ContentBlock])
    except ValidationError as error:
        raise RequestError(f"{where}.source.content: expected a text or a list of blocks: {error}", where) from None
    return [_part(one, where) for one in ([ContentBlock("text", inner)] if isinstance(inner, str) else inner)]


def _part(block: ContentBlock, where: str) -> dict[str, Any]:
    """Return a block as a part of a message. Raises RequestError for other blocks than texts and images."""
    source = block.source or {}
    match block.type, source.get("type"):
        case "image", "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
            return {"type": "image_url", "image_url": {"url": url}}
        case "image", "url":
            return {"type": "image_url", "image_url": {"url": source.get("url")}}
        case "document", "text" if isinstance(text := source.get("data"), str):
            return {"type": "text", "text": text}
        case "document", "text":
            raise RequestError(f"{where}.source.data: expected a text", where)
        case "document", "base64" | "url":
            text = "PDF documents are not read; send the text, in a document with a source of type text or content"
            raise RequestError(f"{where}: {text}", where)
        case "text", _:
            return {"type": "text", "text": _text_of(block, where)}
        case _:
            named = repr(block.type)[:80] + (f" with a source of type {source.get('type')!r:.80}" if source else "")
            raise RequestError(f"{where}: this server does not support blocks of type {named}", where)


def _assistant(blocks: Sequence[ContentBlock], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(blocks):
        where = f"{place}.content[{at}]"
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                if not block.name or block.input is None:
                    raise RequestError(f"{where}: a tool_use needs a name and an input", where)
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id or "", "type": "function", "function": function})
            case _:
                texts.append(_text_of(block, where))
    if texts or not calls:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def conversation_of(body: CountTokensRequest) -> tuple[Conversation, Conversion]:
    """Return the conversation of a body, and what knows its fields."""
    made, choice = Conversion(body), body.tool_choice
    last = made.messages[-1]
    is_prefilled = last["role"] == "assistant" and "tool_calls" not in last
    conversation = Conversation(
        made.messages,
        tools=[] if choice is not None and choice.type == "none" else made.tools,
        is_forced=choice is not None and choice.type in ("any", "tool"),
        only_tool=None if choice is None or choice.type != "tool" else choice.name,
        is_parallel=choice is None or not choice.disable_parallel_tool_use,
        template_kwargs={"enable_thinking": body.thinks},
        thinking=body.thinking_asked,
        add_generation_prompt=not is_prefilled,
        continue_final_message=is_prefilled,
        seals=made.seals,
    )
    return conversation, made


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
    system, others = _system_text(body.system), (body.thinking, body.tool_choice, body.output_config)
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
    async with picked.model.starter.admitted(http, 1):
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
        given = {
            # Claude Code asks for 32,000 tokens of any model.
            "max_tokens": min(body.max_tokens, model.max_model_len),
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences or None,
            "seed": body.seed,
            "structured_outputs": body.structure,
        }
        with naming_fields(made.origin):
            params = SamplingParams.of_model(
                model.default_sampling, **{name: one for name, one in given.items() if one is not None}
            )
        return TurnRequest(
            params, conversation, is_stream=body.stream, cache_ttl_s=_cache_ttl_s(body), origin=made.origin
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
