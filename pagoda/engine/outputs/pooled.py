"""What the methods that pool prompts return for each of them."""

from collections.abc import Sequence

import numpy as np

from pagoda.base.errors import RequestError
from pagoda.base.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from pagoda.engine.inputs.scoring import Scoring


def vector_of(output: RequestOutput) -> np.ndarray:
    """Return the result of a finished request to pool. Raises RequestError if it ended without one."""
    if output.pooled is None:
        reason = output.outputs[0].finish_reason if output.outputs else None
        raise RequestError(output.error or f"the request ended without a result ({reason})", "prompt")
    return output.pooled


def pooling_output(output: RequestOutput) -> PoolingRequestOutput[PoolingOutput]:
    return _output(output, PoolingOutput(vector_of(output)))


def embedding_output(output: RequestOutput) -> PoolingRequestOutput[EmbeddingOutput]:
    return _output(output, EmbeddingOutput(vector_of(output).tolist()))


def classification_output(output: RequestOutput) -> PoolingRequestOutput[ClassificationOutput]:
    return _output(output, ClassificationOutput(vector_of(output).tolist()))


def scoring_outputs(scoring: Scoring, outputs: Sequence[RequestOutput]) -> list[PoolingRequestOutput[ScoringOutput]]:
    """Return the score of each pair.   outputs: of `scoring.prompts`."""
    scores = scoring.scores([vector_of(output) for output in outputs])
    return [
        _scoring_output([outputs[at] for at in scoring.prompts_of(pair)], score) for pair, score in enumerate(scores)
    ]


def _scoring_output(parts: list[RequestOutput], score: float) -> PoolingRequestOutput[ScoringOutput]:
    """parts: of the pair's prompts."""
    token_ids = [token_id for part in parts for token_id in part.prompt_token_ids or []]
    num_cached = sum(part.num_cached_tokens or 0 for part in parts)
    return PoolingRequestOutput(parts[0].request_id, ScoringOutput(score), token_ids, num_cached)


def _output(output: RequestOutput, result: object) -> PoolingRequestOutput:  # type: ignore[type-arg]
    return PoolingRequestOutput(output.request_id, result, output.prompt_token_ids or [], output.num_cached_tokens or 0)
