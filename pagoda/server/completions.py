"""POST /v1/completions"""

import math
from collections import Counter
from collections.abc import Iterable

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.engine.async_engine import AsyncEngine
from pagoda.server.answers import (
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionResponse,
    Timings,
    Usage,
    answers_with,
)
from pagoda.server.body import described_body
from pagoda.server.generation import Generation
from pagoda.server.logprobs import completion_logprobs_in_slices, prompt_logprobs_in_slices
from pagoda.server.protocol import CompletionRequest
from pagoda.server.respond import Head, Prepared, respond
from pagoda.server.state import ServerState

router = APIRouter()


@router.post(
    "/v1/completions",
    responses=answers_with(CompletionResponse, CompletionChunk),
    openapi_extra=described_body(CompletionRequest),
)
async def create_completion(http: Request) -> Response:
    """Continue a text, a list of token ids, or several of either."""
    return await respond(http, CompletionRequest, CompletionApi())


class CompletionApi:
    id_prefix = "cmpl"

    async def prepare(self, http: Request, state: ServerState, body: CompletionRequest) -> Prepared:
        """Return the prompts and parameters of a request."""
        # With max_tokens 0, only the prompt is scored. The engine still samples one token, which is not returned.
        asked = body.asked_tokens[1]
        of_prompt = body.num_logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
        num_logprobs = body.num_logprobs
        if num_logprobs is None and body.num_outputs > (body.n or 1):
            num_logprobs = 0  # of the sampled tokens only: what candidates are ranked by
        params = body.sampling_params(1 if asked == 0 else asked, num_logprobs, of_prompt)
        llm = state.generator.llm
        return Prepared(
            body.prompts(),
            params,
            lambda head, generation: CompletionFormat(head, generation, body, llm),
            add_special_tokens=body.add_special_tokens,
        )


class CompletionFormat:
    """The answer to a text completion. Tracks the text offset of each choice."""

    def __init__(self, head: Head, generation: Generation, body: CompletionRequest, llm: AsyncEngine) -> None:
        self._head = head
        self._generation = generation
        self._body = body
        self._llm = llm
        self._n = body.num_outputs
        self._best = Ranking(body.num_outputs, body.n or 1)
        # Read for every delta of a stream, so they are worked out once.
        self._num_logprobs = body.num_logprobs
        self._is_hidden = body.asked_tokens[1] == 0
        num_choices = len(generation.requests) * self._n
        self._offsets = [0] * num_choices
        self._has_begun = [False] * num_choices
        self._choices: dict[int, CompletionChoice] = {}

    def chunk(self) -> CompletionChunk:
        head = self._head
        return CompletionChunk(id=head.id, created=head.created, model=head.model, choices=[])

    def opening(self) -> Iterable[CompletionChoice]:
        return ()

    async def add(self, index: int, delta: RequestOutput, output: CompletionOutput) -> None:
        choice = await self.chunk_choice(index, delta, output)
        self._best.add(choice.index, output)
        if choice.index in self._choices:
            _extend(self._choices[choice.index], choice)
        else:
            self._choices[choice.index] = choice

    async def whole(self, usage: Usage, timings: Timings | UnsetType) -> CompletionResponse:
        head = self._head
        return CompletionResponse(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=self._best.choose(self._choices),
            usage=usage,
            timings=timings,
        )

    async def chunk_choice(self, index: int, delta: RequestOutput, output: CompletionOutput) -> CompletionChoice:
        """Return the choice of one event. The first one also has what was requested about the prompt."""
        body = self._body
        at = index * self._n + output.index
        is_first = not self._has_begun[at]
        self._has_begun[at] = True
        text, token_ids = ("", []) if self._is_hidden else (output.text, output.token_ids)
        if is_first and body.echo:
            given = self._prompt_token_ids(index)[self._generation.requests[index].num_embeds :]
            text = await self._llm.text.detokenize(given, self._generation.key) + text
        choice = CompletionChoice(at, text, None, output.finish_reason, output.stop_reason)
        if self._num_logprobs is not None:
            choice.logprobs = await self._logprobs(at, index, delta, output, is_first)
        if is_first and body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            choice.prompt_logprobs = await prompt_logprobs_in_slices(delta.prompt_logprobs)
        if body.return_token_ids:
            choice.token_ids = token_ids
            if is_first:
                choice.prompt_token_ids = self._prompt_token_ids(index)
        return choice

    async def _logprobs(
        self, at: int, index: int, delta: RequestOutput, output: CompletionOutput, is_first: bool
    ) -> CompletionLogprobs:
        """Return the log-probabilities of an output; with echo, the first ones are those of the prompt."""
        token_ids = [] if self._is_hidden else output.token_ids
        entries = [] if self._is_hidden else list(output.logprobs or [])
        if is_first and self._body.echo:
            prompt_ids = self._prompt_token_ids(index)
            known = delta.prompt_logprobs or [None] * len(prompt_ids)
            entries, token_ids = [*known, *entries], [*prompt_ids, *token_ids]
        logprobs, self._offsets[at] = await completion_logprobs_in_slices(
            token_ids,
            entries,
            self._num_logprobs or 0,
            self._offsets[at],
            lambda token_id: self._llm.text.decode([token_id]),
            self._body.return_tokens_as_token_ids,
        )
        return logprobs

    def _prompt_token_ids(self, index: int) -> list[int]:
        return self._generation.requests[index].prompt_token_ids.tolist()


class Ranking:
    """Chooses the best outputs of each prompt: those with the highest mean log-probability per token (`best_of`)."""

    def __init__(self, num_outputs: int, num_kept: int) -> None:
        """Of `num_outputs` outputs of each prompt, keep `num_kept`, the best one first. If all are kept, in order."""
        self._num_outputs = num_outputs
        self._num_kept = num_kept
        self._sums: dict[int, float] = {}
        self._num_tokens: Counter[int] = Counter()

    def add(self, at: int, output: CompletionOutput) -> None:
        """Count what is new in an output.   at: index of the prompt * num_outputs + index of the output."""
        self._num_tokens[at] += len(output.token_ids)
        if output.cumulative_logprob is not None:
            self._sums[at] = output.cumulative_logprob

    def choose(self, choices: dict[int, CompletionChoice]) -> list[CompletionChoice]:
        """Return the choices to send, with their final index.   choices: by the `at` of `add`."""
        if self._num_kept == self._num_outputs:
            return [choices[at] for at in sorted(choices)]
        kept: list[CompletionChoice] = []
        for first in sorted({at - at % self._num_outputs for at in choices}):
            of_prompt = range(first, first + self._num_outputs)
            ranked = sorted((at for at in of_prompt if at in choices), key=self._mean, reverse=True)
            kept += (choices[at] for at in ranked[: self._num_kept])
        for index, choice in enumerate(kept):
            choice.index = index
        return kept

    def _mean(self, at: int) -> float:
        return self._sums.get(at, -math.inf) / max(self._num_tokens[at], 1)


def _extend(choice: CompletionChoice, more: CompletionChoice) -> None:
    """Append to a choice what comes next of it."""
    choice.text += more.text
    choice.finish_reason, choice.stop_reason = more.finish_reason, more.stop_reason
    if choice.logprobs is not None and more.logprobs is not None:
        choice.logprobs.extend(more.logprobs)
    if choice.token_ids is not UNSET and more.token_ids is not UNSET:
        choice.token_ids = choice.token_ids + more.token_ids
