"""InputProcessor: validate and tokenise a caller's prompt and parameters into a core Request."""

import dataclasses
import functools
import itertools
import operator
import secrets
from collections.abc import Mapping, Sequence
from typing import SupportsIndex, TypedDict, Unpack

import numpy as np

from pagoda.base.errors import RequestError
from pagoda.base.lora import LoRARequest
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.text import check_encodable
from pagoda.core.request import PLACEHOLDER_ID, LoraRef, MediaItem, PromptEmbeds, Request
from pagoda.engine.grammars.preparer import GrammarPreparer
from pagoda.engine.inputs.adapters import Adapter, KnownAdapters, PromptAdapter
from pagoda.engine.inputs.chat_prompts import ChatPrompts
from pagoda.engine.inputs.image_prompts import ImagePrompts, of_salt
from pagoda.engine.inputs.input_limits import InputLimits, SpeechFacts
from pagoda.engine.inputs.params_preparer import Params, ParamsPreparer, PreparedParams, check_type
from pagoda.engine.inputs.prompt_encoder import EncodedPrompt, PromptEncoder
from pagoda.engine.inputs.prompts import Prompt, text_of
from pagoda.engine.tokenizers.tokenizer import Tokenizer

_SEED_BITS = 62  # leaves room in an int64 for `seed + sequence`


class RequestFields(TypedDict, total=False):
    """What else a request has, as arguments of `make_request`, and of what calls that."""

    priority: int
    cache_salt: str | None
    lora: Adapter | None


