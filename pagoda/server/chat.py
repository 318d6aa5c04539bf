"""POST /v1/chat/completions"""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.base.outputs import CompletionOutput, Logprob
from pagoda.server.answers import ChatCompletionResponse, described
from pagoda.server.body import described_body, read_body
from pagoda.server.errors import ApiError
from pagoda.server.generation import Generation
from pagoda.server.json_answer import JsonAnswer
from pagoda.server.logprobs import chat_logprobs, prompt_logprobs_in_slices
from pagoda.server.protocol import ChatCompletionRequest
from pagoda.server.reasoning import ReasoningSplitter, opens_reasoning, template_reasons
from pagoda.server.state import ServerState, state_of
from pagoda.server.streams import EventStream, cancel_on_disconnect, event
from pagoda.server.tool_choice import ToolUse
from pagoda.server.tool_parsers import TOOL_PARSERS, ToolCall, ToolParser
from pagoda.server.usage import usage_of

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletionResponse,
    responses=described("chat.completion.chunk"),
    openapi_extra=described_body(ChatCompletionRequest),
)
async def create_chat_completion(http: Request) -> Response:
    """Generate the assistant's next message in a conversation."""
    state = state_of(http)
    body = await read_body(http, ChatCompletionRequest, state.request_limits)
    state.check_model(body.model)
    state.check_template(body.chat_template)
    has_tools = bool(body.tools) and body.tool_choice != "none"
    template = body.chat_template or (state.tool_template if has_tools else state.chat_template)
    use = ToolUse.of(body, state, template)
    if body.documents and "documents" not in (template or ""):
        raise ApiError(400, "documents: this model's chat template does not support documents", "documents")
    rendering = state.generator.llm.render_chat(
        body.rendered_messages(),
        chat_template=body.chat_template,
        tools=use.tools or None,
        add_generation_prompt=body.opens_answer,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.template_kwargs,
        add_special_tokens=body.add_special_tokens,
        must_fit=body.truncate_prompt_tokens is None,
        is_bounded=True,
        key=http.scope["state"]["key"],
    )
    prompt = await cancel_on_disconnect(http, rendering)
    top = (body.top_logprobs or 0) if body.logprobs else None
    params = use.constrain(body, body.sampling_params(body.asked_tokens[1], top, body.prompt_logprobs))
    # Chosen only now: while the messages were rendered, another request may have taken the same header's id.
    request_id = state.request_id(http, body.request_id, "chatcmpl")
    generation = await state.generator.begin(http, body, [prompt.token_ids], params, request_id)
    with contextlib.ExitStack() as at_end:
        at_end.callback(generation.close)
        reasons = template_reasons(template)
        readers = [
            _Reader(
                TOOL_PARSERS[use.parser]() if use.parser else None,
                ReasoningSplitter(inside=opens_reasoning(prompt.text)) if reasons else None,
            )
            for _ in range(body.n or 1)
        ]
        last = body.messages[-1].get("content")
        echoed = last if body.echo and isinstance(last, str) else ""
        answer = _Answer(state, body, generation, request_id, readers, echoed)
        if body.stream:
            at_end.pop_all()
            return EventStream(answer.events(), generation.close)
        return JsonAnswer(await cancel_on_disconnect(http, answer.whole()))


class _Reader:
    """Splits one choice's text into reasoning, content and tool calls."""

    def __init__(self, tools: ToolParser | None, reasoning: ReasoningSplitter | None) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self.num_calls = 0

    def read(self, text: str, is_last: bool) -> tuple[str, str, list[ToolCall]]:
        """Add text; return the (reasoning, content, calls) that are complete now."""
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.feed(text)
            if is_last:
                more_thought, more_text = self._reasoning.end()
                thought, text = thought + more_thought, text + more_text
        if self._tools is None:
            return thought, text, []
        parsed = self._tools.feed(text)
        if is_last:
            rest = self._tools.end()
            parsed.content += rest.content
            parsed.calls += rest.calls
        return thought, parsed.content, parsed.calls


