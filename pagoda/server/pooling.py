"""POST /v1/embeddings, /pooling, /classify, /v1/score, /score, /v1/rerank, /v2/rerank, /rerank"""

import base64
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.errors import RequestError
from pagoda.base.outputs import RequestOutput
from pagoda.base.pooling import PoolingParams
from pagoda.engine.inputs.params_preparer import Params
from pagoda.engine.inputs.pooling_inputs import check_pooling, instruction_of, with_instruction
from pagoda.engine.inputs.prompts import Prompt
from pagoda.engine.inputs.scoring import Scoring
from pagoda.engine.outputs.results import vector_of
from pagoda.server.answers import (
    ClassificationData,
    ClassificationResponse,
    EmbeddingData,
    EmbeddingResponse,
    PooledList,
    PoolingData,
    PoolingResponse,
    PoolingUsage,
    PromptTokensDetails,
    RankedDocument,
    RerankResponse,
    RerankResult,
    ScoreData,
    ScoreResponse,
)
from pagoda.server.generation import Generation, RawPrompts
from pagoda.server.pooling_bodies import (
    ClassificationRequest,
    EmbeddingRequest,
    InputBody,
    PairBody,
    PoolingBody,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    VectorBody,
)
from pagoda.server.remote_admission import AnyPlace
from pagoda.server.render import render_chat
from pagoda.server.routing import Router
from pagoda.server.sending import cancel_on_disconnect, json_response, run_sized
from pagoda.server.served_model import PickedModel
from pagoda.server.state import ServerState, state_of

router = Router()

_ELEMENTS_PER_TOKEN = 16
"""So many elements of a vector take as long to encode as a token with 20 log-probabilities."""
_CHARS_PER_TOKEN = 1024
"""So many characters of a document, too."""

B = TypeVar("B", bound=PoolingBody, covariant=True)
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class PoolingCall(Generic[B]):
    """One HTTP request.   picked: the model that its body names.   id_prefix: of its id."""

    http: Request
    state: ServerState
    body: B
    picked: PickedModel
    id_prefix: str

    def params(self) -> PoolingParams:
        """Return what the body asks of the model. Raises RequestError if the model cannot do it."""
        return check_pooling(self.body.pooling_params(), self.picked.model.tasks)

    def asked(
        self, prompts: Sequence[Prompt], params: Sequence[Params], names: Sequence[str], adds_tokens: bool = True
    ) -> RawPrompts:
        """Return the prompts to run.   names, adds_tokens: as for RawPrompts."""
        body = self.body
        return RawPrompts(prompts, params, names, self.picked.lora, adds_tokens, body.priority, body.cache_salt)


