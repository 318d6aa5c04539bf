"""POST /api/chat, /api/generate: Ollama's API, whose streams are lines of JSON.

Of what has no counterpart here, `keep_alive` and the options of Ollama's own runner have no effect, and options that
would change the text are refused. A prompt that does not fit into the context is an error: nothing is cut off.
"""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.errors import RequestError
from pagoda.base.text import encodable_json
from pagoda.engine.answers.reasoning import reasoning_of
from pagoda.engine.inputs.infill import Infill
from pagoda.server.dialects.infill import end_ids
from pagoda.server.dialects.ollama.bodies import (
    OllamaBody,
    OllamaCall,
    OllamaCalledFunction,
    OllamaChatRequest,
    OllamaGenerateRequest,
    origin,
    origin_of_prompt,
    template_messages,
)
from pagoda.server.errors import ApiError
from pagoda.server.respond import respond_to
from pagoda.server.routing import Router
from pagoda.server.sending import Framing, cancel_on_disconnect, json_response
from pagoda.server.served_model import ServedModel
from pagoda.server.state import ServerState, state_of
from pagoda.server.turn import (
    Answer,
    CallDelta,
    Dialect,
    Piece,
    Said,
    Turn,
    TurnEnd,
    TurnRequest,
    add_call,
    naming_fields,
)

LINES = "application/x-ndjson"
LATEST = ":latest"
"""What Ollama's clients add to a name without a tag, or leave out."""
_encode = msgspec.json.Encoder().encode


class OllamaAnswer(Struct, kw_only=True):
    """A line of an answer, or the whole: the last line also has counts, and durations in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaAnswerMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaError(Struct, frozen=True):
    error: str


def ollama_error(error: ApiError, request_id: str) -> OllamaError:
    """Return an error in Ollama's format."""
    return OllamaError(error.message)


def line(answer: Struct) -> bytes:
    return _encode(answer) + b"\n"


def timestamp(seconds: float) -> str:
    """Return a time in Ollama's format.   seconds: since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class OllamaWriter:
    """Writes an answer as lines. A call is sent when it is whole."""

    framing = Framing(lambda error, request_id: line(ollama_error(error, request_id)), b"", LINES)

    def __init__(self, body: OllamaBody, turn: Turn) -> None:
        self._is_chat = isinstance(body, OllamaChatRequest)
        self._hides_thoughts = body.think is False
        self._turn = turn
        self._calls: list[CallDelta] = []
        self._num_sent = 0
        self._end: TurnEnd | None = None

    def opening(self) -> bytes:
        return b""

    def frames(self, piece: Piece) -> bytes:
        said = self._noted(piece)
        calls = self._whole_calls()
        return line(self._answer(said, calls)) if said.text or said.reasoning or calls else b""

    def closing(self) -> bytes:
        return line(self._last(self._answer(Said(), [])))

    def whole(self, pieces: Sequence[Piece]) -> OllamaAnswer:
        (piece,) = pieces
        return self._last(self._answer(self._noted(piece), self._whole_calls()))

    def _noted(self, piece: Piece) -> Said:
        """Return what a piece says, without thoughts that are hidden, after noting its calls and its end."""
        said = piece.said
        if self._hides_thoughts:
            said.reasoning = ""
        self._end = said.end or self._end
        for call in said.calls:
            add_call(self._calls, call)
        return said

    def _whole_calls(self) -> list[OllamaCall]:
        """Return the calls that are whole now and were not returned before."""
        num_whole = len(self._calls) - (self._end is None)
        new, self._num_sent = self._calls[self._num_sent : num_whole], max(self._num_sent, num_whole)
        return [
            OllamaCall(
                OllamaCalledFunction(one.name or "", encodable_json(one.arguments), one.index),
                one.id or UNSET,
                one.index,
            )
            for one in new
        ]

    def _answer(self, said: Said, calls: list[OllamaCall]) -> OllamaAnswer:
        thought = said.reasoning or UNSET
        common = {"model": self._turn.model, "created_at": timestamp(time.time()), "done": False}
        if not self._is_chat:
            return OllamaGenerateAnswer(**common, response=said.text, thinking=thought)
        return OllamaChatAnswer(
            **common, message=OllamaAnswerMessage(content=said.text, thinking=thought, tool_calls=calls or UNSET)
        )

    def _last(self, answer: OllamaAnswer) -> OllamaAnswer:
        generation = self._turn.generation
        figures = generation.figures
        answer.done = True
        reason = "stop" if self._end is None else self._end.reason
        answer.done_reason = "stop" if reason == "tool_calls" else reason
        answer.total_duration = round(1e9 * (time.perf_counter() - generation.arrived_s))
        answer.load_duration = 0
        answer.prompt_eval_count, answer.eval_count = generation.num_prompt_tokens, generation.num_output_tokens
        answer.prompt_eval_duration = _as_ns(figures.prefill_ms)
        answer.eval_duration = _as_ns(figures.decode_ms)
        return answer


def _as_ns(ms: float | UnsetType) -> int:
    return 0 if ms is UNSET else round(1e6 * ms)


# ---- routes


class OllamaChatDialect:
    """Ollama's conversations."""

    body = OllamaChatRequest
    id_prefix = "ollama-"

    def request(self, body: OllamaChatRequest, model: ServedModel) -> TurnRequest:
        tools = body.tools or []
        _check_think(body, model, bool(tools))
        with naming_fields(origin):
            params = body.params(model.default_sampling)
        conversation = body.conversation(template_messages(body.messages or ()), tools)
        return TurnRequest(params, conversation, is_stream=body.stream, origin=body.origin)

    def answer(self, body: OllamaChatRequest, turn: Turn, state: ServerState) -> OllamaWriter:
        return OllamaWriter(body, turn)


