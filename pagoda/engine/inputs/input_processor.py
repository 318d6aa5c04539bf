"""InputProcessor: validate and tokenise a caller's prompt and parameters into a core Request."""

import dataclasses
import operator
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, SupportsIndex, TypedDict

import numpy as np

from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.text import check_encodable
from pagoda.core.beam_search import num_beam_candidates
from pagoda.core.request import Request
from pagoda.engine.grammars.preparer import GrammarPreparer
from pagoda.engine.templates.chat_values import Message
from pagoda.engine.templates.generic_tools import lacks_tools, with_generic_tools
from pagoda.engine.templates.job import InProcessRenderer, Renderer, TemplateJob, TemplateSource
from pagoda.engine.templates.process import ProtectedRenderer, TemplateLimits
from pagoda.engine.tokenizers.bounded_encoder import EncodingLimits
from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from pagoda.loading.model_files import ModelFiles


class TextPrompt(TypedDict):
    """A prompt as text, in an object."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, in an object; `prompt` is its text, for display only."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
"""The types of a single prompt."""


def text_of(prompt: Prompt) -> str | None:
    """Return the prompt's text, or None if only token ids are given."""
    if isinstance(prompt, Mapping):
        return prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


_SEED_BITS = 62  # leaves room in an int64 for `seed + sequence`


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the model's prompt."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class InputLimits:
    """The limits of one engine's requests.

    vocab_size: exclusive upper bound of token ids.   max_model_len: prompt plus output, in tokens.
    max_num_seqs: largest n.   of_request: bounds of the counts and sizes that callers control.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int = 20
    of_request: RequestLimits = field(default_factory=RequestLimits)


@dataclass(frozen=True, slots=True)
class PreparedParams:
    """Parameters that `InputProcessor.prepare_params` has validated, for any number of prompts.

    params: with bad words as token ids; lengths are still as the caller gave them.
    """

    params: SamplingParams


class InputProcessor:
    """Makes Requests, with increasing `handle` numbers. Keeps no reference to them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: InputLimits,
        engine_seed: int | None = None,
        parses_special_tokens_in_chat: bool = False,
        renderer: Renderer | None = None,
    ) -> None:
        """engine_seed: seeds requests that have no seed of their own, reproducibly in order of arrival.

        parses_special_tokens_in_chat: parse special tokens inside messages, instead of treating them as ordinary text.
        renderer: renders chat templates; if None, they are rendered in this process, without a deadline.
        """
        self.tokenizer = tokenizer
        self._parses_special_tokens = parses_special_tokens_in_chat
        self.limits = limits
        self.grammars = GrammarPreparer(tokenizer, limits.vocab_size, limits.of_request)
        self._seeds = np.random.default_rng(engine_seed) if engine_seed is not None else None
        # The sampler indexes logits by these, and a tokenizer may name ids for which the model has none.
        self._eos_token_ids = tuple(i for i in tokenizer.facts.eos_token_ids if 0 <= i < limits.vocab_size)
        own = tokenizer.facts.chat_template
        self._own_source = TemplateSource(own.sources, own.special_tokens, own.marks) if own is not None else None
        self._renderer = renderer if renderer is not None else InProcessRenderer()
        self._next_handle = 0

    def fit(self, max_model_len: int) -> None:
        """Set max_model_len to the engine's, which may be lower than the one given at construction."""
        self.limits = dataclasses.replace(self.limits, max_model_len=max_model_len)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_time_s: float,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """Tokenise and validate a prompt and its parameters. Raises RequestError."""
        self.check_before_tokenising(prompt, params)
        token_ids = self.token_ids_of(prompt)
        return self.make_request(
            request_id, token_ids, params, arrival_time_s=arrival_time_s, priority=priority, cache_salt=cache_salt
        )

    def make_request(
        self,
        request_id: str,
        token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams | PreparedParams,
        *,
        arrival_time_s: float,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """Like `process`, for token ids."""
        given = params.params if isinstance(params, PreparedParams) else params
        _check_type(given)
        bounds = self.limits.of_request
        _check_request_id(request_id)
        # Divided by 2 because the server adds a key digest, a route prefix and numbers to a caller's id.
        bounds.check("name_chars", len(request_id) // 2, "request_id")
        if cache_salt is not None:
            _check_salt(cache_salt)
            bounds.check_names(cache_salt=cache_salt)
        prompt_ids = self._check_prompt(token_ids, given.truncate_prompt_tokens)
        prepared = params if isinstance(params, PreparedParams) else self.prepare_params(params)
        sampling = self._fit(prepared.params, len(prompt_ids))
        self._next_handle += 1
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt_ids,
            sampling=sampling,
            arrival_time_s=arrival_time_s,
            priority=_normal_priority(priority),
            handle=self._next_handle,
            seed=self._seed(given.seed),
            eos_token_ids=self._eos_token_ids,
            cache_salt=cache_salt,
        )

    # ---- prompts

    def token_ids_of(self, prompt: Prompt, add_special_tokens: bool = True) -> Sequence[int] | np.ndarray:
        """Return the prompt's token ids, not yet validated. Raises RequestError if it is not a prompt."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                prompt = prompt["prompt_token_ids"]
            elif "prompt" in prompt:
                prompt = prompt["prompt"]
            else:
                raise RequestError(f"a prompt object needs prompt or prompt_token_ids, got {sorted(prompt)}", "prompt")
        if isinstance(prompt, str):
            return self.encode(prompt, add_special_tokens)
        if isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes):
            return prompt
        raise RequestError(f"a prompt is a string or a list of token ids, not {type(prompt).__name__}", "prompt")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises RequestError if it is not valid Unicode."""
        self.limits.of_request.check_text(text, "prompt")
        check_encodable("prompt", text)
        return self.tokenizer.encode(text, add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> RenderedChat:
        """Render a conversation to text and token ids. Special tokens in the caller's values become ordinary text.

        chat_template: the text of a template to use instead of the model's own.
        add_special_tokens: also add those that the tokenizer puts around a text; most templates write them themselves.
        Raises RequestError if there is no template, or if it rejects the messages.
        """
        job = self.chat_job(
            messages, chat_template, tools, add_generation_prompt, continue_final_message, template_kwargs
        )
        try:
            text = self._renderer.render(job)
        except ConfigError as error:
            raise RequestError(str(error), "chat_template") from None
        return self.tokenize_chat(text, add_special_tokens)

    def chat_job(
        self,
        messages: Sequence[Message],
        chat_template: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> TemplateJob:
        """Return a Renderer's input: the first part of `render_chat`. Raises RequestError if there is no template."""
        self.limits.of_request.check_chat(messages, tools, chat_template, template_kwargs)
        source = self._own_source
        if chat_template is not None:
            facts = self.tokenizer.facts
            source = TemplateSource({"default": chat_template}, facts.special_names, facts.marks)
        if source is None:
            raise RequestError(
                "this model has no chat template: pass one (chat_template), or use plain prompts", "messages"
            )
        text = source.texts.get("default") or next(iter(source.texts.values()), "")
        if "tool_use" not in source.texts and lacks_tools(text):
            messages, tools = with_generic_tools(messages, tools, text), None
        return TemplateJob(
            source,
            is_own=chat_template is None,
            is_marked=not self._parses_special_tokens,
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )

    def tokenize_chat(self, text: str, add_special_tokens: bool = False, must_fit: bool = False) -> RenderedChat:
        """Tokenise a Renderer's text: the last part of `render_chat`. Raises RequestError.

        must_fit: reject a text that cannot fit into the model's context before tokenising it.
        """
        plain = text if self._parses_special_tokens else self.tokenizer.facts.marks.remove(text)
        if must_fit:
            self._check_length(plain)
        if self._parses_special_tokens:
            return RenderedChat(text, self.encode(text, add_special_tokens))
        self.limits.of_request.check_text(plain, "messages")
        check_encodable("messages", text)
        return RenderedChat(plain, self.tokenizer.encode_marked(text, add_special_tokens))

    def close(self) -> None:
        """Close the processes that render templates, encode texts and check grammars. Idempotent."""
        self._renderer.close()
        self.tokenizer.close()
        self.grammars.close()

    def _check_prompt(self, token_ids: Sequence[int] | np.ndarray, truncate: int | None) -> np.ndarray:
        """Return the validated prompt: int32 [num_prompt_tokens]."""
        limits = self.limits
        if len(token_ids) == 0:
            raise RequestError("the prompt is empty: it needs at least one token", "prompt")
        if truncate is not None:
            token_ids = token_ids[-(limits.max_model_len - 1 if truncate == -1 else truncate) :]
        if len(token_ids) >= limits.max_model_len:
            raise self._too_long(f"{len(token_ids)} tokens")
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError("a prompt is a string or a flat list of integer token ids", "prompt")
        outside = np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))
        if len(outside):
            at = int(outside[0])
            raise RequestError(
                f"prompt token {at} is {int(ids[at])}, outside the vocabulary of {limits.vocab_size}", "prompt"
            )
        return ids.astype(np.int32)

    def check_before_tokenising(self, prompt: Prompt, params: SamplingParams | PreparedParams) -> None:
        """Raise RequestError for params of a wrong type or beyond their limits, and for a text that cannot fit."""
        if isinstance(params, PreparedParams):
            params = params.params
        else:
            self._check_lists(params)
        if params.truncate_prompt_tokens is None:
            self._check_length(text_of(prompt))

    def _check_length(self, text: str | None) -> None:
        bound = self.tokenizer.facts.length_bound
        if text is None or bound is None:
            return
        most = self.limits.max_model_len
        if len(text) <= most:
            return
        # A text beyond the bound on its size is refused anyway, before it is tokenised.
        looked_at = text[: self.limits.of_request.text_bytes + 1]
        if bound.min_tokens(looked_at, enough=most) >= most:
            raise self._too_long(f"at least {most} tokens ({len(text)} characters)")

    def _too_long(self, size: str) -> RequestError:
        most = self.limits.max_model_len
        return RequestError(
            f"the prompt has {size}, but max_model_len is {most}, output included; "
            "shorten it, or set truncate_prompt_tokens",
            "prompt",
        )

    # ---- parameters

    def prepare_params(self, params: SamplingParams) -> PreparedParams:
        """Validate against the model, and tokenise bad words: what need not be repeated for each prompt.

        Raises RequestError.
        """
        self._check_lists(params)
        limits = self.limits
        if params.n > limits.max_num_seqs:
            raise RequestError(f"n={params.n} is more than max_num_seqs, which is {limits.max_num_seqs}", "n")
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > limits.max_logprobs:
                raise RequestError(f"{name}={asked} is more than max_logprobs, which is {limits.max_logprobs}", name)
        if params.logprobs is not None:
            limits.of_request.check("logprob_entries", params.n * (params.logprobs + 1), "logprobs")
        if params.beam_search is not None:
            self._check_beams(params)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", tuple(token_id for token_id, _ in params.logit_bias))
        params = self.tokenize_bad_words(params)
        for sequence in params.bad_words_token_ids:
            self._check_ids("bad_words_token_ids", sequence)
        if params.grammar is not None:
            raise RequestError("grammar is for the engine to set; set structured_outputs", "structured_outputs")
        if params.structured_outputs is not None:
            params = params.with_grammar(self.grammars.prepare(params.structured_outputs))
        return PreparedParams(params)

    def _check_beams(self, params: SamplingParams) -> None:
        num_candidates = num_beam_candidates(params, self._eos_token_ids)
        self.limits.of_request.check("logprob_entries", params.n * (num_candidates + 1), "n")
        if num_candidates > self.limits.vocab_size:
            raise RequestError(
                f"n={params.n} beams choose from {num_candidates} tokens, but the vocabulary has "
                f"{self.limits.vocab_size}: ask for fewer beams",
                "n",
            )

    def _fit(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Return params for one prompt: max_tokens is capped to the room in the context."""
        if params.prompt_logprobs is not None:
            num_entries = num_prompt_tokens * (params.prompt_logprobs + 1)
            self.limits.of_request.check("prompt_logprob_entries", num_entries, "prompt_logprobs")
        room = self.limits.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return params.with_lengths(max_tokens, min(params.min_tokens, max_tokens))

    def _check_lists(self, params: SamplingParams) -> None:
        _check_type(params)
        self.limits.of_request.check_lists(params)
        self.limits.of_request.check_bad_words_ids(params.bad_words_token_ids)

    def _check_ids(self, name: str, ids: tuple[int, ...]) -> None:
        size = self.limits.vocab_size
        for token_id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token_id < size:
                raise RequestError(f"{name} has {token_id}, outside the vocabulary of {size}", name)

    def tokenize_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Return params with bad_words as token ids, each word both with and without a leading space."""
        if not params.bad_words:
            return params
        found = list(params.bad_words_token_ids)
        for word in params.bad_words:
            bare = word.lstrip(" ") or word
            for text in (bare, " " + bare):
                try:
                    ids = tuple(self.encode(text, add_special_tokens=False))
                except RequestError as error:
                    raise RequestError(f"bad_words: {error}", "bad_words") from None
                if ids:
                    found.append(ids)
        return dataclasses.replace(params, bad_words=(), bad_words_token_ids=tuple(dict.fromkeys(found)))

    def _seed(self, asked: int | None) -> int:
        if asked is not None:
            return asked % (1 << _SEED_BITS)
        if self._seeds is not None:
            return int(self._seeds.integers(1 << _SEED_BITS))
        return secrets.randbits(_SEED_BITS)


def _check_request_id(request_id: object) -> None:
    if not isinstance(request_id, str) or not request_id or not request_id.isprintable():
        raise RequestError(
            f"request_id must be a string of printable characters (got {request_id!r:.80})", "request_id"
        )


def _check_salt(salt: object) -> None:
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a string (got {salt!r:.80})", "cache_salt")
    check_encodable("cache_salt", salt)


def _normal_priority(priority: SupportsIndex) -> int:
    try:
        value = operator.index(priority)
    except TypeError:
        value = 2**31
    if not -(2**31) <= value < 2**31:
        raise RequestError(f"priority must be a 32-bit integer (got {priority!r:.80})", "priority")
    return value


def _check_type(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params is {type(params).__name__}, expected SamplingParams", "sampling_params")


def build_input_processor(
    config: EngineConfig,
    files: ModelFiles,
    vocab_size: int,
    max_model_len: int,
    template_limits: TemplateLimits | None = None,
    encoding_limits: EncodingLimits | None = None,
) -> InputProcessor:
    """Build a model's input processor from its tokenizer. Chat templates are rendered in a separate process.

    encoding_limits: of each text, if the tokenizer is not known to be fast.
    Raises ConfigError if the tokenizer or its chat template cannot be used.
    """
    tokenizer = load_tokenizer(files, config.model.tokenizer, config.model.chat_template, encoding_limits)
    model = config.model
    limits = InputLimits(
        vocab_size,
        max_model_len,
        config.scheduler.max_num_seqs,
        model.request_limits.max_logprobs,
        model.request_limits,
    )
    renderer = ProtectedRenderer(template_limits)
    return InputProcessor(tokenizer, limits, model.seed, model.parse_special_tokens_in_chat, renderer)
