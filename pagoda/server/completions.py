"""POST /v1/completions"""

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.server.answers import CompletionResponse, described
from pagoda.server.body import described_body, read_body
from pagoda.server.generation import Generation
from pagoda.server.json_answer import JsonAnswer
from pagoda.server.logprobs import completion_logprobs_in_slices, prompt_logprobs_in_slices
from pagoda.server.protocol import CompletionRequest
from pagoda.server.state import ServerState, state_of
from pagoda.server.streams import EventStream, cancel_on_disconnect, event
from pagoda.server.usage import usage_of

router = APIRouter()


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses=described("text_completion"),
    openapi_extra=described_body(CompletionRequest),
)
async def create_completion(http: Request) -> Response:
    """Continue a text, a list of token ids, or several of either."""
    state = state_of(http)
    body = await read_body(http, CompletionRequest, state.request_limits)
    state.check_model(body.model)
    request_id = state.request_id(http, body.request_id, "cmpl")
    # With max_tokens 0, only the prompt is scored. The engine still samples one token, which is not returned.
    asked = body.asked_tokens[1]
    of_prompt = body.num_logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    params = body.sampling_params(1 if asked == 0 else asked, body.num_logprobs, of_prompt)
    generation = await state.generator.begin(
        http, body, body.prompts(), params, request_id, add_special_tokens=body.add_special_tokens
    )
    with contextlib.ExitStack() as at_end:
        at_end.callback(generation.close)
        answer = _Answer(state, body, generation, request_id)
        if body.stream:
            at_end.pop_all()
            return EventStream(answer.events(), generation.close)
        return JsonAnswer(await cancel_on_disconnect(http, answer.whole()))


class _Answer:
    """Builds one answer, whole or as events. Tracks the text offset of each choice."""

    def __init__(self, state: ServerState, body: CompletionRequest, generation: Generation, request_id: str) -> None:
        self._body = body
        self._generation = generation
        self._n = body.n or 1
        self._llm = state.generator.llm
        self._head: dict[str, Any] = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or state.model_names[0],
        }
        self._offsets = [0] * (len(generation.requests) * self._n)

    async def events(self) -> AsyncGenerator[bytes, None]:
        body, generation = self._body, self._generation
        options = body.stream_options
        continuous = options is not None and options.continuous_usage_stats
        begun = [False] * len(self._offsets)
        async with generation.outputs() as deltas:
            async for index, delta in deltas:
                for output in delta.outputs:
                    choice_index = index * self._n + output.index
                    choice = await self._choice(choice_index, index, delta, output, not begun[choice_index])
                    begun[choice_index] = True
                    chunk = {**self._head, "choices": [choice]}
                    if continuous:
                        chunk["usage"] = usage_of(generation)
                    yield event(chunk)
        if options is not None and options.include_usage:
            tail = {**self._head, "choices": [], "usage": usage_of(generation)}
            if body.return_timings:
                tail["timings"] = generation.timings
            yield event(tail)

    async def whole(self) -> dict[str, Any]:
        choices: dict[int, dict[str, Any]] = {}
        async with self._generation.outputs() as deltas:
            async for index, delta in deltas:
                for output in delta.outputs:
                    at = index * self._n + output.index
                    choice = await self._choice(at, index, delta, output, at not in choices)
                    choices[at] = _joined(choices[at], choice) if at in choices else choice
        answer = {**self._head, "choices": [choices[i] for i in sorted(choices)], "usage": usage_of(self._generation)}
        if self._body.return_timings:
            answer["timings"] = self._generation.timings
        return answer

    async def _choice(
        self, at: int, index: int, delta: RequestOutput, output: CompletionOutput, is_first: bool
    ) -> dict[str, Any]:
        """Return the choice of one chunk. The first one also has what was requested about the prompt."""
        body, request = self._body, self._generation.requests[index]
        num_logprobs, as_ids = body.num_logprobs, body.return_tokens_as_token_ids
        hidden = body.asked_tokens[1] == 0
        text = "" if hidden else output.text
        token_ids = [] if hidden else output.token_ids
        entries = [] if hidden else list(output.logprobs or [])
        logged_ids = token_ids
        if is_first and body.echo:
            prompt_ids = request.prompt_token_ids.tolist()
            text = await self._llm.detokenize(prompt_ids) + text
            if num_logprobs is not None:
                known = delta.prompt_logprobs or [None] * len(prompt_ids)
                entries, logged_ids = [*known, *entries], [*prompt_ids, *token_ids]
        logprobs = None
        if num_logprobs is not None:
            logprobs, self._offsets[at] = await completion_logprobs_in_slices(
                logged_ids,
                entries,
                num_logprobs,
                self._offsets[at],
                lambda token_id: self._llm.decode([token_id]),
                as_ids,
            )
        choice: dict[str, Any] = {
            "index": at,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if is_first and body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            choice["prompt_logprobs"] = await prompt_logprobs_in_slices(delta.prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = request.prompt_token_ids.tolist()
        return choice


def _joined(before: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Merge two consecutive pieces of one choice."""
    joined = {**before, "text": before["text"] + more["text"]}
    joined["finish_reason"], joined["stop_reason"] = more["finish_reason"], more["stop_reason"]
    if before["logprobs"] is not None and more["logprobs"] is not None:
        joined["logprobs"] = {name: before["logprobs"][name] + more["logprobs"][name] for name in before["logprobs"]}
    if "token_ids" in before:
        joined["token_ids"] = before["token_ids"] + more["token_ids"]
    return joined
