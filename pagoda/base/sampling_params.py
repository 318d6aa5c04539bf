"""What a caller may ask of the output: SamplingParams and PoolingParams."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are chosen and when they end.

    n: output sequences of one prompt.   temperature: 0 is greedy.   top_p in (0, 1], top_k (0 or -1: off), min_p in [0, 1].
    seed: makes the output repeatable, alone or in any batch; branch i of n uses seed + i.
    presence_penalty, frequency_penalty in [-2, 2] look at the output; repetition_penalty > 0 at prompt and output.
    logit_bias: token id -> added to its logit.   allowed_token_ids: nothing else can be sampled.
    bad_words: texts never produced; the engine adds their token ids as `bad_words_token_ids`.
    stop: texts that end the output (cut off unless include_stop_str_in_output).   stop_token_ids: ids that end it.
    logprobs / prompt_logprobs: how many top entries to report per output / prompt token (None: nothing).
    truncate_prompt_tokens: keep only the last so many prompt tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What to make of a prompt's hidden states.   task: "embed", "classify", "score".   normalize: unit length."""

    task: str = "embed"
    normalize: bool = True
    dimensions: int | None = None
