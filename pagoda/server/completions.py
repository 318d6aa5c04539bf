"""POST /v1/completions"""

import math
from collections.abc import Iterable, Sequence

from msgspec import UnsetType
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.engine.async_engine import AsyncEngine
from pagoda.server.answers import (
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionResponse,
    Timings,
    completion_logprobs,
    prompt_logprobs,
)
from pagoda.server.body import run_for_body
from pagoda.server.generation import Generation
from pagoda.server.protocol import CompletionRequest
from pagoda.server.respond import AnswerPlan, Head, WholeOutput, respond
from pagoda.server.routing import Router
from pagoda.server.state import ServerState

router = Router()


@router.post(
    "/v1/completions",
    answer=CompletionResponse,
    chunk=CompletionChunk,
    body=CompletionRequest,
)
async def create_completion(http: Request) -> Response:
    """Continue a text, a list of token ids, or several of either."""
    return await respond(http, CompletionRequest, "cmpl", _plan)


async def _plan(http: Request, state: ServerState, body: CompletionRequest) -> AnswerPlan:
    """Return the prompts and parameters of a request."""
    of_prompt = body.num_logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    num_logprobs = body.num_logprobs
    if num_logprobs is None and body.num_outputs > (body.n or 1):
        num_logprobs = 0  # of the sampled tokens only: what candidates are ranked by
    llm = state.starter.llm
    defaults = llm.input_processor.default_sampling
    params = await run_for_body(
        http, lambda: body.sampling_params(body.asked_tokens[1], num_logprobs, of_prompt, defaults)
    )
    return AnswerPlan(
        body.prompts(),
        params,
        lambda head, generation: CompletionFormat(head, generation, body, llm, state.writes_ids(body)),
        add_special_tokens=body.add_special_tokens,
    )


class CompletionFormat:
    """The answer to a text completion. Tracks the text offset of each choice."""

    def __init__(
        self, head: Head, generation: Generation, body: CompletionRequest, llm: AsyncEngine, writes_ids: bool
    ) -> None:
        """writes_ids: tokens of log-probabilities are written as ids."""
        self._writes_ids = writes_ids
        self._head = head
        self._generation = generation
        self._body = body
        self._llm = llm
        self._n = body.num_outputs
        # Read for every delta of a stream, so they are worked out once.
        self._num_logprobs = body.num_logprobs
        num_choices = len(generation.requests) * self._n
        self._offsets = [0] * num_choices
        self._has_begun = [False] * num_choices

    def chunk(self) -> CompletionChunk:
        head = self._head
        return CompletionChunk(id=head.id, created=head.created, model=head.model, choices=[])

    def opening(self, chunk: CompletionChunk) -> Iterable[CompletionChoice]:
        return ()

    def whole(self, outputs: Sequence[WholeOutput], timings: Timings | UnsetType) -> CompletionResponse:
        num_kept = self._body.n or 1
        if num_kept < self._n:
            outputs = best_of(outputs, num_kept)
        choices = [self.chunk_choice(index, delta, output) for index, delta, output in outputs]
        if num_kept < self._n:
            for at, choice in enumerate(choices):
                choice.index = at
        head = self._head
        usage = self._generation.usage
        return CompletionResponse(
            id=head.id, created=head.created, model=head.model, choices=choices, usage=usage, timings=timings
        )

    def chunk_choice(self, index: int, delta: RequestOutput, output: CompletionOutput) -> CompletionChoice:
        """Return the choice of one event. The first one also has what was requested about the prompt."""
        body = self._body
        at = index * self._n + output.index
        is_first = not self._has_begun[at]
        self._has_begun[at] = True
        text = output.text
        if is_first and body.echo:
            given = self._prompt_token_ids(index)[self._generation.requests[index].num_embeds :]
            text = self._llm.text.decode(given) + text
        choice = CompletionChoice(at, text, None, output.finish_reason, output.stop_reason)
        if self._num_logprobs is not None:
            choice.logprobs = self._logprobs(at, index, delta, output, is_first)
        if is_first and body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(delta.prompt_logprobs)
        if body.return_token_ids:
            choice.token_ids = output.token_ids
            if is_first:
                choice.prompt_token_ids = self._prompt_token_ids(index)
        return choice

    def _logprobs(
        self, at: int, index: int, delta: RequestOutput, output: CompletionOutput, is_first: bool
    ) -> CompletionLogprobs:
        """Return the log-probabilities of an output; with echo, the first ones are those of the prompt."""
        token_ids, entries = output.token_ids, output.logprobs or []
        if is_first and self._body.echo:
            prompt_ids = self._prompt_token_ids(index)
            known = delta.prompt_logprobs or [None] * len(prompt_ids)
            entries, token_ids = [*known, *entries], [*prompt_ids, *token_ids]
        logprobs, self._offsets[at] = completion_logprobs(
            token_ids,
            entries,
            self._num_logprobs or 0,
            self._offsets[at],
            lambda token_id: self._llm.text.decode([token_id]),
            self._writes_ids,
        )
        return logprobs

    def _prompt_token_ids(self, index: int) -> list[int]:
        return self._generation.requests[index].prompt_token_ids.tolist()


def best_of(outputs: Sequence[WholeOutput], num_kept: int) -> list[WholeOutput]:
    """Return, of each prompt, the outputs with the highest mean log-probability per token, the best one first."""

    def mean(whole: WholeOutput) -> float:
        output = whole[2]
        total = -math.inf if output.cumulative_logprob is None else output.cumulative_logprob
        return total / max(len(output.token_ids), 1)

    kept: list[WholeOutput] = []
    for prompt in sorted({index for index, _, _ in outputs}):
        ranked = sorted((whole for whole in outputs if whole[0] == prompt), key=mean, reverse=True)
        kept += ranked[:num_kept]
    return kept
