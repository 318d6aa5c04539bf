"""POST /v1/chat/completions"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.errors import RequestError
from pagoda.base.outputs import CompletionOutput, Logprob
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.answers.chat_answers import text_of_content
from pagoda.engine.images.source import take_images
from pagoda.engine.inputs.prompt_embeds import take_embeds
from pagoda.server.body import Body, Flag, NumTop, OrDefault, TokenCount, one_of
from pagoda.server.conversation import Conversation, Messages, Tools, check_chat, check_named
from pagoda.server.dialects.openai.answers import (
    ChunkedAnswer,
    LogprobDicts,
    PromptLogprobs,
    Timings,
    Usage,
    finite,
    prompt_logprobs,
    shown_token,
    token_text,
    turn_request,
)
from pagoda.server.dialects.openai.body import TEXT_ONLY, SamplingBody, unserved_with
from pagoda.server.errors import ApiError
from pagoda.server.respond import respond
from pagoda.server.routing import Router
from pagoda.server.served_model import ServedModel
from pagoda.server.state import ServerState
from pagoda.server.thinking import Thinking
from pagoda.server.turn import CallDelta, Piece, Turn, TurnRequest, naming_conversation

router = Router()

# ---- requests


class NamedTool(Body, kw_only=True, frozen=True):
    """The tool that the model must call.

    function: Its `name`.
    type: There is one kind.
    """

    function: dict[str, str]
    type: OrDefault[Annotated[str, one_of("function")]] = "function"


class ChatCompletionRequest(SamplingBody, kw_only=True, frozen=True):
    """POST /v1/chat/completions

    messages: The conversation.
    max_tokens: Most tokens of an output; if not given, as many as the model's context has left.
    max_completion_tokens: The same; goes before `max_tokens`.
    logprobs: Tell the log-probability of each token.
    top_logprobs: And so many of the most likely tokens; -1: as many as the server allows.
    parallel_tool_calls: False: at most one call.
    continue_final_message: Go on with the last message, instead of answering it.
    echo: Begin the answer with the text of the last message.
    include_reasoning: Tell the model's reasoning.
    reasoning_effort: How much the model thinks first: none, minimal, low, medium, high, or a word of its template.
    documents: A variable of the template.
    add_special_tokens: Add the tokenizer's own, such as the one that begins a text; most templates write them.
    """

    unserved = unserved_with(TEXT_ONLY, "chat completion", "/v1/completions")
    messages: Annotated[Messages, Meta(min_length=1)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: Flag = False
    top_logprobs: NumTop | None = None
    tools: Tools | None = None
    tool_choice: Annotated[str, one_of("none", "auto", "required")] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | UnsetType | None = UNSET
    continue_final_message: Flag = False
    echo: Flag = False
    include_reasoning: Flag = True
    # for the chat template
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    add_special_tokens: Flag = False

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        limits.check_lists_of_prompts(self, 1)
        check_chat(limits, self.messages, self.tools, self.chat_template, self.chat_template_kwargs)
        limits.check_values({"documents": self.documents})
        limits.check_names(reasoning_effort=self.reasoning_effort)
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, name) and not self.logprobs:
                raise RequestError(f"{name}: needs logprobs to be true", name)
        if self.continue_final_message and self.add_generation_prompt is True:
            raise RequestError("continue_final_message: excludes add_generation_prompt", "continue_final_message")
        if self.tool_choice is not None and self.tool_choice != "none" and not self.tools:
            raise RequestError("tool_choice: needs tools", "tool_choice")
        if isinstance(self.tool_choice, NamedTool):
            check_named("tool_choice", self.tool_choice.function.get("name"), self.tools or [])

    @property
    def num_top(self) -> int:
        """Entries of `top_logprobs` per token; -1: as many as the server allows."""
        return len(set(self.logprob_token_ids)) if self.logprob_token_ids else self.top_logprobs or 0

    @property
    def conversation(self) -> Conversation:
        choice, documents = self.tool_choice, self.documents
        only = choice.function["name"] if isinstance(choice, NamedTool) else None
        named: dict[str, Any] = {} if documents is None else {"documents": documents}
        return Conversation.of(
            self,
            self.messages,
            tools=(self.tools or []) if choice != "none" else [],
            is_forced=choice == "required" or only is not None,
            only_tool=only,
            is_parallel=self.parallel_tool_calls is not False,
            template_kwargs=named | (self.chat_template_kwargs or {}),
            thinking=Thinking(effort=self.reasoning_effort),
        )


class BatchChatRequest(ChatCompletionRequest, kw_only=True, frozen=True):
    """POST /v1/chat/completions/batch: without tools, images, streams and beam searches, one answer to each.

    messages: The conversations.
    """

    messages: Annotated[list[Messages], Meta(min_length=1)]  # type: ignore[assignment]  # of all of them

    def check(self, limits: RequestLimits) -> None:
        limits.check("prompts", self.num_prompts, "messages")
        limits.check_lists_of_prompts(self, self.num_prompts)
        limits.check("messages", sum(map(len, self.messages)), "messages")
        together = [message for messages in self.messages for message in messages]
        limits.check_chat(take_embeds(together)[0], None, None, None)
        if take_images(together)[1]:
            raise RequestError("messages: conversations of a batch have no images; send each on its own", "messages")
        neutral = {"n": (None, 1), "stream": (False,), "tools": (None, []), "use_beam_search": (False,)}
        for name, values in {**neutral, "prompt_logprobs": (None,)}.items():
            if getattr(self, name) not in values:
                raise RequestError(f"{name}: is not for batches; send each conversation on its own", name)
        for at, messages in enumerate(self.messages):
            with naming_conversation(at):
                if at == 0:  # what they have in common is checked once
                    self.each[0].check(limits)
                else:
                    check_chat(limits, messages, None, None, None)

    @property
    def num_prompts(self) -> int:
        """How many conversations there are."""
        return len(self.messages)

    @property
    def each(self) -> list[ChatCompletionRequest]:
        """The conversations as requests of their own."""
        common = {name: getattr(self, name) for name in self.__struct_fields__ if name != "messages"}
        return [ChatCompletionRequest(messages=messages, **common) for messages in self.messages]  # type: ignore[arg-type]


# ---- answers


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class FunctionCall(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class MessageToolCall(Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class DeltaToolCall(Struct, frozen=True, kw_only=True):
    """A piece of a call; the first one has id, type and name, and the arguments of all make the call's."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class AssistantMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[MessageToolCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletionResponse(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: None = None
    system_fingerprint: None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    timings: Timings | UnsetType = UNSET


class ChatDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


# ---- the dialect


@router.post(
    "/v1/chat/completions",
    answer=ChatCompletionResponse,
    chunk=ChatCompletionChunk,
    body=ChatCompletionRequest,
)
async def create_chat_completion(http: Request) -> Response:
    """Generate the assistant's next message in a conversation."""
    return await respond(http, CHAT)


class ChatDialect:
    """OpenAI's conversations."""

    body = ChatCompletionRequest
    id_prefix = "chatcmpl-"

    def request(self, body: ChatCompletionRequest, model: ServedModel) -> TurnRequest:
        conversation = body.conversation
        template = model.template_for(conversation.chat_template, bool(conversation.tools))
        if body.documents and "documents" not in (template or ""):
            raise ApiError(400, "documents: this model's chat template does not support documents", "documents")
        top = body.num_top if body.logprobs else None
        params = body.sampling_params(body.asked_tokens[1], top, body.prompt_logprobs, model.default_sampling)
        return turn_request(body, params=params, conversation=conversation)

    def answer(self, body: ChatCompletionRequest, turn: Turn, state: ServerState) -> "ChatAnswer":
        return ChatAnswer(body, turn, state)


CHAT = ChatDialect()


class ChatAnswer(ChunkedAnswer[ChatCompletionChunk, ChatCompletionResponse]):
    """The answer to a conversation."""

    def __init__(self, body: ChatCompletionRequest, turn: Turn, state: ServerState) -> None:
        super().__init__(body, turn, state, ChatCompletionChunk, ChatCompletionResponse)
        self._body = body
        self._echoed = text_of_content(body.messages[-1].get("content")) if body.echo else ""

    def opening_choices(self) -> Iterable[ChatChunkChoice]:
        if self._body.return_token_ids:
            self.chunk.prompt_token_ids = self._prompt_token_ids()
        for index in range(self._body.num_outputs):
            yield ChatChunkChoice(index, ChatDelta(role="assistant", content=self._echoed), None, None)
            self.chunk.prompt_token_ids = UNSET

    def choice(self, piece: Piece) -> ChatChunkChoice | None:
        output, body, said = piece.output, self._body, piece.said
        message, logprobs, end = ChatDelta(), self._logprobs(output), said.end
        thought = said.reasoning if body.include_reasoning else ""
        if not (said.text or thought or said.calls or end or body.return_token_ids or logprobs):
            return None
        if thought:
            message.reasoning = message.reasoning_content = thought
        if said.text:
            message.content = said.text
        if said.calls:  # one entry for each call: clients look at one per event
            message.tool_calls = [_delta_of(call) for call in said.calls]
        choice = ChatChunkChoice(output.index, message, logprobs, None if end is None else end.reason)
        if end is not None:
            choice.stop_reason = end.stop_reason
        if body.return_token_ids:
            choice.token_ids = output.token_ids
        return choice

    def whole(self, pieces: Sequence[Piece]) -> ChatCompletionResponse:
        of_prompt = pieces[0].delta.prompt_logprobs
        answer = self.answer_of([self.whole_choice(piece) for piece in pieces])
        answer.prompt_logprobs = None if of_prompt is None else prompt_logprobs(of_prompt)
        answer.prompt_token_ids = self._prompt_token_ids() if self._body.return_token_ids else None
        return answer

    def whole_choice(self, piece: Piece) -> ChatChoice:
        """Return the choice of one whole output."""
        output, said = piece.output, piece.said
        message = AssistantMessage(content=self._echoed + said.text)
        if said.calls:
            message.content = message.content or None
            message.tool_calls = [
                MessageToolCall(id=call.id or "", function=FunctionCall(call.arguments, call.name or ""))
                for call in said.calls
            ]
        if self._body.include_reasoning and said.reasoning:
            message.reasoning = message.reasoning_content = said.reasoning
        return ChatChoice(
            output.index,
            message,
            self._logprobs(output),
            None if said.end is None else said.end.reason,
            output.stop_reason,
            output.token_ids if self._body.return_token_ids else None,
        )

    def _prompt_token_ids(self) -> list[int]:
        return self.generation.requests[0].prompt_token_ids.tolist()

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if not self._body.logprobs or output.logprobs is None:
            return None
        return chat_logprobs(output.token_ids, output.logprobs, self._body.num_top, self.writes_ids)