class _Answer:
    """Builds one answer, whole or as events."""

    def __init__(
        self,
        state: ServerState,
        body: ChatCompletionRequest,
        generation: Generation,
        request_id: str,
        readers: list[_Reader],
        echoed: str,
    ) -> None:
        self._body = body
        self._generation = generation
        self._readers = readers
        self._echoed = echoed
        self._head: dict[str, Any] = {
            "id": request_id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model or state.model_names[0],
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        body, generation = self._body, self._generation
        options = body.stream_options
        continuous = options is not None and options.continuous_usage_stats
        for index in range(len(self._readers)):
            role: dict[str, Any] = {"role": "assistant", "content": self._echoed}
            first = {
                **self._head,
                "choices": [{"index": index, "delta": role, "logprobs": None, "finish_reason": None}],
            }
            yield event(first)
        async with generation.outputs() as deltas:
            async for _, delta in deltas:
                for output in delta.outputs:
                    choice = self._delta(output)
                    if choice is None:
                        continue
                    chunk = {**self._head, "choices": [choice]}
                    if continuous:
                        chunk["usage"] = usage_of(generation)
                    yield event(chunk)
        if options is not None and options.include_usage:
            tail = {**self._head, "choices": [], "usage": usage_of(generation)}
            if body.return_timings:
                tail["timings"] = generation.timings
            yield event(tail)

    def _delta(self, output: CompletionOutput) -> dict[str, Any] | None:
        """Return the choice of one chunk, or None if there is nothing to send yet."""
        reader = self._readers[output.index]
        thought, content, calls = reader.read(output.text, output.finished)
        delta: dict[str, Any] = {}
        if thought and self._body.include_reasoning:
            delta["reasoning_content"] = thought
        if content:
            delta["content"] = content
        if kept := self._kept(reader, calls):
            delta["tool_calls"] = [{"index": reader.num_calls + i, **_call_dict(call)} for i, call in enumerate(kept)]
            reader.num_calls += len(kept)
        logprobs = self._logprobs(output)
        if not delta and not output.finished and not self._body.return_token_ids and logprobs is None:
            return None
        choice = {
            "index": output.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(output, reader.num_calls),
        }
        if output.finished:
            choice["stop_reason"] = output.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    async def whole(self) -> dict[str, Any]:
        generation, body = self._generation, self._body
        pieces: list[dict[str, Any]] = [
            {"text": "", "token_ids": [], "content": [], "end": None} for _ in self._readers
        ]
        about_prompt: dict[str, Any] = {}
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        async with generation.outputs() as deltas:
            async for _, delta in deltas:
                prompt_logprobs = delta.prompt_logprobs  # every delta has all of them: they are converted once, below
                for output in delta.outputs:
                    self._put(pieces[output.index], output)
        if prompt_logprobs is not None:
            about_prompt["prompt_logprobs"] = await prompt_logprobs_in_slices(prompt_logprobs)
        if body.return_token_ids:
            about_prompt["prompt_token_ids"] = generation.requests[0].prompt_token_ids.tolist()
        choices = [self._whole_choice(index, piece) for index, piece in enumerate(pieces)]
        answer = {**self._head, "choices": choices, "usage": usage_of(generation), **about_prompt}
        if body.return_timings:
            answer["timings"] = generation.timings
        return answer

    def _put(self, piece: dict[str, Any], output: CompletionOutput) -> None:
        piece["text"] += output.text
        piece["token_ids"] += output.token_ids
        logprobs = self._logprobs(output)
        if logprobs is not None:
            piece["content"] += logprobs["content"]
        if output.finished:
            piece["end"] = output

    def _whole_choice(self, index: int, piece: dict[str, Any]) -> dict[str, Any]:
        reader = self._readers[index]
        thought, content, calls = reader.read(piece["text"], True)
        calls = self._kept(reader, calls)
        message: dict[str, Any] = {"role": "assistant", "content": self._echoed + content, "refusal": None}
        if calls:
            message["tool_calls"] = [_call_dict(call) for call in calls]
            message["content"] = content or None
        if thought and self._body.include_reasoning:
            message["reasoning_content"] = thought
        end: CompletionOutput = piece["end"]
        choice = {
            "index": index,
            "message": message,
            "logprobs": {"content": piece["content"], "refusal": None} if self._body.logprobs else None,
            "finish_reason": self._finish_reason(end, len(calls)),
            "stop_reason": end.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = piece["token_ids"]
        return choice

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if not self._body.logprobs or output.logprobs is None:
            return None
        as_ids = self._body.return_tokens_as_token_ids
        return chat_logprobs(output.token_ids, output.logprobs, self._body.top_logprobs or 0, as_ids)

    def _kept(self, reader: _Reader, calls: list[ToolCall]) -> list[ToolCall]:
        """Return all calls, or only the first one if parallel_tool_calls is false."""
        if self._body.parallel_tool_calls is False:
            return calls[: max(0, 1 - reader.num_calls)]
        return calls

    @staticmethod
    def _finish_reason(output: CompletionOutput, num_calls: int) -> str | None:
        return "tool_calls" if num_calls and output.finish_reason == "stop" else output.finish_reason


def _call_dict(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
