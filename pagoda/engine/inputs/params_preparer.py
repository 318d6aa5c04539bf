"""ParamsPreparer: validate a request's parameters against the model and the engine's limits."""

import copy
import dataclasses
from dataclasses import dataclass

import numpy as np

from pagoda.base.errors import RequestError
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import PromptReasoning, SamplingParams
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.core.request import num_beam_candidates
from pagoda.engine.answers.reasoning import (
    REASONING_FORMATS,
    ReasoningTags,
    opens_reasoning,
    reasoning_of,
    special_token,
)
from pagoda.engine.grammars.preparer import GrammarPreparer
from pagoda.engine.inputs.input_limits import InputLimits
from pagoda.engine.inputs.pooling_inputs import check_pooling
from pagoda.engine.inputs.prompt_encoder import PromptEncoder
from pagoda.engine.tokenizers.tokenizer import Tokenizer

_LONGEST_THOUGHT = 32_768
"""Tokens of a prompt's end in which a thought may have begun: decoding more would take long."""

Params = SamplingParams | PoolingParams
"""The parameters of a request: for generating text, or for pooling hidden states."""


@dataclass(frozen=True, slots=True)
class PreparedParams:
    """Parameters that `ParamsPreparer.prepare` has validated, for any number of prompts.

    params: with bad words as token ids; lengths are still as the caller gave them.
    """

    params: Params