class OllamaGenerateDialect:
    """Ollama's prompts: what a user says, or a text to continue."""

    body = OllamaGenerateRequest
    id_prefix = "ollama-"

    def request(self, body: OllamaGenerateRequest, model: ServedModel) -> TurnRequest:
        _check_think(body, model, False)
        with naming_fields(origin):
            params = body.params(model.default_sampling)
        common: dict[str, Any] = {"is_stream": body.stream, "origin": origin_of_prompt}
        is_text = model.chat_template is None and not body.system and not body.images
        if body.suffix:
            params.stop_token_ids = (*params.stop_token_ids, *end_ids(model, "suffix"))
            return TurnRequest(params, prompts=[{"infill": Infill(body.prompt or "", body.suffix)}], **common)
        if body.raw or is_text:
            return TurnRequest(params, prompts=[body.prompt or ""], **common)
        return TurnRequest(params, body.conversation(body.messages, []), **common)

    def answer(self, body: OllamaGenerateRequest, turn: Turn, state: ServerState) -> OllamaWriter:
        return OllamaWriter(body, turn)


def _check_think(body: OllamaBody, model: ServedModel, has_tools: bool) -> None:
    if body.think and reasoning_of(model.template_for(None, has_tools)) is None:
        raise RequestError("think: this model does not support thinking; leave it out, or set it to false", "think")


CHAT, GENERATE = OllamaChatDialect(), OllamaGenerateDialect()
router = Router(error=OllamaError, error_form=ollama_error, stream_type=LINES)


def model_name(state: ServerState, name: str | None) -> str | None:
    """Return the name of a model that a caller means, who may have added or left out LATEST."""
    known = state.models.all_names
    if name is None or name in known:
        return name
    return f"{name}{LATEST}" if f"{name}{LATEST}" in known else name.removesuffix(LATEST) or name


@router.post("/api/chat", answer=OllamaChatAnswer, chunk=OllamaChatAnswer, body=OllamaChatRequest)
async def ollama_chat(http: Request) -> Response:
    """Generate the assistant's next message, in the form of Ollama's API. Without messages, nothing is generated."""
    message = OllamaAnswerMessage(content="")
    return await _respond(http, CHAT, lambda name: OllamaChatAnswer(**_loaded(name), message=message))


@router.post("/api/generate", answer=OllamaGenerateAnswer, chunk=OllamaGenerateAnswer, body=OllamaGenerateRequest)
async def ollama_generate(http: Request) -> Response:
    """Answer a prompt, or continue it if it is raw, in the form of Ollama's API. Without one, nothing is generated."""
    return await _respond(http, GENERATE, lambda name: OllamaGenerateAnswer(**_loaded(name), response=""))


async def _respond(http: Request, dialect: Dialect[Any, Answer], loaded: Callable[[str], OllamaAnswer]) -> Response:
    """Answer a request.   loaded: makes the answer to one that only loads the model, from its name."""
    state = state_of(http)
    body = await state.bodies.read(http, dialect.body)
    body = msgspec.structs.replace(body, model=model_name(state, body.model))
    picked = state.pick(http, body.model)
    unloads = body.unloads and state.is_operator(http)
    if body.is_empty:
        if not unloads:
            await cancel_on_disconnect(http, state.models.load(picked.model))
        response: Response = json_response(loaded(picked.name))
    else:
        response = await respond_to(http, dialect, body)
    if unloads:  # a stream, which has begun, keeps it until its end
        state.models.unload_when_idle(picked.model)
    return response


def _loaded(name: str) -> dict[str, Any]:
    return {"model": name, "created_at": timestamp(time.time()), "done": True, "done_reason": "load"}