class InputProcessor:
    """Makes Requests, with increasing `handle` numbers. Keeps no reference to them.

    limits: shared by the three parts below.   prompts: text to token ids.   params: sampling parameters.
    chats: conversations to prompts.   grammars: structured output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: InputLimits,
        engine_seed: int | None = None,
        parses_special_tokens_in_chat: bool = False,
        adapters: KnownAdapters | None = None,
        score_template: str = "",
        default_sampling: Mapping[str, object] | None = None,
        images: ImagePrompts | None = None,
        model_name: str = "this model",
        speech: SpeechFacts | None = None,
    ) -> None:
        """engine_seed: seeds requests that have no seed of their own, reproducibly in order of arrival at one client.

        parses_special_tokens_in_chat: parse special tokens inside messages, instead of treating them as ordinary text.
        adapters: None if requests cannot use LoRA adapters.
        score_template: see PoolingPlan; "" if a pair is not put into a template.
        default_sampling: parameters of requests that do not set them.
        images: puts images into prompts, None for a model that takes text only.   model_name: for errors.
        speech: what a speech model reads, None for other models.
        """
        # The sampler indexes logits by these, and a tokenizer may name ids for which the model has none.
        self._eos_token_ids = tuple(i for i in tokenizer.facts.eos_token_ids if 0 <= i < limits.vocab_size)
        self.tokenizer = tokenizer
        self.limits = limits
        self.speech = speech
        self._adapters = adapters
        self.score_template = score_template
        self.default_sampling: Mapping[str, object] = default_sampling or {}
        self.grammars = GrammarPreparer(tokenizer, limits.vocab_size, limits.of_request)
        self.prompts = PromptEncoder(tokenizer, limits, images)
        self.params = ParamsPreparer(self.prompts, self.grammars, limits, tokenizer, self._eos_token_ids)
        self.chats = ChatPrompts(
            tokenizer, self.prompts, limits, parses_special_tokens_in_chat, images, model_name, speech is not None
        )
        self._engine_seed = engine_seed
        self._handles = itertools.count(1)  # threads share it
        self.client_index = 0
        """Of the engine's client that gets the requests; each draws seeds of its own."""

    def process(
        self, request_id: str, prompt: Prompt, params: Params, *, arrival_time_s: float, **fields: Unpack[RequestFields]
    ) -> Request:
        """Tokenise and validate a prompt and its parameters. Raises RequestError."""
        self.check_before_tokenising(prompt, params)
        encoded = self.prompts.read(prompt, keep=self.num_kept(params))
        return self.make_request(request_id, encoded, params, arrival_time_s=arrival_time_s, **fields)

    def tokenized(self, prompts: Sequence[Prompt], params: Sequence[Params]) -> Sequence[Prompt]:
        """Return prompts with the token ids of those that are texts, which are encoded together: that is faster.

        params: of each. If a text cannot be encoded, all prompts stay as they are; `process` then names the error.
        """
        at = [index for index, prompt in enumerate(prompts) if isinstance(prompt, str)]
        texts = [str(prompts[index]) for index in at]
        try:
            for index in at:
                self.check_before_tokenising(prompts[index], params[index])
            found = self.prompts.token_ids_of_all(texts, [self.num_kept(params[index]) for index in at])
        except RequestError:
            return prompts
        encoded = list(prompts)
        for index, text, token_ids in zip(at, texts, found, strict=True):
            encoded[index] = {"prompt": text, "prompt_token_ids": token_ids}
        return encoded

    def num_kept(self, params: Params | PreparedParams) -> int | None:
        """Return how many tokens from its start a prompt to pool, or for an encoder, keeps; None for all.

        A prompt of generated text is cut by `make_request`, mostly at its beginning.
        """
        given = params.params if isinstance(params, PreparedParams) else params
        is_read_whole = isinstance(given, PoolingParams) or self.limits.source is not None
        if not is_read_whole or given.truncate_prompt_tokens is None:
            return None
        return self.limits.longest_prompt if given.truncate_prompt_tokens == -1 else given.truncate_prompt_tokens

    def check_before_tokenising(self, prompt: Prompt, params: Params | PreparedParams) -> None:
        """Raise RequestError for params of a wrong type or beyond their limits, and for a text that cannot fit."""
        if isinstance(params, PreparedParams):
            params = params.params
        else:
            self.params.check_lists(params)
        if params.truncate_prompt_tokens is None:
            self.prompts.check_length(text_of(prompt), num_output=_num_output(params))

    def make_request(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: Params | PreparedParams,
        *,
        arrival_time_s: float,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: Adapter | None = None,
    ) -> Request:
        """Like `process`, for a prompt that is tokenised."""
        given = params.params if isinstance(params, PreparedParams) else params
        check_type(given)
        bounds = self.limits.of_request
        _check_request_id(request_id)
        # Divided by 2 because the server adds a key's number, a route prefix and numbers to a caller's id.
        bounds.check("name_chars", len(request_id) // 2, "request_id")
        if cache_salt is not None:
            _check_salt(cache_salt)
            bounds.check_names(cache_salt=cache_salt)
        before = lora.embeds if isinstance(lora, PromptAdapter) else None
        prompt_ids, embeds = self._checked_prompt(prompt, given, before)
        media = _placed(prompt, len(prompt_ids), 0 if before is None else len(before))
        ready = (params if isinstance(params, PreparedParams) else self.params.prepare(params)).params
        sampling = self.params.fit(ready, prompt_ids) if isinstance(ready, SamplingParams) else None
        pooling = ready if isinstance(ready, PoolingParams) else None
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt_ids,
            sampling=sampling,
            pooling=pooling,
            skip_prefix_read=pooling is not None and not self.limits.tasks.reads_prefix_cache(pooling),
            arrival_time_s=arrival_time_s,
            priority=_normal_priority(priority),
            client_index=self.client_index,
            handle=next(self._handles),
            seed=self._seed(sampling.seed) if sampling is not None else 0,
            eos_token_ids=self._eos_token_ids,
            lora=lora if isinstance(lora, LoraRef) else None,
            cache_salt=cache_salt,
            prompt_embeds=embeds,
            media=of_salt(media, cache_salt),
            encoder_len=prompt.encoder_len,
        )

    def _checked_prompt(
        self, prompt: EncodedPrompt, params: Params, before: np.ndarray | None
    ) -> tuple[np.ndarray, PromptEmbeds | None]:
        """Return the validated prompt's token ids and embeddings.   before: a prompt adapter's, to put in front."""
        side = "left"
        if isinstance(params, SamplingParams):
            num_added = len(before) if before is not None else 0
            # What an encoder reads is cut already.
            truncate = params.truncate_prompt_tokens if self.limits.source is None else None
            side = params.truncation_side or side
            if side == "left" and params.truncation_side and self.limits.source is not None:
                raise RequestError("truncation_side: what an encoder reads is cut at its end", "truncation_side")
            room = 1 + num_added if num_added else _num_output(params)
            token_ids = self.prompts.checked_ids(prompt, truncate, room, side)
        elif before is None:
            token_ids = self.prompts.checked_ids(prompt, None, num_output=0)
        else:
            raise RequestError("a prompt adapter is for generating text: prompts to pool have none", "lora_request")
        embeds = prompt.cut_to(len(token_ids), side)
        if before is not None:
            token_ids = np.concatenate([np.full(len(before), PLACEHOLDER_ID, np.int32), token_ids])
            embeds = PromptEmbeds.of_first(before) if embeds is None else embeds.after(before)
        if embeds is not None and isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs: the prompt, or a prompt adapter, has embeddings in place of tokens; leave it out",
                "prompt_logprobs",
            )
        return token_ids, embeds

    def remembered_adapter(self, given: LoRARequest) -> Adapter | None:
        """Return the adapter that a caller names if its files need not be read again. Raises RequestError."""
        return self._known_adapters(given).remembered(given)

    def find_adapter(self, given: LoRARequest) -> Adapter:
        """Return the adapter that a caller names, after checking its files. Raises RequestError. Thread-safe."""
        return self._known_adapters(given).find(given)

    def _known_adapters(self, given: object) -> KnownAdapters:
        if not isinstance(given, LoRARequest):
            raise RequestError(f"lora_request is {type(given).__name__}, expected LoRARequest", "lora_request")
        if self._adapters is None:
            raise RequestError("LoRA adapters are off on this engine: set enable_lora", "lora_request")
        return self._adapters

    def _seed(self, asked: int | None) -> int:
        if asked is not None:
            return asked % (1 << _SEED_BITS)
        if self._seeds is not None:
            return int(self._seeds.integers(1 << _SEED_BITS))
        return secrets.randbits(_SEED_BITS)

    @functools.cached_property
    def _seeds(self) -> np.random.Generator | None:
        return (
            None
            if self._engine_seed is None
            else np.random.default_rng([self._engine_seed % (1 << 64), self.client_index])
        )


def _num_output(params: Params) -> int:
    """Return the tokens of output for which the context must have room."""
    return int(isinstance(params, SamplingParams) and params.max_tokens != 0)


def _placed(prompt: EncodedPrompt, num_tokens: int, num_added: int) -> tuple[MediaItem, ...]:
    """Return a prompt's images or audio at their places in the request's tokens.

    num_tokens: of the request.   num_added: of them, those in front of the prompt. Raises RequestError if the prompt
    was truncated.
    """
    if not prompt.media:
        return ()
    if num_tokens - num_added < len(prompt.token_ids):
        name = "truncate_prompt_tokens"
        raise RequestError(f"{name}: a prompt with images or audio cannot be cut", name)
    if prompt.encoder_len:  # they have no place in the prompt
        return prompt.media
    return tuple(dataclasses.replace(item, offset=item.offset + num_added) for item in prompt.media)


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
