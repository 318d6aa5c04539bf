"""POST /v1/score, /score, /v1/rerank, /v2/rerank, /rerank"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.errors import RequestError
from pagoda.base.pooling import PoolingTask
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.inputs.scoring import PairOptions, Scoring
from pagoda.server.body import Body, Flag, OrDefault, as_list
from pagoda.server.pooling import Pooled, PooledList, PoolingBody, PoolingCall, PoolingUsage, read_call
from pagoda.server.routing import Router
from pagoda.server.sending import cancel_on_disconnect

router = Router()

_CHARS_PER_TOKEN = 1024
"""So many characters of a document, too."""


Texts = str | list[str]


class PairBody(PoolingBody, kw_only=True, frozen=True):
    """The fields of those that compare texts.

    chat_template: Of models that get a pair as one prompt: goes before the model's own template.
    instruction: Of models that get a pair as one prompt: what the template says to do.
    """

    task: ClassVar[PoolingTask] = "score"
    use_activation: bool | None = None
    chat_template: str | None = None
    instruction: str | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        limits.check("template_chars", len(self.chat_template or ""), "chat_template")

    def pair_options(self) -> PairOptions:
        return PairOptions(self.chat_template, self.instruction, getattr(self, "max_tokens_per_doc", 0))

    def _check_texts(self, limits: RequestLimits, given: dict[str, Sequence[str]]) -> None:
        """given: texts by the field that they are in."""
        for name, texts in given.items():
            if not texts:
                raise RequestError(f"{name}: is empty", name)
            limits.check("inputs", len(texts), name)
            for index, text in enumerate(texts):
                if not text:
                    raise RequestError(f"{name}[{index}]: is empty", f"{name}[{index}]")
        if self.truncate_prompt_tokens is not None or self.pair_options().max_second:
            num_chars = sum(len(text) for texts in given.values() for text in texts)
            limits.check("tokenized_chars", num_chars, next(iter(given)))


class ScoreRequest(PairBody, kw_only=True, frozen=True):
    """POST /score: `text_1` with each of `text_2`. vLLM's other names for them are accepted, too.

    text_1: One text, or as many as in `text_2`.
    text_2: What is compared with it.
    queries, data_1: Other names of `text_1`.
    documents, items, data_2: Other names of `text_2`.
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        given = self._given
        fitting = [pair for pair in _PAIRS if given and given <= set(pair)]
        if not fitting:
            ways = "text_1 and text_2 (or queries and documents, queries and items, data_1 and data_2)"
            raise RequestError(f"text_1: give {ways}", "text_1")
        for name in fitting[0]:
            if name not in given:
                raise RequestError(f"{name}: is required", name)
        first, second = self.texts()
        self._check_texts(limits, dict(zip(self.names, (first, second), strict=True)))
        if len(first) not in (1, len(second)):
            name = self.names[0]
            raise RequestError(
                f"{name}: {len(first)} texts cannot be paired with {len(second)}: give one, or as many", name
            )

    @property
    def _given(self) -> set[str]:
        return {name for pair in _PAIRS for name in pair if getattr(self, name) is not None}

    @property
    def names(self) -> tuple[str, str]:
        """The fields that the texts are in."""
        return next(pair for pair in _PAIRS if self._given == set(pair))

    def texts(self) -> tuple[list[str], list[str]]:
        """The texts of both sides, as lists."""
        first, second = (getattr(self, name) for name in self.names)
        return as_list(first), as_list(second)


_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class ScoreData(Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(PooledList[ScoreData], kw_only=True):
    pass


@router.post("/v1/score", answer=ScoreResponse, body=ScoreRequest)
@router.post("/score", answer=ScoreResponse, body=ScoreRequest)
async def create_score(http: Request) -> Response:
    """Return how well each pair of texts matches."""
    call = await read_call(http, ScoreRequest, "score-")
    first, second = call.body.texts()
    pooled, scoring = await _score(call, first, second, call.body.names)

    return await pooled.answer(
        ScoreResponse,
        lambda: [ScoreData(index=at, score=score) for at, score in enumerate(scoring.scores(pooled.vectors))],
    )


class RerankDocument(Body, kw_only=True, frozen=True):
    """A document.

    text: What is compared with the query.
    """

    text: str


class RerankRequest(PairBody, kw_only=True, frozen=True):
    """POST /rerank

    query: What the documents are compared with.
    documents: Texts.
    top_n: Return only the best so many.
    return_documents: Return the texts of the documents.
    max_tokens_per_doc: Keep so many tokens from the start of each document; 0: all.
    """

    query: str
    documents: list[str | RerankDocument]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    return_documents: Flag = True
    max_tokens_per_doc: OrDefault[Annotated[int, Meta(ge=0, le=2**31 - 1)]] = 0

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if not self.query:
            raise RequestError("query: is empty", "query")
        self._check_texts(limits, {"documents": self.texts(), "query": [self.query]})

    def texts(self) -> list[str]:
        """The documents as texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class RankedDocument(Struct, frozen=True):
    text: str


class RerankResult(Struct, kw_only=True):
    """index: of the document in the request."""

    index: int
    document: RankedDocument | UnsetType = UNSET
    relevance_score: float


class RerankResponse(Struct, kw_only=True):
    """results: the most relevant document first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


@router.post("/v1/rerank", answer=RerankResponse, body=RerankRequest)
@router.post("/v2/rerank", answer=RerankResponse, body=RerankRequest)
@router.post("/rerank", answer=RerankResponse, body=RerankRequest)
async def create_ranking(http: Request) -> Response:
    """Return documents in the order of how well they match a query."""
    call = await read_call(http, RerankRequest, "rerank-")
    body, texts = call.body, call.body.texts()
    pooled, scoring = await _score(call, [body.query], texts, ("query", "documents"))

    def make() -> RerankResponse:
        scores = scoring.scores(pooled.vectors)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])  # stable: of equals, the first
        results = [RerankResult(index=index, relevance_score=scores[index]) for index in order[: body.top_n or None]]
        if body.return_documents:
            for result in results:
                result.document = RankedDocument(texts[result.index])
        return RerankResponse(id=pooled.id, model=pooled.model, usage=pooled.usage, results=results)

    num_chars = sum(map(len, texts)) if body.return_documents else 0
    return await pooled.respond(make, num_chars // _CHARS_PER_TOKEN)


async def _score(
    call: PoolingCall[PairBody], first: list[str], second: list[str], names: tuple[str, str]
) -> tuple[Pooled, Scoring]:
    """Pool pairs of texts; return what makes scores of the vectors, too.   names: of the fields of the texts."""
    body, text = call.body, call.picked.model.llm.text
    call.picked.model.check_template(body.chat_template)
    async with call.picked.model.starter.admitted(call.http, len(second)) as place:
        planning = text.plan_scores(first, second, body.pooling_params(), names, body.pair_options())
        scoring: Scoring = await cancel_on_disconnect(call.http, planning)
        of_first, of_second = _numbered(names[0], len(first)), _numbered(names[1], len(second))
        of_prompts = of_second if len(scoring.prompts) == len(second) else [*of_first, *of_second]
        asked = call.asked(scoring.prompts, scoring.params, of_prompts)
        pooled = await call.pool(place, asked)
    return pooled, scoring


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}[{index}]" for index in range(count)] if count > 1 else [name]
