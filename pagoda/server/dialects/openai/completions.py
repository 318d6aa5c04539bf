"""POST /v1/completions"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.inputs.infill import Infill
from pagoda.engine.inputs.prompt_embeds import EncodedEmbeds
from pagoda.engine.inputs.prompts import Prompt
from pagoda.server.body import Flag, NumLogprobs, OutputCount, PromptOnlyCount, TokenId, as_list, check_alike
from pagoda.server.dialects.infill import end_ids
from pagoda.server.dialects.openai.answers import (
    ChunkedAnswer,
    LogprobDicts,
    PromptLogprobs,
    Timings,
    Usage,
    finite,
    id_text,
    prompt_logprobs,
    shown_token,
    token_text,
    turn_request,
)
from pagoda.server.dialects.openai.body import CHAT_ONLY, SamplingBody, unserved_with
from pagoda.server.respond import respond
from pagoda.server.routing import Router
from pagoda.server.served_model import ServedModel
from pagoda.server.state import ServerState
from pagoda.server.turn import Piece, Turn, TurnRequest

router = Router()

# ---- requests


class CompletionRequest(SamplingBody, kw_only=True, frozen=True):
    """POST /v1/completions

    prompt: A text, token ids, or a list of either.
    suffix: The text after the gap that the output fills; `prompt` is the one before. For models whose vocabulary has
        tokens for that.
    prompt_embeds: Embeddings in place of tokens: a tensor of torch.save, in base64, or several.
    max_tokens: Most tokens of an output: 16, if not given; with null, as many as the model's context has left. With 0,
        the prompt is only scored (`echo`, `logprobs`); it may then fill the model's context.
    max_completion_tokens: The same; goes before `max_tokens`.
    best_of: Generate so many outputs, and return the `n` most likely ones.
    logprobs: Log-probabilities of each token and so many of the most likely ones.
    echo: Begin the answer with the prompt.
    add_special_tokens: Add the tokenizer's own, such as the one that begins a text.
    """

    unserved = unserved_with(CHAT_ONLY, "text completion", "/v1/chat/completions")
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None
    max_tokens: PromptOnlyCount | UnsetType | None = UNSET
    max_completion_tokens: PromptOnlyCount | None = None
    best_of: OutputCount | None = None
    logprobs: NumLogprobs | bool | None = None
    echo: Flag = False
    add_special_tokens: Flag = True

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if not self.prompt_embeds and not self.prompt:
            raise RequestError("prompt: is required" if self.prompt is None else "prompt: is empty", "prompt")
        limits.check("prompts", self.num_prompts, "prompt")
        self._check_best_of()
        limits.check("outputs", self.num_prompts * self.num_outputs, "prompt")
        limits.check_lists_of_prompts(self, self.num_prompts)
        if self.truncate_prompt_tokens is not None:
            num_chars = sum(len(prompt) for prompt in self._texts() if isinstance(prompt, str))
            limits.check("tokenized_chars", num_chars, "prompt")
        check_alike("prompt", self.prompt or "")
        self._check_embeds()
        self._check_suffix(limits)
        field, asked = self.asked_tokens
        if asked == 0 and not self.echo:
            raise RequestError(f"{field}: 0 is only allowed with echo", field)
        if self.logprobs is True:
            raise RequestError("logprobs: expected an integer >= 0, got true", "logprobs")
        if self.echo and self.logprob_token_ids:
            why = "with echo, the prompt's log-probabilities are of the most likely tokens; leave out one of the two"
            raise RequestError(f"logprob_token_ids: {why}", "logprob_token_ids")

    @property
    def num_prompts(self) -> int:
        """How many prompts there are."""
        return len(self.prompts())

    @property
    def num_outputs(self) -> int:
        """How many outputs are generated for each prompt; with `best_of`, only the best `n` of them are returned."""
        return self.best_of or self.n or 1

    def _check_best_of(self) -> None:
        if self.best_of is None or self.best_of == (self.n or 1):
            return
        if self.best_of < (self.n or 1):
            raise RequestError(f"best_of: must be at least n, which is {self.n}", "best_of")
        if self.stream:
            raise RequestError("best_of: outputs are ranked when all are done; set stream to false", "best_of")
        if self.use_beam_search:
            raise RequestError("best_of: a beam search returns its best beams; set only n, its width", "best_of")

    def _check_embeds(self) -> None:
        if not self.prompt_embeds:
            return
        for name in ("echo", "prompt_logprobs"):
            if getattr(self, name) not in (None, False):
                raise RequestError(f"{name}: a prompt of embeddings has no tokens; leave {name} out", name)

    def _check_suffix(self, limits: RequestLimits) -> None:
        if not self.suffix:
            return
        if self.prompt_embeds or not all(isinstance(prompt, str) for prompt in self._texts()):
            raise RequestError("suffix: the prompt must be a text; give it as a string", "prompt")
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(self, name) not in (None, False):
                raise RequestError(f"{name}: is not for prompts with a suffix; leave it out", name)
        limits.check("tokenized_chars", self.num_prompts * len(self.suffix), "suffix")

    @property
    def num_logprobs(self) -> int | None:
        """Number of log-probabilities per token; None for null and false."""
        if self.logprob_token_ids:
            return len(set(self.logprob_token_ids))
        return None if self.logprobs is None or self.logprobs is False else int(self.logprobs)

    def prompts(self) -> list[Prompt]:
        """The prompts as a list, in order: first those that are embeddings."""
        return [*self._embeds(), *self._texts()]

    def _embeds(self) -> list[Prompt]:
        given = self.prompt_embeds or []
        if isinstance(given, str):
            return [{"prompt_embeds": EncodedEmbeds(given)}]
        return [{"prompt_embeds": EncodedEmbeds(data, f"prompt_embeds[{index}]")} for index, data in enumerate(given)]

    def _texts(self) -> list[str | list[int]]:
        return as_list(self.prompt) if self.prompt else []


# ---- answers


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: None = None
    system_fingerprint: None = None
    timings: Timings | UnsetType = UNSET


class CompletionChunk(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


# ---- the dialect


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
    id_prefix = "cmpl-"

    def request(self, body: CompletionRequest, model: ServedModel) -> TurnRequest:
        of_prompt = body.num_logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
        num_logprobs = body.num_logprobs
        if num_logprobs is None and body.num_outputs > (body.n or 1):
            num_logprobs = 0  # of the sampled tokens only: what candidates are ranked by
        params = body.sampling_params(body.asked_tokens[1], num_logprobs, of_prompt, model.default_sampling)
        prompts = body.prompts()
        if body.suffix:
            params.stop_token_ids = (*params.stop_token_ids, *end_ids(model, "suffix"))
            prompts = [{"infill": Infill(str(prompt), body.suffix)} for prompt in prompts]
        return turn_request(body, params=params, prompts=prompts, add_special_tokens=body.add_special_tokens)

    def answer(self, body: CompletionRequest, turn: Turn, state: ServerState) -> "CompletionAnswer":
        return CompletionAnswer(body, turn, state)


COMPLETIONS = CompletionDialect()


class CompletionAnswer(ChunkedAnswer[CompletionChunk, CompletionResponse]):
    """The answer to a text completion. Tracks the text offset of each choice."""

    def __init__(self, body: CompletionRequest, turn: Turn, state: ServerState) -> None:
        super().__init__(body, turn, state, CompletionChunk, CompletionResponse)
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
        return self.answer_of(choices)

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


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: LogprobDicts,
    num_top: int,
    offset: int,
    text_of: Callable[[int], str],
    as_ids: bool = False,
) -> tuple[CompletionLogprobs, int]:
    """Return the `logprobs` object of a text completion, and the text offset after it.

    offset: of the first token's text.   text_of: returns the text of a token without an entry (a prompt's first one).
    as_ids: write tokens as "token_id:ID"; offsets are still those of their texts.
    `top_logprobs` has each token itself, first, and then the most likely ones.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, entry in zip(token_ids, logprobs, strict=False):
        text = token_text(token_id, entry) if entry is not None else text_of(token_id)
        tokens.append(id_text(token_id) if as_ids else text)
        offsets.append(offset)
        offset += len(text)
        if entry is None:
            chosen.append(None)
            top.append(None)
            continue
        own = finite(entry[token_id].logprob)
        chosen.append(own)
        best = sorted(entry.items(), key=lambda item: item[1].rank or 0)[:num_top]
        # Texts may be equal, as of bytes that are no characters alone: the token's own value stays, then the likelier.
        shown = {shown_token(token_id, entry, as_ids): own}
        for i, value in best:
            shown.setdefault(shown_token(i, entry, as_ids), finite(value.logprob))
        top.append(shown)
    return CompletionLogprobs(tokens, chosen, top, offsets), offset
