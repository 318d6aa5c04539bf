"""What methods of LLM and AsyncLLM return, made of finished requests: embeddings, classes, scores, beams."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagoda.base.errors import RequestError
from pagoda.base.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from pagoda.base.sampling_params import BeamSearchParams, SamplingParams
from pagoda.engine.inputs.scoring import Scoring
from pagoda.engine.tokenizers.tokenizer import Tokenizer


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


def beam_sampling(params: BeamSearchParams, max_logprobs: int) -> SamplingParams:
    """Return a beam search as a request, with the log-probabilities that `beams_of` reports. Raises RequestError."""
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"params is {type(params).__name__}, expected BeamSearchParams", "params")
    return params.sampling_params(logprobs=min(2 * params.beam_width, max_logprobs))


def beams_of(output: RequestOutput, tokenizer: Tokenizer, has_tokens: bool = True) -> BeamSearchOutput:
    """Return a finished output of a beam search in vLLM's shape.

    has_tokens: the prompt has tokens, which are part of the results' tokens and text; False: it is embeddings.
    """
    prompt_ids = output.prompt_token_ids or [] if has_tokens else []
    prompt: dict[str, Any] = {"prompt_token_ids": prompt_ids}
    if output.prompt is not None:
        prompt["prompt"] = output.prompt
    sequences = [
        BeamSearchSequence(
            orig_prompt=prompt,
            tokens=[*prompt_ids, *part.token_ids],
            logprobs=part.logprobs or [],
            cum_logprob=part.cumulative_logprob or 0.0,
            text=tokenizer.decode([*prompt_ids, *part.token_ids]),
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            lora_request=output.lora_request,
        )
        for part in output.outputs
        if part.token_ids
    ]
    return BeamSearchOutput(sequences, output.error)
