"""The output of a beam search in vLLM's shape."""

from typing import Any

from pagoda.base.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from pagoda.engine.tokenizers.tokenizer import Tokenizer


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
