"""POST /v1/completions"""

import math
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from pagoda.server.answers import (
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionResponse,
    completion_logprobs,
    prompt_logprobs,
)
from pagoda.server.dialects.openai import ChunkedAnswer, turn_request
from pagoda.server.protocol import CompletionRequest
from pagoda.server.respond import respond
from pagoda.server.routing import Router
from pagoda.server.sending import OPENAI_FRAMING
from pagoda.server.served_model import ServedModel
from pagoda.server.state import ServerState
from pagoda.server.turn import Piece, Turn, TurnRequest

router = Router()


@router.post(
    "/v1/completions",
    answer=CompletionResponse,
    chunk=CompletionChunk,
    body=CompletionRequest,
)
async def create_completion(http: Request) -> Response:
    """Continue a text, a list of token ids, or several of either."""
    return await respond(http, COMPLETIONS)


class CompletionDialect:
    """OpenAI's completions of texts."""

    body = CompletionRequest
    id_prefix = "cmpl"
    framing = OPENAI_FRAMING

    def request(self, body: CompletionRequest, model: ServedModel) -> TurnRequest:
        of_prompt = body.num_logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
        num_logprobs = body.num_logprobs
        if num_logprobs is None and body.num_outputs > (body.n or 1):
            num_logprobs = 0  # of the sampled tokens only: what candidates are ranked by
        params = body.sampling_params(body.asked_tokens[1], num_logprobs, of_prompt, model.default_sampling)
        return turn_request(body, params=params, prompts=body.prompts(), add_special_tokens=body.add_special_tokens)

    def answer(self, body: CompletionRequest, turn: Turn, state: ServerState) -> "CompletionAnswer":
        return CompletionAnswer(body, turn, state)


COMPLETIONS = CompletionDialect()


class CompletionAnswer(ChunkedAnswer):
    """The answer to a text completion. Tracks the text offset of each choice."""

    def __init__(self, body: CompletionRequest, turn: Turn, state: ServerState) -> None:
        chunk = CompletionChunk(id=turn.id, created=turn.created, model=turn.model, choices=[])
        super().__init__(body, turn, state, chunk)
        self._body = body
        self._n = body.num_outputs
        # Read for every delta of a stream, so they are worked out once.
        self._num_logprobs = body.num_logprobs
        num_choices = len(self.generation.requests) * self._n
        self._offsets = [0] * num_choices
        self._has_begun = [False] * num_choices

    def whole(self, pieces: Sequence[Piece]) -> CompletionResponse:
        num_kept = self._body.n or 1
        is_ranked = num_kept < self._n
        choices = [self.choice(piece) for piece in (best_of(pieces, num_kept) if is_ranked else pieces)]
        if is_ranked:
            for at, choice in enumerate(choices):
                choice.index = at
        turn, usage = self.turn, self.generation.usage
        return CompletionResponse(
            id=turn.id, created=turn.created, model=turn.model, choices=choices, usage=usage, timings=self.timings
        )

    def choice(self, piece: Piece) -> CompletionChoice:
        """Return the choice of a piece. The first one also has what was requested about the prompt."""
        body, output, index = self._body, piece.output, piece.prompt
        at = index * self._n + output.index
        is_first = not self._has_begun[at]
        self._has_begun[at] = True
        text = output.text
        if is_first and body.echo:
            given = self._prompt_token_ids(index)[self.generation.requests[index].num_embeds :]
            text = self.turn.text.decode(given) + text
        choice = CompletionChoice(at, text, None, output.finish_reason, output.stop_reason)
        if self._num_logprobs is not None:
            choice.logprobs = self._logprobs(at, piece, is_first)
        if is_first and body.prompt_logprobs is not None and piece.delta.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(piece.delta.prompt_logprobs)
        if body.return_token_ids:
            choice.token_ids = output.token_ids
            if is_first:
                choice.prompt_token_ids = self._prompt_token_ids(index)
        return choice

    def _logprobs(self, at: int, piece: Piece, is_first: bool) -> CompletionLogprobs:
        """Return the log-probabilities of an output; with echo, the first ones are those of the prompt."""
        token_ids, entries = piece.output.token_ids, piece.output.logprobs or []
        if is_first and self._body.echo:
            prompt_ids = self._prompt_token_ids(piece.prompt)
            known = piece.delta.prompt_logprobs or [None] * len(prompt_ids)
            entries, token_ids = [*known, *entries], [*prompt_ids, *token_ids]
        logprobs, self._offsets[at] = completion_logprobs(
            token_ids,
            entries,
            self._num_logprobs or 0,
            self._offsets[at],
            lambda token_id: self.turn.text.decode([token_id]),
            self.writes_ids,
        )
        return logprobs

    def _prompt_token_ids(self, index: int) -> list[int]:
        return self.generation.requests[index].prompt_token_ids.tolist()


def best_of(pieces: Sequence[Piece], num_kept: int) -> list[Piece]:
    """Return, of each prompt, the outputs with the highest mean log-probability per token, the best one first."""

    def mean(piece: Piece) -> float:
        output = piece.output
        total = -math.inf if output.cumulative_logprob is None else output.cumulative_logprob
        return total / max(len(output.token_ids), 1)

    kept: list[Piece] = []
    for prompt in sorted({piece.prompt for piece in pieces}):
        ranked = sorted((piece for piece in pieces if piece.prompt == prompt), key=mean, reverse=True)
        kept += ranked[:num_kept]
    return kept
