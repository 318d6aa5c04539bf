"""POST /v1/chat/completions: conversations, whose answers may have reasoning (<think> ... </think>) and tool calls."""

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.outputs import CompletionOutput, RequestOutput
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
    Timings,
    chat_logprobs,
    prompt_logprobs,
)
from pagoda.server.body import run_for_body
from pagoda.server.errors import ApiError
from pagoda.server.generation import Generation
from pagoda.server.protocol import ChatCompletionRequest
from pagoda.server.reasoning import REASONING_END, ReasoningSplitter, opens_reasoning, template_reasons
from pagoda.server.respond import AnswerPlan, Head, WholeOutput, respond
from pagoda.server.routing import Router
from pagoda.server.state import ServerState
from pagoda.server.tool_choice import ToolUse, special_token
from pagoda.server.tool_parsers import TOOL_PARSERS
from pagoda.server.tool_parsers.base import ToolCall, ToolParser, merged

router = Router()


@router.post(
    "/v1/chat/completions",
    answer=ChatCompletionResponse,
    chunk=ChatCompletionChunk,
    body=ChatCompletionRequest,
)
async def create_chat_completion(http: Request) -> Response:
    """Generate the assistant's next message in a conversation."""
    return await respond(http, ChatCompletionRequest, "chatcmpl", _plan)


async def _plan(http: Request, state: ServerState, body: ChatCompletionRequest) -> AnswerPlan:
    """Render the conversation. Raises ApiError for features that the model or the server lacks."""
    has_tools = bool(body.tools) and body.tool_choice != "none"
    template = state.template_for(body.chat_template, has_tools)
    use = ToolUse.of(body, state, template)
    if body.documents and "documents" not in (template or ""):
        raise ApiError(400, "documents: this model's chat template does not support documents", "documents")
    top = body.num_top if body.logprobs else None
    inputs = state.starter.llm.input_processor
    defaults = inputs.default_sampling
    plain = await run_for_body(
        http, lambda: body.sampling_params(body.asked_tokens[1], top, body.prompt_logprobs, defaults)
    )
    tokenizer = inputs.tokenizer
    argument_types = await run_for_body(http, use.argument_types)
    params = plain
    if use.has_grammar(body, plain):  # tools may have large schemas
        params = await state.starter.llm.text.write_grammar(lambda: use.constrain(body, plain, tokenizer))
    # Nothing is awaited after this: its images are in memory, uncounted until `RequestStarter.begin` counts them.
    prompt = await state.render(http, body, body.template_kwargs, use.tools, body.truncate_prompt_tokens is None)
    is_formatted = plain.structured_outputs is not None and not use.is_forced  # by the request itself: not a call
    parser = TOOL_PARSERS[use.parser] if use.parser is not None and not is_formatted else None
    if parser is not None and parser.keeps_special_tokens:
        params = dataclasses.replace(params, skip_special_tokens=False)
    reasons = template_reasons(template)
    is_thinking = reasons and opens_reasoning(prompt.text, _continued(body))
    if params.structured_outputs is not None and is_thinking:
        end: str | int | None = special_token(tokenizer, REASONING_END)
        form = dataclasses.replace(params.structured_outputs, reasoning_end=REASONING_END if end is None else end)
        params = dataclasses.replace(params, structured_outputs=form)

    def answer_format(head: Head, generation: Generation) -> ChatFormat:
        readers = [
            Reader(
                parser(argument_types) if parser is not None else None,
                ReasoningSplitter(inside=is_thinking) if reasons else None,
                tokenizer.token_bytes,
                use.is_forced,
            )
            for _ in range(body.n or 1)
        ]
        return ChatFormat(head, generation, body, readers, state.writes_ids(body))

    return AnswerPlan([prompt.prompt], params, answer_format)


def _continued(body: ChatCompletionRequest) -> str:
    """Return the text of the message that the answer continues; "" if it begins a new one."""
    content = body.messages[-1].get("content") if body.continue_final_message else ""
    if isinstance(content, list):
        return "".join(text for part in content if isinstance(text := part.get("text"), str))
    return content or ""


class Reader:
    """Splits one choice's text into reasoning, content and tool calls.

    token_bytes: returns those of a token.   is_forced: the answer is one or more calls.
    """

    def __init__(
        self,
        tools: ToolParser | None,
        reasoning: ReasoningSplitter | None,
        token_bytes: Callable[[int], bytes],
        is_forced: bool = False,
    ) -> None:
        self._tools = tools
        self._is_forced = is_forced
        self._reasoning = reasoning
        self._token_bytes = token_bytes
        self._last_bytes = b""
        self._num_until_end = 0
        self._has_thought = False
        self.reasons = reasoning is not None
        self.num_calls = 0
        self.call_is_kept = True

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens up to the end of the reasoning; 0 if there was none."""
        return self._num_until_end if self._has_thought else 0

    def _count_reasoning(self, token_ids: Sequence[int]) -> None:
        end = REASONING_END.encode()
        for token_id in token_ids:
            if end in self._last_bytes:
                return
            self._last_bytes = self._last_bytes[-len(end) :] + self._token_bytes(token_id)
            self._num_until_end += 1

    def read(self, output: CompletionOutput, is_last: bool) -> tuple[str, str, list[ToolCall]]:
        """Add an output's text; return the (reasoning, content, pieces of calls) that are certain now."""
        text, thought = output.text, ""
        if self._reasoning is not None:
            self._count_reasoning(output.token_ids)
            thought, text = self._reasoning.feed(text)
            if is_last:
                more_thought, more_text = self._reasoning.end()
                thought, text = thought + more_thought, text + more_text
            self._has_thought = self._has_thought or bool(thought)
        if self._tools is None:
            return thought, text, []
        parsed = [self._tools.feed(text), *([self._tools.end()] if is_last else [])]
        # What is no call in a forced answer is one that was cut off before its name was complete.
        content = "" if self._is_forced else "".join(one.content for one in parsed)
        return thought, content, [call for one in parsed for call in one.calls]


