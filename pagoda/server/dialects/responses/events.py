"""ResponseWriter: the events and the answer of one turn, in the form of OpenAI's Responses.

An answer is a list of items: messages, thoughts and calls. Each is announced, sent in pieces, and sent again whole.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from pagoda.server.dialects.openai.chat import ChatLogprob, chat_logprobs
from pagoda.server.dialects.responses.tools import CallerTool, CustomInput
from pagoda.server.errors import ApiError
from pagoda.server.generation import Generation
from pagoda.server.sending import Framing, event
from pagoda.server.turn import CallDelta, Piece, ReasoningDelta, TextDelta, Turn, TurnEnd

_encode = msgspec.json.Encoder().encode


class ResponsePart(Struct, kw_only=True):
    """A part of a message or a thought. Only the fields of its type are there."""

    type: Literal["output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[dict[str, Any]] | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class OutputItem(Struct, kw_only=True):
    """A part of an answer: a message, a thought or a call. Only the fields of its type are there.

    id: of the item; call_id: what the result of a call refers to.
    name, namespace: of the tool, as the request has them.   arguments: of a function, JSON.   input: of a custom tool.
    """

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[ResponsePart] | UnsetType = UNSET
    summary: list[ResponsePart] | UnsetType = UNSET
    encrypted_content: str | UnsetType | None = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    namespace: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, counts: Generation) -> "ResponseUsage":
        prompt, output = counts.num_prompt_tokens, counts.num_output_tokens
        reasoning = OutputTokensDetails(counts.num_reasoning_tokens or 0)
        return cls(prompt, InputTokensDetails(counts.num_cached_tokens), output, reasoning, prompt + output)


class ResponseFailure(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class ResponseConversation(Struct, frozen=True):
    id: str


class ResponseAnswer(Struct, kw_only=True):
    """A response. Fields of type Raw are as in the request, of whose size they may be."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"] = "in_progress"
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    instructions: Raw
    tools: Raw
    tool_choice: Raw
    text: Raw
    metadata: Raw
    reasoning: ResponseReasoning
    background: bool = False
    conversation: ResponseConversation | None = None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    store: bool = False
    temperature: float
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: str | None = None


class ResponseEvent(Struct, kw_only=True):
    """An event of a stream. Only the fields of its type are sent."""

    type: str
    sequence_number: int
    response: ResponseAnswer | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    part: ResponsePart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class _Form:
    """How an item is written.   id: its prefix.   event: the type of its deltas.   whole: the field of the full text.

    part, index: the type of its only part and the field with that one's number, if it has parts.   part_event: of it.
    """

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    event: str
    whole: str
    part: Literal["output_text", "reasoning_text", "summary_text"] | None = None
    part_event: str = ""
    index: str = ""


_CONTENT = ("response.content_part", "content_index")
_MESSAGE = _Form("msg", "message", "response.output_text", "text", "output_text", *_CONTENT)
_THOUGHT = _Form("rs", "reasoning", "response.reasoning_text", "text", "reasoning_text", *_CONTENT)
_SUMMARY = _Form(
    *("rs", "reasoning", "response.reasoning_summary_text", "text"),
    *("summary_text", "response.reasoning_summary_part", "summary_index"),
)
_FUNCTION = _Form("fc", "function_call", "response.function_call_arguments", "arguments")
_CUSTOM = _Form("ctc", "custom_tool_call", "response.custom_tool_call_input", "input")


@dataclass(slots=True)
class _OpenItem:
    """An item that is being sent.   place: the fields of its events.   item: as announced.

    custom: what reads the input out of a custom tool's arguments.   logprobs: each as JSON.
    """

    form: _Form
    item: OutputItem
    place: dict[str, Any]
    custom: CustomInput | None = None
    pieces: list[str] = field(default_factory=list[str])
    logprobs: list[Raw] = field(default_factory=list[Raw])