@dataclass(frozen=True, slots=True)
class Pooled:
    """The results of one HTTP request.   vectors: in the order of its prompts.   created: seconds since the epoch."""

    id: str
    created: int
    model: str
    vectors: list[np.ndarray]
    usage: PoolingUsage

    @property
    def num_elements(self) -> int:
        """Elements of all vectors."""
        return sum(vector.size for vector in self.vectors)

    async def answer(self, kind: type[PooledList[D]], entry: Callable[[int, np.ndarray], D]) -> Response:
        """Return the answer with an entry for each vector.   entry: from its index and the vector."""

        def make() -> PooledList[D]:
            data = [entry(index, vector) for index, vector in enumerate(self.vectors)]
            return kind(id=self.id, created=self.created, model=self.model, data=data, usage=self.usage)

        return await self.respond(make)

    async def respond(self, make: Callable[[], Struct]) -> Response:
        """Return the answer that is made of the vectors."""
        return await run_sized(self.num_elements // _ELEMENTS_PER_TOKEN, lambda: json_response(make()))


@router.post("/v1/embeddings", answer=EmbeddingResponse, body=EmbeddingRequest)
async def create_embedding(http: Request) -> Response:
    """Return the embedding of a text, a list of token ids, of several of either, or of a conversation."""
    body = await state_of(http).bodies.read(http, EmbeddingRequest)
    pooled = await embed(http, body)
    numbers = _written(body)
    return await pooled.answer(
        EmbeddingResponse, lambda index, vector: EmbeddingData(index=index, embedding=numbers(vector))
    )


async def embed(http: Request, body: EmbeddingRequest) -> Pooled:
    """Return the embeddings that a body asks for. Raises RequestError, ApiError or WorkerDied."""
    call = _call(http, body, "embd")
    params = call.params()
    return await _pool_inputs(call, params, instruction_of(call.picked.model.tasks.plan, body.prompt_name))


@router.post("/pooling", answer=PoolingResponse, body=PoolingRequest)
async def create_pooling(http: Request) -> Response:
    """Return what the model makes of the hidden states of each input: an embedding, classes, or a vector per token."""
    call = await _read(http, PoolingRequest, "pooling")
    pooled = await _pool_inputs(call, call.params())
    numbers = _written(call.body)
    return await pooled.answer(PoolingResponse, lambda index, vector: PoolingData(index=index, data=numbers(vector)))


@router.post("/classify", answer=ClassificationResponse, body=ClassificationRequest)
async def create_classification(http: Request) -> Response:
    """Return the class probabilities of each input."""
    call = await _read(http, ClassificationRequest, "classify")
    pooled = await _pool_inputs(call, call.params())
    labels = call.picked.model.tasks.plan.labels

    def entry(index: int, vector: np.ndarray) -> ClassificationData:
        label = labels[int(np.argmax(vector))]
        return ClassificationData(index=index, label=label, probs=vector.tolist(), num_classes=len(vector))

    return await pooled.answer(ClassificationResponse, entry)


@router.post("/v1/score", answer=ScoreResponse, body=ScoreRequest)
@router.post("/score", answer=ScoreResponse, body=ScoreRequest)
async def create_score(http: Request) -> Response:
    """Return how well each pair of texts matches."""
    call = await _read(http, ScoreRequest, "score")
    first, second = call.body.texts()
    pooled, scoring = await _score(call, first, second, call.body.names)

    def respond() -> Response:
        data = [ScoreData(index=index, score=score) for index, score in enumerate(scoring.scores(pooled.vectors))]
        answer = ScoreResponse(id=pooled.id, created=pooled.created, model=pooled.model, data=data, usage=pooled.usage)
        return json_response(answer)

    return await run_sized(pooled.num_elements // _ELEMENTS_PER_TOKEN, respond)


@router.post("/v1/rerank", answer=RerankResponse, body=RerankRequest)
@router.post("/v2/rerank", answer=RerankResponse, body=RerankRequest)
@router.post("/rerank", answer=RerankResponse, body=RerankRequest)
async def create_ranking(http: Request) -> Response:
    """Return documents in the order of how well they match a query."""
    call = await _read(http, RerankRequest, "rerank")
    body, texts = call.body, call.body.texts()
    pooled, scoring = await _score(call, [body.query], texts, ("query", "documents"))

    def respond() -> Response:
        scores = scoring.scores(pooled.vectors)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])  # stable: of equals, the first
        results = [RerankResult(index=index, relevance_score=scores[index]) for index in order[: body.top_n or None]]
        if body.return_documents:
            for result in results:
                result.document = RankedDocument(texts[result.index])
        return json_response(RerankResponse(id=pooled.id, model=pooled.model, usage=pooled.usage, results=results))

    num_chars = sum(map(len, texts)) if body.return_documents else 0
    return await run_sized(pooled.num_elements // _ELEMENTS_PER_TOKEN + num_chars // _CHARS_PER_TOKEN, respond)


async def _read(http: Request, kind: type[B], id_prefix: str) -> PoolingCall[B]:
    """Read the request's body. Raises RequestError, or ApiError (404) for a model that is not served."""
    return _call(http, await state_of(http).bodies.read(http, kind), id_prefix)


def _call(http: Request, body: B, id_prefix: str) -> PoolingCall[B]:
    """Return the call with a body that has been read. Raises ApiError (404) for a model that is not served."""
    state = state_of(http)
    picked = state.pick(http, body.model)
    picked.model.warn_of_untrained(http)
    return PoolingCall(http, state, body, picked, id_prefix)


async def _score(
    call: PoolingCall[PairBody], first: list[str], second: list[str], names: tuple[str, str]
) -> tuple[Pooled, Scoring]:
    """Pool pairs of texts; return what makes scores of the vectors, too.   names: of the fields of the texts."""
    body, text = call.body, call.state.starter.llm.text
    call.picked.model.check_template(body.chat_template)
    async with call.state.starter.admitted(call.http, len(second)) as place:
        planning = text.plan_scores(first, second, body.pooling_params(), names, body.pair_options())
        scoring: Scoring = await cancel_on_disconnect(call.http, planning)
        of_first, of_second = _numbered(names[0], len(first)), _numbered(names[1], len(second))
        of_prompts = of_second if len(scoring.prompts) == len(second) else [*of_first, *of_second]
        asked = call.asked(scoring.prompts, scoring.params, of_prompts)
        pooled = await _pool(call, place, asked)
    return pooled, scoring


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}[{index}]" for index in range(count)] if count > 1 else [name]


