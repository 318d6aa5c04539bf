"""POST /v1/embeddings, /pooling, /classify, /v1/score, /score, /v1/rerank, /v2/rerank, /rerank"""

import base64
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.base.outputs import RequestOutput
from pagoda.base.pooling import PoolingParams
from pagoda.core.request import LoraRef
from pagoda.engine.inputs.pooling_inputs import check_pooling, instruction_of, with_instruction
from pagoda.engine.inputs.prompts import Prompt
from pagoda.engine.inputs.scoring import Scoring
from pagoda.engine.outputs.pooled import vector_of
from pagoda.server.answers import PromptTokensDetails, answers_with
from pagoda.server.body import described_body, read_body
from pagoda.server.generation import Generation
from pagoda.server.json_answer import JsonAnswer
from pagoda.server.pooling_answers import (
    ClassificationData,
    ClassificationResponse,
    EmbeddingData,
    EmbeddingResponse,
    PoolingData,
    PoolingResponse,
    PoolingUsage,
    RankedDocument,
    RerankResponse,
    RerankResult,
    ScoreData,
    ScoreResponse,
)
from pagoda.server.pooling_bodies import (
    ClassificationRequest,
    EmbeddingRequest,
    InputBody,
    PairBody,
    PoolingBody,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from pagoda.server.state import ServerState, state_of
from pagoda.server.streams import cancel_on_disconnect

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Pooled:
    """The results of one HTTP request.   vectors: in the order of its prompts.   created: seconds since the epoch."""

    id: str
    created: int
    model: str
    vectors: list[np.ndarray]
    usage: PoolingUsage


@router.post(
    "/v1/embeddings", responses=answers_with(EmbeddingResponse), openapi_extra=described_body(EmbeddingRequest)
)
async def create_embedding(http: Request) -> Response:
    """Return the embedding of a text, a list of token ids, or of several of either."""
    state = state_of(http)
    body = await read_body(http, EmbeddingRequest, state.request_limits)
    lora = state.adapter_of(body.model)
    tasks = state.tasks
    params = check_pooling(body.pooling_params(), tasks)
    instruction = instruction_of(tasks.plan, body.prompt_name)
    prompts = [with_instruction(one, instruction) for one in body.inputs()]
    pooled = await _pool_inputs(http, state, body, prompts, params, lora, "embd")
    is_base64 = body.encoding_format == "base64"
    data = [
        EmbeddingData(index=index, embedding=_base64(vector) if is_base64 else vector.tolist())
        for index, vector in enumerate(pooled.vectors)
    ]
    return JsonAnswer(
        EmbeddingResponse(id=pooled.id, created=pooled.created, model=pooled.model, data=data, usage=pooled.usage)
    )


@router.post("/pooling", responses=answers_with(PoolingResponse), openapi_extra=described_body(PoolingRequest))
async def create_pooling(http: Request) -> Response:
    """Return what the model makes of the hidden states of each input: an embedding, classes, or a vector per token."""
    state = state_of(http)
    body = await read_body(http, PoolingRequest, state.request_limits)
    lora = state.adapter_of(body.model)
    params = check_pooling(body.pooling_params(), state.tasks)
    pooled = await _pool_inputs(http, state, body, body.inputs(), params, lora, "pool")
    is_base64 = body.encoding_format == "base64"
    data = [
        PoolingData(index=index, data=_base64(vector) if is_base64 else vector.tolist())
        for index, vector in enumerate(pooled.vectors)
    ]
    return JsonAnswer(
        PoolingResponse(id=pooled.id, created=pooled.created, model=pooled.model, data=data, usage=pooled.usage)
    )


@router.post(
    "/classify", responses=answers_with(ClassificationResponse), openapi_extra=described_body(ClassificationRequest)
)
async def create_classification(http: Request) -> Response:
    """Return the class probabilities of each input."""
    state = state_of(http)
    body = await read_body(http, ClassificationRequest, state.request_limits)
    lora = state.adapter_of(body.model)
    params = check_pooling(body.pooling_params(), state.tasks)
    pooled = await _pool_inputs(http, state, body, body.inputs(), params, lora, "classify")
    labels = state.tasks.plan.labels
    data = [
        ClassificationData(
            index=index, label=labels[int(np.argmax(vector))], probs=vector.tolist(), num_classes=len(vector)
        )
        for index, vector in enumerate(pooled.vectors)
    ]
    return JsonAnswer(
        ClassificationResponse(id=pooled.id, created=pooled.created, model=pooled.model, data=data, usage=pooled.usage)
    )


@router.post("/v1/score", responses=answers_with(ScoreResponse), openapi_extra=described_body(ScoreRequest))
@router.post("/score", responses=answers_with(ScoreResponse), openapi_extra=described_body(ScoreRequest))
async def create_score(http: Request) -> Response:
    """Return how well each pair of texts matches."""
    state = state_of(http)
    body = await read_body(http, ScoreRequest, state.request_limits)
    lora = state.adapter_of(body.model)
    first, second = body.texts()
    names = body.names
    pooled, scores = await _score(http, state, body, first, second, names, lora, "score")
    data = [ScoreData(index=index, score=score) for index, score in enumerate(scores)]
    return JsonAnswer(
        ScoreResponse(id=pooled.id, created=pooled.created, model=pooled.model, data=data, usage=pooled.usage)
    )


@router.post("/v1/rerank", responses=answers_with(RerankResponse), openapi_extra=described_body(RerankRequest))
@router.post("/v2/rerank", responses=answers_with(RerankResponse), openapi_extra=described_body(RerankRequest))
@router.post("/rerank", responses=answers_with(RerankResponse), openapi_extra=described_body(RerankRequest))
async def create_ranking(http: Request) -> Response:
    """Return documents in the order of how well they match a query."""
    state = state_of(http)
    body = await read_body(http, RerankRequest, state.request_limits)
    lora = state.adapter_of(body.model)
    texts = body.texts()
    pooled, scores = await _score(http, state, body, [body.query], texts, ("query", "documents"), lora, "rerank")
    order = sorted(range(len(scores)), key=lambda index: -scores[index])  # stable: of equals, the first
    results = [RerankResult(index=index, relevance_score=scores[index]) for index in order[: body.top_n or None]]
    if body.return_documents:
        for result in results:
            result.document = RankedDocument(texts[result.index])
    return JsonAnswer(RerankResponse(id=pooled.id, model=pooled.model, usage=pooled.usage, results=results))


async def _score(
    http: Request,
    state: ServerState,
    body: PairBody,
    first: list[str],
    second: list[str],
    names: tuple[str, str],
    lora: LoraRef | None,
    id_prefix: str,
) -> tuple[Pooled, list[float]]:
    """Score pairs of texts.   names: of the fields that the texts are in."""
    key = http.scope["state"]["key"]
    planning = state.generator.llm.text.plan_scores(first, second, body.pooling_params(), names, key)
    scoring: Scoring = await cancel_on_disconnect(http, planning)
    of_first, of_second = _numbered(names[0], len(first)), _numbered(names[1], len(second))
    of_prompts = of_second if len(scoring.prompts) == len(second) else [*of_first, *of_second]
    pooled = await _pool(http, state, body, scoring.prompts, scoring.params, of_prompts, lora, id_prefix)
    return pooled, scoring.scores(pooled.vectors)


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}[{index}]" for index in range(count)] if count > 1 else [name]


