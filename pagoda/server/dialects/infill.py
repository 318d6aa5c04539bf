"""POST /infill: llama.cpp's API to fill in the middle, as editors use it; and what other dialects need of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.inputs.infill import Infill
from pagoda.engine.inputs.prompts import InfillPrompt
from pagoda.server.body import Body, Flag, Int32, ModelBody, OrDefault, Seed
from pagoda.server.dialects.openai.answers import Timings, timings_of
from pagoda.server.respond import respond
from pagoda.server.routing import Router
from pagoda.server.sending import OPENAI_FRAMING, Framing, event
from pagoda.server.served_model import ServedModel
from pagoda.server.state import ServerState
from pagoda.server.turn import Piece, Turn, TurnRequest, naming_fields

router = Router()


def end_ids(model: ServedModel, param: str) -> tuple[int, ...]:
    """Return the tokens that end what fills a gap.   param: that asks for it.

    Raises RequestError for a model that cannot fill gaps.
    """
    writer = model.llm.input_processor.prompts.infill
    if writer is None:
        text = "the vocabulary of this model has no tokens for filling in the middle"
        raise RequestError(f"{param}: {text}; leave it out, or serve a model for code that has them", param)
    return writer.end_ids


class InfillExtra(Body, kw_only=True, frozen=True):
    """Another file.

    text: Of the file, or a piece of it.
    filename: Its name, for models that read names.
    """

    text: str
    filename: OrDefault[str] = "file"


class InfillRequest(ModelBody, kw_only=True, frozen=True):
    """POST /infill

    input_prefix: The text before the gap.
    input_suffix: The text after the gap.
    input_extra: Other files that the text may draw on.
    prompt: What the text begins with: it comes after `input_prefix`.
    n_predict: Most tokens of the text; -1: as many as the model's context has left; 0: only read the prompt.
    stream: Send the answer in pieces, as it is generated.
    seed: Makes the output repeatable; -1: another one each time.
    cache_prompt, id_slot, samplers, t_max_prompt_ms, t_max_predict_ms: Have no effect.
    """

    input_prefix: OrDefault[str] = ""
    input_suffix: OrDefault[str] = ""
    input_extra: list[InfillExtra] | None = None
    prompt: OrDefault[str] = ""
    n_predict: OrDefault[Int32] = -1
    stream: Flag = False
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    cache_prompt: bool | None = None
    id_slot: Int32 | None = None
    samplers: list[str] | None = None
    t_max_prompt_ms: Int32 | None = None
    t_max_predict_ms: Int32 | None = None

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(model=self.model)
        limits.check("stop_strings", len(self.stop) if isinstance(self.stop, list) else 1, "stop")
        limits.check("messages", len(self.input_extra or ()), "input_extra")
        limits.check("tokenized_chars", self.gap.num_chars, "input_prefix")

    @property
    def gap(self) -> Infill:
        extra = [(one.filename, one.text) for one in self.input_extra or ()]
        return Infill(self.input_prefix + self.prompt, self.input_suffix, extra)


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
_OWN_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "prompt": "input_prefix"}


class InfillAnswer(Struct, kw_only=True):
    """What fills a gap, or a piece of it.

    stop: it is the whole, or the last piece, which has what follows.
    stop_type: eos, word or limit.   stopping_word: of `stop`.
    tokens_evaluated, tokens_cached, tokens_predicted: of the prompt, of it those found in the cache, of the output.
    """

    content: str
    stop: bool = False
    model: str | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class InfillWriting:
    """Writes an answer, whole or as server-sent events."""

    framing = Framing(OPENAI_FRAMING.error, b"")

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._last = InfillAnswer(content="", stop=True, model=turn.model, stopping_word="")

    def opening(self) -> bytes:
        return b""

    def frames(self, piece: Piece) -> bytes:
        self._note(piece)
        return event(InfillAnswer(content=piece.output.text)) if piece.output.text else b""

    def closing(self) -> bytes:
        return event(self._whole(""))

    def whole(self, pieces: Sequence[Piece]) -> InfillAnswer:
        (piece,) = pieces
        self._note(piece)
        return self._whole(piece.output.text)

    def _note(self, piece: Piece) -> None:
        reason, by = piece.output.finish_reason, piece.output.stop_reason
        if reason is not None:
            self._last.stop_type = "limit" if reason == "length" else "word" if isinstance(by, str) else "eos"
            self._last.stopping_word = by if isinstance(by, str) else ""

    def _whole(self, text: str) -> InfillAnswer:
        last, generation = self._last, self._turn.generation
        last.content, last.truncated = text, False
        last.tokens_evaluated, last.tokens_predicted = generation.num_prompt_tokens, generation.num_output_tokens
        last.tokens_cached, last.timings = generation.num_cached_tokens, timings_of(generation)
        return last


class InfillDialect:
    """llama.cpp's gaps: what does not fit into the context is cut."""

    body = InfillRequest
    id_prefix = "infill-"

    def request(self, body: InfillRequest, model: ServedModel) -> TurnRequest:
        given: dict[str, Any] = {name: getattr(body, name) for name in _SAMPLING}
        given |= {"repetition_penalty": body.repeat_penalty, "seed": None if body.seed == -1 else body.seed}
        given["max_tokens"] = None if body.n_predict < 0 else body.n_predict
        with naming_fields(_origin):
            params = SamplingParams.of_model({**model.default_sampling, "max_tokens": None}, **given)
        context = model.max_model_len
        reserved = context // 4 if body.n_predict < 0 else min(body.n_predict, context // 2)  # or nothing were read
        params.stop_token_ids = (*params.stop_token_ids, *end_ids(model, "input_suffix"))
        prompt: InfillPrompt = {"infill": replace(body.gap, num_reserved=reserved)}
        return TurnRequest(params, prompts=[prompt], is_stream=body.stream, origin=_origin)

    def answer(self, body: InfillRequest, turn: Turn, state: ServerState) -> InfillWriting:
        return InfillWriting(turn)


def _origin(param: str) -> str:
    return "" if param == "truncate_prompt_tokens" else _OWN_NAMES.get(param, param)


INFILL = InfillDialect()


@router.post("/infill", answer=InfillAnswer, chunk=InfillAnswer, body=InfillRequest)
async def infill(http: Request) -> Response:
    """Fill a gap in a text, in the form of llama.cpp's API, for models whose vocabulary has tokens for that."""
    return await respond(http, INFILL)
