"""POST /v1/chat/completions"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.outputs import CompletionOutput
from pagoda.server.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    DeltaToolCall,
    FunctionCall,
    MessageToolCall,
    chat_logprobs,
    prompt_logprobs,
)
from pagoda.server.dialects.openai import ChunkedAnswer, turn_request
from pagoda.server.errors import ApiError
from pagoda.server.protocol import BatchChatRequest, ChatCompletionRequest
from pagoda.server.respond import respond
from pagoda.server.routing import Router
from pagoda.server.sending import OPENAI_FRAMING
from pagoda.server.served_model import ServedModel
from pagoda.server.state import ServerState
from pagoda.server.turn import CallDelta, Piece, Turn, TurnRequest

router = Router()


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
    id_prefix = "chatcmpl"
    framing = OPENAI_FRAMING

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


class ChatAnswer(ChunkedAnswer):
    """The answer to a conversation."""

    def __init__(self, body: ChatCompletionRequest, turn: Turn, state: ServerState) -> None:
        self._opening = ChatCompletionChunk(id=turn.id, created=turn.created, model=turn.model, choices=[])
        super().__init__(body, turn, state, self._opening)
        self._body = body
        last = body.messages[-1].get("content")
        self._echoed = last if body.echo and isinstance(last, str) else ""

    def opening_choices(self) -> Iterable[ChatChunkChoice]:
        if self._body.return_token_ids:
            self._opening.prompt_token_ids = self._prompt_token_ids()
        for index in range(self._body.num_outputs):
            yield ChatChunkChoice(index, ChatDelta(role="assistant", content=self._echoed), None, None)
            self._opening.prompt_token_ids = UNSET

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
        answer = self._answer_of([self.whole_choice(piece) for piece in pieces])
        answer.prompt_logprobs = None if of_prompt is None else prompt_logprobs(of_prompt)
        answer.prompt_token_ids = self._prompt_token_ids() if self._body.return_token_ids else None
        return answer

    def _answer_of(self, choices: list[ChatChoice]) -> ChatCompletionResponse:
        turn = self.turn
        return ChatCompletionResponse(
            id=turn.id,
            created=turn.created,
            model=turn.model,
            choices=choices,
            usage=self.generation.usage,
            timings=self.timings,
        )

    def whole_choice(self, piece: Piece) -> ChatChoice:
        """Return the choice of one whole output."""
        output, said = piece.output, piece.said
        message = AssistantMessage(content=self._echoed + said.text)
        if said.calls:
            message.content = said.text or None
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
    id_prefix = "chatcmpl"
    framing = OPENAI_FRAMING

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
        return self._answer_of(choices)


def _delta_of(call: CallDelta) -> DeltaToolCall:
    if call.name is None:
        return DeltaToolCall(index=call.index, function=FunctionCall(call.arguments))
    return DeltaToolCall(
        index=call.index, id=call.id or "", type="function", function=FunctionCall(call.arguments, call.name)
    )