class ChatFormat:
    """The answer to a conversation."""

    def __init__(
        self, head: Head, generation: Generation, body: ChatCompletionRequest, readers: list[Reader], writes_ids: bool
    ) -> None:
        """readers: one per choice.   writes_ids: tokens of log-probabilities are written as ids."""
        self._writes_ids = writes_ids
        self._head = head
        self._generation = generation
        self._body = body
        self._readers = readers
        last = body.messages[-1].get("content")
        self._echoed = last if body.echo and isinstance(last, str) else ""

    def chunk(self) -> ChatCompletionChunk:
        head = self._head
        return ChatCompletionChunk(id=head.id, created=head.created, model=head.model, choices=[])

    def opening(self, chunk: ChatCompletionChunk) -> Iterable[ChatChunkChoice]:
        if self._body.return_token_ids:
            chunk.prompt_token_ids = self._prompt_token_ids()
        for index in range(len(self._readers)):
            yield ChatChunkChoice(index, ChatDelta(role="assistant", content=self._echoed), None, None)
            chunk.prompt_token_ids = UNSET

    def _prompt_token_ids(self) -> list[int]:
        return self._generation.requests[0].prompt_token_ids.tolist()

    def chunk_choice(self, index: int, delta: RequestOutput, output: CompletionOutput) -> ChatChunkChoice | None:
        reader = self._readers[output.index]
        thought, content, calls = self._read(reader, output, output.finished)
        kept = self._pieces(reader, calls)
        thought = thought if self._body.include_reasoning else ""
        logprobs = self._logprobs(output)
        if not (thought or content or kept or output.finished or self._body.return_token_ids or logprobs):
            return None
        message = ChatDelta()
        if thought:
            message.reasoning = message.reasoning_content = thought
        if content:
            message.content = content
        if kept:
            message.tool_calls = kept
        choice = ChatChunkChoice(output.index, message, logprobs, _finish_reason(output, reader.num_calls))
        if output.finished:
            choice.stop_reason = output.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = output.token_ids
        return choice

    def whole(self, outputs: Sequence[WholeOutput], timings: Timings | UnsetType) -> ChatCompletionResponse:
        head = self._head
        of_prompt = outputs[0][1].prompt_logprobs
        return ChatCompletionResponse(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[self._choice(output) for _, _, output in outputs],
            usage=self._generation.usage,  # after the choices: reading them counts the reasoning
            prompt_logprobs=None if of_prompt is None else prompt_logprobs(of_prompt),
            prompt_token_ids=self._prompt_token_ids() if self._body.return_token_ids else None,
            timings=timings,
        )

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        reader = self._readers[output.index]
        thought, content, calls = self._read(reader, output, True)
        calls = merged(calls)[: 1 if self._body.parallel_tool_calls is False else None]
        message = AssistantMessage(content=self._echoed + content)
        if calls:
            message.content = content or None
            message.tool_calls = [
                MessageToolCall(id=call.id or _call_id(), function=FunctionCall(call.arguments, call.name or ""))
                for call in calls
            ]
        if thought and self._body.include_reasoning:
            message.reasoning = message.reasoning_content = thought
        return ChatChoice(
            output.index,
            message,
            self._logprobs(output),
            _finish_reason(output, len(calls)),
            output.stop_reason,
            output.token_ids if self._body.return_token_ids else None,
        )

    def _read(self, reader: Reader, output: CompletionOutput, is_last: bool) -> tuple[str, str, list[ToolCall]]:
        parts = reader.read(output, is_last)
        if reader.reasons:
            self._generation.num_reasoning_tokens = sum(one.num_reasoning_tokens for one in self._readers)
        return parts

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if not self._body.logprobs or output.logprobs is None:
            return None
        return chat_logprobs(output.token_ids, output.logprobs, self._body.num_top, self._writes_ids)

    def _pieces(self, reader: Reader, calls: list[ToolCall]) -> list[DeltaToolCall]:
        """Return the pieces of calls for an event, one for each call: clients look at one per event.

        If parallel_tool_calls is false, only those of the first call.
        """
        kept: list[DeltaToolCall] = []
        for call in merged(calls):
            if call.name is not None:
                reader.call_is_kept = self._body.parallel_tool_calls is not False or not reader.num_calls
                reader.num_calls += reader.call_is_kept
            if reader.call_is_kept:
                begins: dict[str, Any] = {} if call.name is None else {"id": call.id or _call_id(), "type": "function"}
                function = FunctionCall(call.arguments, UNSET if call.name is None else call.name)
                kept.append(DeltaToolCall(index=reader.num_calls - 1, function=function, **begins))
        return kept


def _finish_reason(output: CompletionOutput, num_calls: int) -> str | None:
    return "tool_calls" if num_calls and output.finish_reason == "stop" else output.finish_reason


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