@router.post("/v1/chat/completions/batch", answer=ChatCompletionResponse, body=BatchChatRequest)
async def create_batch(http: Request) -> Response:
    """Answer several conversations; each is a choice, with its index."""
    return await respond(http, BATCH)


class BatchDialect:
    """vLLM's lists of conversations."""

    body = BatchChatRequest
    id_prefix = "chatcmpl-"

    def request(self, body: BatchChatRequest, model: ServedModel) -> TurnRequest:
        first, *others = body.each
        return replace(CHAT.request(first, model), more_conversations=[one.conversation for one in others])

    def answer(self, body: BatchChatRequest, turn: Turn, state: ServerState) -> "BatchAnswer":
        return BatchAnswer(body.each, turn, state)


BATCH = BatchDialect()


class BatchAnswer(ChatAnswer):
    """One choice for each conversation."""

    def __init__(self, each: Sequence[ChatCompletionRequest], turn: Turn, state: ServerState) -> None:
        super().__init__(each[0], turn, state)
        self._answers = [ChatAnswer(body, turn, state) for body in each]

    def whole(self, pieces: Sequence[Piece]) -> ChatCompletionResponse:
        choices: list[ChatChoice] = []
        for piece in pieces:
            choice = self._answers[piece.prompt].whole_choice(piece)
            choice.index = piece.prompt
            choices.append(choice)
        return self.answer_of(choices)


def _delta_of(call: CallDelta) -> DeltaToolCall:
    if call.name is None:
        return DeltaToolCall(index=call.index, function=FunctionCall(call.arguments))
    return DeltaToolCall(
        index=call.index, id=call.id or "", type="function", function=FunctionCall(call.arguments, call.name)
    )


def chat_logprobs(token_ids: Sequence[int], logprobs: LogprobDicts, num_top: int, as_ids: bool = False) -> ChatLogprobs:
    """Return the `logprobs` object of a chat choice.

    num_top: -1 for all that there are.   as_ids: write tokens as "token_id:ID"; `bytes` is the text.
    """
    content: list[ChatLogprob] = []
    for token_id, entry in zip(token_ids, logprobs, strict=False):
        if entry is None:
            continue
        best = sorted(entry.items(), key=lambda item: item[1].rank or 0)[: None if num_top == -1 else num_top]
        top = [TopLogprob(*_chat_entry(candidate, entry, as_ids)) for candidate, _ in best]
        content.append(ChatLogprob(*_chat_entry(token_id, entry, as_ids), top))
    return ChatLogprobs(content)


def _chat_entry(token_id: int, entry: dict[int, Logprob], as_ids: bool) -> tuple[str, float, list[int]]:
    """Return the token, log-probability and bytes of one candidate."""
    text = token_text(token_id, entry)
    return shown_token(token_id, entry, as_ids), finite(entry[token_id].logprob), list(text.encode())