class ResponseWriter:
    """Writes an answer as events with their numbers.   response: as it is now; whole after the last event.

    turn: set before anything is written of what it generates.
    seal: returns what thoughts have as `encrypted_content`; "": nothing.
    kept: the events that were sent, if it is a list; who keeps them takes them out.
    """

    turn: Turn

    def __init__(self, response: ResponseAnswer, tools: Mapping[str, CallerTool], is_summary: bool = False) -> None:
        """response: without output.   tools: by the names in calls.   is_summary: thoughts are sent as summaries."""
        self.response = response
        self.framing = Framing(self._failed, b"", retells=True)
        self.kept: list[bytes] | None = None
        self.seal: Callable[[], str] = str
        self._tools = tools
        self._thought = _SUMMARY if is_summary else _THOUGHT
        self._events: list[ResponseEvent] = []  # that are not sent yet
        self._num_events = 0
        self._num_items = 0
        self._open: _OpenItem | None = None
        self._logprobs: list[ChatLogprob] = []  # of tokens whose text is still to come
        self._end: TurnEnd | None = None

    def opening(self) -> bytes:
        for name in ("created", "in_progress"):
            self._tell(f"response.{name}", response=replace(self.response, output=[]))
        return self._sent()

    def frames(self, piece: Piece) -> bytes:
        self._add(piece)
        return self._sent()

    def closing(self) -> bytes:
        self._finish()
        return self._sent()

    def whole(self, pieces: Sequence[Piece]) -> ResponseAnswer:
        for piece in pieces:
            self._add(piece)
        self._finish()
        return self.response

    def _failed(self, error: ApiError, request_id: str) -> bytes:
        self.response.status, self.response.error = "failed", failure_of(error)
        self._tell("response.failed", response=self.response)
        return self._sent()

    def _sent(self) -> bytes:
        """Return the events since the last call, encoded."""
        made, self._events = [event(one, one.type) for one in self._events], []
        if self.kept is not None:
            self.kept += made
        return b"".join(made)

    def _add(self, piece: Piece) -> None:
        """Tell what a piece says."""
        self._note_logprobs(piece)
        for one in piece.events:
            match one:
                case ReasoningDelta(text):
                    self._into(self._thought)
                    self._add_delta(text)
                case TextDelta(text):
                    self._into(_MESSAGE)
                    self._add_delta(text)
                case CallDelta(_, arguments, call_id, name):
                    if name is not None:
                        self._begin_call(call_id or "", name)
                    self._add_arguments(arguments)
                case TurnEnd():
                    self._end = one

    def _note_logprobs(self, piece: Piece) -> None:
        output, num_top = piece.output, self.turn.request.params.logprobs
        if output.logprobs is None or num_top is None:
            return
        # What begins a thought is known as a part of it only with the first words of that.
        num_known = min(piece.num_reasoning_tokens, len(self._logprobs))
        del self._logprobs[:num_known]
        first = piece.num_reasoning_tokens - num_known
        self._logprobs += chat_logprobs(output.token_ids[first:], output.logprobs[first:], num_top).content

    def _finish(self) -> None:
        """Tell the end."""
        reason = "stop" if self._end is None else self._end.reason
        is_whole = reason in ("stop", "tool_calls")
        self._close("completed" if is_whole else "incomplete")
        response = self.response
        response.usage = ResponseUsage.of(self.turn.generation)
        response.completed_at = int(time.time()) if is_whole else None
        if is_whole:
            response.status = "completed"
        elif reason == "length":
            response.status, response.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
        else:
            response.status = "cancelled"  # there is no event of this name
        self._tell(f"response.{'completed' if is_whole else 'incomplete'}", response=response)

    # ---- items, of which one is open at a time

    def _into(self, form: _Form) -> None:
        """Begin an item, unless one of this form is open."""
        if self._open is not None and self._open.form is form:
            return
        fields: dict[str, Any] = {"role": "assistant"} if form is _MESSAGE else {"summary": []}
        self._begin_item(form, **fields, content=UNSET if form is _SUMMARY else [])

    def _begin_call(self, call_id: str, name: str) -> None:
        tool = self._tools.get(name, CallerTool(name, None, False, ""))
        form = _CUSTOM if tool.is_custom else _FUNCTION
        named = {"name": tool.name} if tool.namespace is None else {"name": tool.name, "namespace": tool.namespace}
        opened = self._begin_item(form, call_id=call_id, **named, **{form.whole: ""})
        if tool.is_custom:
            opened.custom = CustomInput()

    def _add_arguments(self, arguments: str) -> None:
        assert self._open is not None
        custom = self._open.custom
        if text := arguments if custom is None else custom.feed(arguments):
            self._add_delta(text)

    def _begin_item(self, form: _Form, **fields: Any) -> _OpenItem:
        self._close("completed")
        number = self._num_items
        self._num_items += 1
        item_id = f"{form.id}_{self.response.id.removeprefix('resp_')}_{number}"
        item = OutputItem(id=item_id, type=form.type, status="in_progress", **fields)
        place = {"item_id": item_id, "output_index": number}
        self._tell("response.output_item.added", output_index=number, item=item)
        if form.part is not None:
            place[form.index] = 0
            self._tell(f"{form.part_event}.added", **place, part=_part(form.part, "", []))
        self._open = opened = _OpenItem(form, item, place)
        return opened

    def _add_delta(self, text: str) -> None:
        assert self._open is not None
        self._open.pieces.append(text)
        given: Any = UNSET
        if self._open.form is _MESSAGE:
            given = self._add_logprobs(self._open)
        self._tell(f"{self._open.form.event}.delta", **self._open.place, delta=text, logprobs=given)

    def _add_logprobs(self, message: _OpenItem) -> list[Raw]:
        """Add those that wait to a message, and return them: they are sent up to five times, and encoded once."""
        new, self._logprobs = [Raw(_encode(one)) for one in self._logprobs], []
        message.logprobs += new
        return new

    def _close(self, status: Literal["completed", "incomplete"]) -> None:
        """End the open item, if there is one."""
        if self._open is None:
            return
        if self._open.custom is not None and (rest := self._open.custom.end()):
            self._add_delta(rest)
        form, place, text = self._open.form, self._open.place, "".join(self._open.pieces)
        done: dict[str, Any] = {form.whole: text}
        if form is _MESSAGE:
            self._add_logprobs(self._open)  # of tokens without a text, as of one that has ended the answer
            done["logprobs"] = self._open.logprobs
        if form is _FUNCTION:
            done["name"] = self._open.item.name
        self._tell(f"{form.event}.done", **place, **done)
        if form.part is None:
            item = replace(self._open.item, status=status, **{form.whole: text})
        else:
            part = _part(form.part, text, self._open.logprobs)
            self._tell(f"{form.part_event}.done", **place, part=part)
            item = replace(self._open.item, status=status, **{form.index.removesuffix("_index"): [part]})
        if form is self._thought and (sealed := self.seal()):
            item.encrypted_content = sealed
        self.response.output.append(item)
        self._tell("response.output_item.done", output_index=place["output_index"], item=item)
        self._open = None

    def _tell(self, kind: str, **fields: Any) -> None:
        """Add an event. An item that it has is not changed later."""
        self._events.append(ResponseEvent(type=kind, sequence_number=self._num_events, **fields))
        self._num_events += 1


