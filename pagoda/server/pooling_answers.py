"""The answers to requests whose prompts are pooled, as structs."""

from typing import Generic, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType

from pagoda.server.answers import PromptTokensDetails


class PoolingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


D = TypeVar("D")


class PooledList(Struct, Generic[D], kw_only=True):
    """An answer with an entry for each input, or for each pair of texts."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[D]
    usage: PoolingUsage


class EmbeddingData(Struct, kw_only=True):
    """embedding: numbers, or with encoding_format base64, the bytes of little-endian float32."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingResponse(PooledList[EmbeddingData], kw_only=True):
    pass


class PoolingData(Struct, kw_only=True):
    """data: numbers, one list of them per token, or the bytes of either as base64 of little-endian float32."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str


class PoolingResponse(PooledList[PoolingData], kw_only=True):
    pass


class ClassificationData(Struct, kw_only=True):
    """label: of the largest of `probs`."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(PooledList[ClassificationData], kw_only=True):
    pass


class ScoreData(Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(PooledList[ScoreData], kw_only=True):
    pass


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


POOLING_ANSWERS: tuple[type[Struct], ...] = (
    EmbeddingResponse,
    PoolingResponse,
    ClassificationResponse,
    ScoreResponse,
    RerankResponse,
)