async def _pool_inputs(call: PoolingCall[InputBody], params: PoolingParams, instruction: str = "") -> Pooled:
    """Pool each input on its own, with an instruction in front of each text, or the conversation."""
    body, names = call.body, call.body.names()
    prompts: list[Prompt]
    async with call.state.starter.admitted(call.http, len(names)) as place:
        if (conversation := body.conversation) is None:
            prompts = [with_instruction(one, instruction) for one in body.inputs()]
        else:
            must_fit = body.truncate_prompt_tokens is None
            rendered = await render_chat(call.http, call.picked.model, conversation, must_fit)
            prompts = [rendered.token_ids]
        asked = call.asked(prompts, [params] * len(prompts), names, body.add_special_tokens is not False)
        return await _pool(call, place, asked)


async def _pool(call: PoolingCall[PoolingBody], place: AnyPlace, asked: RawPrompts) -> Pooled:
    """Pool all prompts. Raises RequestError, ApiError or WorkerDied."""
    http, state, body = call.http, call.state, call.body
    request_id = state.request_id(http, body.request_id, call.id_prefix, len(asked.prompts))
    generation = await state.starter.begin(http, place, asked, request_id)
    with contextlib.ExitStack() as at_end:
        at_end.callback(generation.close)
        outputs = await cancel_on_disconnect(http, _gather(generation))
        num_tokens = generation.num_prompt_tokens
        usage = PoolingUsage(num_tokens, num_tokens, PromptTokensDetails(generation.num_cached_tokens))
        vectors = [vector_of(output) for output in outputs]
        return Pooled(generation.request_id, int(time.time()), call.picked.name, vectors, usage)


async def _gather(generation: Generation) -> list[RequestOutput]:
    """Return the finished output of each prompt."""
    found: dict[int, RequestOutput] = {}
    async with generation.outputs() as deltas:
        async for index, delta in deltas:
            if delta.finished:
                found[index] = delta
    return [found[index] for index in range(len(generation.requests))]


def _written(body: VectorBody) -> Callable[[np.ndarray], Any]:
    """Return what turns a vector into the form that a body asks for."""
    if body.encoding_format != "base64":
        return np.ndarray.tolist
    order = ">" if body.endianness == "big" else "<"

    def as_base64(vector: np.ndarray) -> str:
        if body.embed_dtype == "bfloat16":
            bits = vector.astype(np.float32, copy=False).view(np.uint32)
            numbers = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(f"{order}u2")  # to the nearest, ties to even
        elif body.embed_dtype == "float16":
            with np.errstate(over="ignore"):
                numbers = vector.astype(f"{order}f2")
            if np.any(np.isinf(numbers) & np.isfinite(vector)):
                raise RequestError(
                    f"embed_dtype: float16 holds numbers of up to 65504, and one of this answer is "
                    f"{np.abs(vector).max():.6g}: ask for bfloat16 or float32, or set normalize to true",
                    "embed_dtype",
                )
        else:
            numbers = vector.astype(f"{order}f4")
        return base64.b64encode(numbers.tobytes()).decode("ascii")

    return as_base64
