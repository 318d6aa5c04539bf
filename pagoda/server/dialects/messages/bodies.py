"""The bodies of Anthropic's API, and the conversations that they are."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct, ValidationError, convert

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.server.body import Body, Flag, Int32, ModelBody, Name, OrDefault, Seed, TokenCount, UnservedField, one_of
from pagoda.server.conversation import Conversation, check_chat, check_named
from pagoda.server.dialects.transcript import Transcript, function_tool
from pagoda.server.thinking import Thinking
from pagoda.server.turn import naming_fields


class CacheControl(Body, frozen=True):
    """Keep the prefix in the cache rather than others.

    ttl: For so long after its last use.
    """

    ttl: OrDefault[Annotated[str, one_of("5m", "1h")]] = "5m"

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

    @property
    def blocks(self) -> list[ContentBlock]:
        """The content as blocks."""
        return [ContentBlock("text", self.content)] if isinstance(self.content, str) else self.content


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

    def left_out(self) -> list[str]:
        return [f"tools.{tool.name}" for tool in self.tools or () if tool.input_schema is None]

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def thinking_asked(self) -> Thinking:
        """How much it thinks. A request that does not say gets no budget, and enable_thinking is false: see the end."""
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
    stop_sequences: Texts that end the output; they are cut off.
    seed: Makes the output repeatable; not a field of Anthropic's.
    diagnostics: Tell why no more of the prompt was cached, compared with that of `previous_message_id`.
    """

    max_tokens: TokenCount
    stream: Flag = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    stop_sequences: list[str] | None = None
    seed: Seed | None = None
    diagnostics: DiagnosticsParam | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        limits.check("stop_strings", len(self.stop_sequences or ()), "stop_sequences")
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
        if system := system_text(body.system):
            self.add_system("system", system)
        placed = [(f"messages[{index}]", message) for index, message in enumerate(body.messages)]
        # The answer to one that ends with the assistant's turn continues that, and clients send both back.
        for is_assistant, turns in itertools.groupby(placed, lambda one: one[1].role == "assistant"):
            if is_assistant:
                self._add_assistant(list(turns))
                continue
            for place, message in turns:
                if message.role == "system":
                    self.add_system(place, "".join(_text_of(block, place) for block in message.blocks))
                else:
                    self._add_user(place, message.blocks)
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

    def _add_assistant(self, turns: Sequence[tuple[str, InputMessage]]) -> None:
        """Add messages that follow each other as one, as Anthropic's API reads them.   turns: with their places."""
        blocks = ((f"{place}.content[{at}]", one) for place, turn in turns for at, one in enumerate(turn.blocks))
        self.add(turns[0][0], _assistant(blocks))

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


def system_text(system: str | list[ContentBlock] | None) -> str:
    blocks = [ContentBlock("text", system)] if isinstance(system, str) else system or []
    texts = [_BILLING.sub("", _text_of(block, f"system[{at}]")) for at, block in enumerate(blocks)]
    return "\n".join(text for text in texts if text)


def cache_ttl_s(body: CountTokensRequest) -> int | None:
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


def _assistant(blocks: Iterable[tuple[str, ContentBlock]]) -> dict[str, Any]:
    """Return blocks, each with its place, as one message of the assistant."""
    message: dict[str, Any] = {"role": "assistant"}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in blocks:
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