class ParamsPreparer:
    """Prepares the parameters of requests, once for all prompts that share them."""

    def __init__(
        self,
        prompts: PromptEncoder,
        grammars: GrammarPreparer,
        limits: InputLimits,
        tokenizer: Tokenizer,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """prompts: encodes bad words.   eos_token_ids: those of the tokenizer for which the model has logits."""
        self._prompts = prompts
        self._grammars = grammars
        self._limits = limits
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids

    def check_lists(self, params: Params) -> None:
        """Raise RequestError for params of another type, and for lists that are too long to be looked at."""
        check_type(params)
        if not isinstance(params, SamplingParams):
            return
        self._limits.of_request.check_lists(params)
        self._limits.of_request.check_bad_words_ids(params.bad_words_token_ids)

    def prepare(self, params: Params) -> PreparedParams:
        """Validate against the model, and tokenise bad words: what need not be repeated for each prompt.

        Raises RequestError.
        """
        check_type(params)
        params = copy.copy(params)  # what is checked is what runs, whatever the caller does with theirs meanwhile
        self.check_lists(params)
        limits = self._limits
        if isinstance(params, PoolingParams):
            if params.alignment is None:
                return PreparedParams(check_pooling(params, limits.tasks))
            if params.alignment.heads != limits.alignment_heads or params.task != "token_embed":
                raise RequestError(
                    "alignment: it is for transcriptions to set, by a model that can; leave it out", "alignment"
                )
            return PreparedParams(params)  # what is computed is no embedding, which the model need not have
        limits.tasks.check("generate")
        params.check_together()
        params = self._bound_logprobs(params)
        if params.n > limits.max_num_seqs:
            raise RequestError(f"n={params.n} is more than max_num_seqs, which is {limits.max_num_seqs}", "n")
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > limits.max_logprobs:
                if name == "logprobs" and params.logprob_token_ids is not None:
                    name = "logprob_token_ids"  # what the caller wrote
                raise RequestError(f"{name}={asked} is more than max_logprobs, which is {limits.max_logprobs}", name)
        if params.logprobs is not None and params.n > 1:  # of one output, max_logprobs bounds them
            limits.of_request.check("logprob_entries", params.n * (params.logprobs + 1), "logprobs")
        if params.beam_search is not None:
            self._check_beams(params)
        params = self._tokenize_bad_words(params)
        for name, ids in params.named_token_ids.items():
            limits.check_ids(name, ids)
        if params.grammar is not None:
            raise RequestError("grammar is for the engine to set; set structured_outputs", "structured_outputs")
        if params.thinking_token_budget is not None:
            self._reasoning_tags(params)
        if (structure := self.structure_of(params)) is not None:
            params = params.with_grammar(self._grammars.prepare(structure))
        return PreparedParams(params)

    def structure_of(self, params: SamplingParams) -> StructuredOutputsParams | None:
        """Return what the output is constrained to: if the prompt ends inside reasoning, from its end on."""
        structure, reasoning = params.structured_outputs, params.reasoning
        if structure is None or reasoning is None or not reasoning.is_open or structure.reasoning_end is not None:
            return structure
        tags = REASONING_FORMATS[reasoning.format]
        end_id = special_token(self._tokenizer, tags.end)
        return dataclasses.replace(structure, reasoning_end=tags.end if end_id is None else end_id)

    def _reasoning_tags(self, params: SamplingParams) -> ReasoningTags:
        """Return the tags of the reasoning in the output. Raises RequestError if the model has none."""
        template = self._tokenizer.facts.chat_template
        tags = reasoning_of(template and template.source)
        tags = REASONING_FORMATS[params.reasoning.format] if params.reasoning is not None else tags
        if tags is None:
            raise RequestError(
                "thinking_token_budget: this model's chat template has no reasoning in a known format; leave it out",
                "thinking_token_budget",
            )
        return tags

    def reads_prompt(self, params: Params) -> bool:
        """Whether `fit` must decode the prompt, to know whether a thought with a budget has begun in it."""
        is_text = isinstance(params, SamplingParams)
        return is_text and params.thinking_token_budget is not None and params.reasoning is None

    def _with_reasoning(self, params: SamplingParams, prompt_token_ids: np.ndarray) -> SamplingParams:
        """Return params that say how the reasoning begins which has a budget. That may take long: `reads_prompt`."""
        if not self.reads_prompt(params):
            return params
        tags = self._reasoning_tags(params)
        text = self._tokenizer.decode(prompt_token_ids[-_LONGEST_THOUGHT:].tolist(), skip_special_tokens=False)
        return params.with_reasoning(PromptReasoning(tags.name, opens_reasoning(text, text, tags)))

    def fit(self, params: SamplingParams, prompt_token_ids: np.ndarray) -> SamplingParams:
        """Return params for one prompt: max_tokens is capped to the room in the context. Raises RequestError."""
        num_prompt_tokens = len(prompt_token_ids)
        params = self._with_reasoning(params, prompt_token_ids)
        if params.prompt_logprobs is not None:
            num_entries = num_prompt_tokens * (params.prompt_logprobs + 1)
            self._limits.of_request.check("prompt_logprob_entries", num_entries, "prompt_logprobs")
        room = self._limits.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._limits.of_request.check_outputs(params.n * max_tokens, params.logprobs)
        return params.with_lengths(max_tokens, min(params.min_tokens, max_tokens))

    def _check_beams(self, params: SamplingParams) -> None:
        num_candidates = num_beam_candidates(params, self._eos_token_ids)
        self._limits.of_request.check("logprob_entries", params.n * (num_candidates + 1), "n")
        if num_candidates > self._limits.vocab_size:
            raise RequestError(
                f"n={params.n} beams choose from {num_candidates} tokens, but the vocabulary has "
                f"{self._limits.vocab_size}: ask for fewer beams",
                "n",
            )

    def _bound_logprobs(self, params: SamplingParams) -> SamplingParams:
        """Return params that say how many log-probabilities are asked for: -1 is as many as the limit allows."""
        if params.logprob_token_ids is not None:
            params = dataclasses.replace(params, logprobs=len(params.logprob_token_ids))
        most = min(self._limits.vocab_size, self._limits.max_logprobs)
        names = [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1]
        return dataclasses.replace(params, **dict.fromkeys(names, most)) if names else params

    def _tokenize_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Return params with bad_words as token ids, each word both with and without a leading space."""
        if not params.bad_words:
            return params
        found = list(params.bad_words_token_ids)
        for word in params.bad_words:
            bare = word.lstrip(" ") or word
            for text in (bare, " " + bare):
                try:
                    ids = tuple(self._prompts.encode(text, False))
                except RequestError as error:
                    raise RequestError(f"bad_words: {error}", "bad_words") from None
                if ids:
                    found.append(ids)
        return dataclasses.replace(params, bad_words=(), bad_words_token_ids=tuple(dict.fromkeys(found)))


def check_type(params: object) -> None:
    """Raise RequestError if these are not a request's parameters."""
    if not isinstance(params, SamplingParams | PoolingParams):
        raise RequestError(f"sampling_params is {type(params).__name__}, expected SamplingParams", "sampling_params")