async def _pool_inputs(
    http: Request,
    state: ServerState,
    body: InputBody,
    prompts: Sequence[Prompt],
    params: PoolingParams,
    lora: LoraRef | None,
    id_prefix: str,
) -> Pooled:
    """Pool each input on its own."""
    each = [params] * len(prompts)
    return await _pool(http, state, body, prompts, each, body.names(), lora, id_prefix, body.add_special_tokens)


async def _pool(
    http: Request,
    state: ServerState,
    body: PoolingBody,
    prompts: Sequence[Prompt],
    params: Sequence[PoolingParams],
    names: Sequence[str],
    lora: LoraRef | None,
    id_prefix: str,
    add_special_tokens: bool = True,
) -> Pooled:
    """Pool all prompts.   names: what errors call them. Raises RequestError, ApiError, Refusal or WorkerDied."""
    request_id = state.request_id(http, body.request_id, id_prefix)
    generation = await state.generator.begin_pooling(
        http,
        prompts,
        params,
        names,
        request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        lora=lora,
        add_special_tokens=add_special_tokens,
    )
    with contextlib.ExitStack() as at_end:
        at_end.callback(generation.close)
        outputs = await cancel_on_disconnect(http, _gather(generation))
        num_tokens = generation.num_prompt_tokens
        usage = PoolingUsage(num_tokens, num_tokens, PromptTokensDetails(generation.num_cached_tokens))
        vectors = [vector_of(output) for output in outputs]
        return Pooled(request_id, int(time.time()), body.model or state.model_names[0], vectors, usage)


async def _gather(generation: Generation) -> list[RequestOutput]:
    """Return the finished output of each prompt."""
    found: dict[int, RequestOutput] = {}
    async with generation.outputs() as deltas:
        async for index, delta in deltas:
            if delta.finished:
                found[index] = delta
    return [found[index] for index in range(len(generation.requests))]


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode("ascii")