def _part(kind: Literal["output_text", "reasoning_text", "summary_text"], text: str, logprobs: Any) -> ResponsePart:
    if kind != "output_text":
        return ResponsePart(type=kind, text=text)
    return ResponsePart(type=kind, text=text, annotations=[], logprobs=logprobs)


# ---- failures

_CODES: Mapping[int, str] = {404: "model_not_found", 429: "rate_limit_exceeded", 503: "server_is_overloaded"}
TOO_LONG = "context_length_exceeded"
_LENGTH = "maximum context length"  # in the engine's message, as in OpenAI's


def error_code(error: ApiError) -> str | None:
    """Return what agents such as Codex look for in an error, None if they look for nothing."""
    if error.status == 404 and error.param != "model":
        return "previous_response_not_found" if error.param == "previous_response_id" else None
    if error.status == 400:
        return TOO_LONG if _LENGTH in error.message else None
    return _CODES.get(error.status, "server_error" if error.status >= 500 else None)


def failure_of(error: ApiError) -> ResponseFailure:
    """Return what a response says that has failed after it began. An engine that is gone comes again: Codex tries again
    after a "server_error", but not if the server is overloaded."""
    code = "server_error" if error.status >= 500 else error_code(error) or "invalid_prompt"
    after = "" if error.retry_after_s is None else f"; try again in {error.retry_after_s}s"
    return ResponseFailure(code, error.message + after)
