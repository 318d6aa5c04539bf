"""AsyncText: tokenise, render and decode for one event loop, without blocking it."""

import asyncio
from collections.abc import Sequence
from typing import Any

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import Request
from pagoda.engine.cancellation import Cancellation
from pagoda.engine.fair_threads import FairThreads
from pagoda.engine.inputs.adapters import Adapter
from pagoda.engine.inputs.chat_prompts import DEFAULT_CHAT, ChatOptions, RenderedChat
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.inputs.params_preparer import Params, PreparedParams
from pagoda.engine.inputs.prompt_encoder import EncodedPrompt
from pagoda.engine.inputs.prompts import Prompt, size_of
from pagoda.engine.inputs.scoring import PLAIN_PAIRS, PairOptions, Scoring
from pagoda.engine.templates.chat_values import Message
from pagoda.engine.templates.job import InProcessRenderer
from pagoda.engine.templates.pool import TemplatePool
from pagoda.engine.templates.process import ForeignValues, TemplateLimits
from pagoda.engine.text_threads import TextThreads

_NUM_COMPILERS = 2
_LONG_TEXT_TOKENS = 2048
"""From this many token ids on, decoding runs on a thread."""


class AsyncText:
    """Long texts run on threads, chat templates in other processes, grammars on threads of their own.

    `key` in the methods below: whose text it is. Long texts of different keys take turns.
    """

    def __init__(self, inputs: InputProcessor, template_limits: TemplateLimits | None = None) -> None:
        """template_limits: time and memory limits for rendering a chat template."""
        self._inputs = inputs
        self._threads = TextThreads()
        self._compilers = FairThreads(_NUM_COMPILERS, "pagoda-grammar-check")
        self._templates = TemplatePool(template_limits or TemplateLimits())

    async def start(self) -> None:
        """Start the process that renders chat templates, so that the first conversation does not wait for it."""
        await self._templates.start()

    def close(self) -> None:
        """Stop the tokenizer threads and template processes, even if they are busy. Idempotent."""
        self._threads.shutdown()
        self._templates.close()
        self._inputs.close()
        self._compilers.shutdown()

    async def prepare_params(self, params: Params, key: str = "") -> PreparedParams:
        """Validate parameters once for all prompts that share them. Raises RequestError."""
        if not isinstance(params, SamplingParams):
            return self._inputs.params.prepare(params)
        num_chars = sum(map(len, params.bad_words))
        self._inputs.limits.of_request.check_lists(params)

        def prepare(cancellation: Cancellation) -> PreparedParams:
            return self._inputs.params.prepare(params, cancellation)

        structure = params.structured_outputs
        if structure is not None and self._inputs.grammars.known(structure) is None:
            # Compiling a grammar may take seconds; texts do not wait for it.
            return await self._compilers.run(key, prepare)
        if num_chars:
            return await self._threads.run(key, num_chars, prepare)
        return self._inputs.params.prepare(params)

    async def read(
        self, prompt: Prompt, add_special_tokens: bool = True, key: str = "", keep: int | None = None
    ) -> EncodedPrompt:
        """Return the prompt as the model reads it, not yet validated. Raises RequestError.

        keep: see PromptEncoder.token_ids_of.
        """
        read, size = self._inputs.prompts.read, size_of(prompt)
        if not size or size < self._inputs.tokenizer.inline_chars:
            return read(prompt, add_special_tokens, keep=keep)
        return await self._threads.run(
            key, size, lambda cancellation: read(prompt, add_special_tokens, cancellation, keep)
        )

    async def make_request(
        self,
        prompt: Prompt,
        params: Params | PreparedParams,
        request_id: str,
        *,
        arrival_time_s: float,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: Adapter | None = None,
        add_special_tokens: bool = True,
        key: str = "",
    ) -> Request:
        """Tokenise and validate a prompt and its parameters, like InputProcessor.process. Raises RequestError."""
        inputs = self._inputs
        inputs.check_before_tokenising(prompt, params)
        encoded = await self.read(prompt, add_special_tokens, key, inputs.num_kept(params))
        if isinstance(params, SamplingParams) and (params.bad_words or params.structured_outputs is not None):
            params = await self.prepare_params(params, key)
        return inputs.make_request(
            request_id,
            encoded,
            params,
            arrival_time_s=arrival_time_s,
            priority=priority,
            cache_salt=cache_salt,
            lora=lora,
        )

    async def plan_scores(
        self,
        first: Sequence[str],
        second: Sequence[str],
        params: PoolingParams,
        names: tuple[str, str],
        key: str = "",
        options: PairOptions = PLAIN_PAIRS,
    ) -> Scoring:
        """Return which prompts give the scores of pairs of texts; see Scoring. Raises RequestError."""
        num_chars = sum(map(len, first)) + sum(map(len, second))

        def plan(cancellation: Cancellation | None = None) -> Scoring:
            return Scoring(first, second, params, self._inputs, names, cancellation, options)

        renders = options.template or self._inputs.score_template  # in another process
        if num_chars < self._inputs.tokenizer.inline_chars and not renders:
            return plan()
        return await self._threads.run(key, num_chars, plan)

    async def render_chat(
        self,
        messages: Sequence[Message],
        options: ChatOptions = DEFAULT_CHAT,
        *,
        must_fit: bool = False,
        is_bounded: bool = False,
        key: str = "",
    ) -> RenderedChat:
        """Render a conversation into the model's prompt (see ChatPrompts.render).

        Templates run in another process with a deadline, and stop when this coroutine is cancelled. Only values that
        cannot be pickled (objects of the caller's own classes) are rendered in this process.
        must_fit: reject a text that cannot fit into the model's context before tokenising it.
        is_bounded: otherwise, apply the limit `tokenized_chars`, as for text sent to a server.
        """
        job = self._inputs.chats.job(messages, options)
        try:
            text = await self._templates.render(job, key)
        except ForeignValues:
            text = await asyncio.to_thread(InProcessRenderer().render, job)
        except ConfigError as error:
            raise RequestError(str(error), "chat_template") from None
        if is_bounded and not must_fit:
            self._inputs.limits.of_request.check("tokenized_chars", len(text), "messages")
        tokenize = self._inputs.chats.tokenize
        if not self._is_long(text):
            return tokenize(text, options.add_special_tokens, must_fit)
        return await self._threads.run(
            key, len(text), lambda cancellation: tokenize(text, options.add_special_tokens, must_fit, cancellation)
        )

    async def encode(self, text: str, add_special_tokens: bool = True, key: str = "") -> list[int]:
        """Return the token ids of a text. Raises RequestError if it is not valid Unicode."""
        encode = self._inputs.prompts.encode
        if not self._is_long(text):
            return encode(text, add_special_tokens)
        return await self._threads.run(
            key, len(text), lambda cancellation: encode(text, add_special_tokens, cancellation)
        )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, skipping unknown ids. Runs on the calling thread: meant for short lists."""
        return self._inputs.tokenizer.decode(token_ids, skip_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], key: str = "") -> str:
        """Like `decode`, but long lists are decoded on a thread.

        Raises RequestError for an id outside the vocabulary of both the model and the tokenizer.
        """
        if len(token_ids) < _LONG_TEXT_TOKENS:
            return self._decode_known(token_ids)
        return await self._threads.run(key, len(token_ids), lambda _: self._decode_known(token_ids))

    async def token_strings(self, token_ids: Sequence[int], key: str = "") -> list[str]:
        """Return each token's own text, with U+FFFD for incomplete characters."""

        def texts(_: Cancellation) -> list[str]:
            read = self._inputs.tokenizer.token_bytes
            return [read(token_id).decode("utf-8", "replace") for token_id in token_ids]

        return await self._threads.run(key, len(token_ids), texts)

    def tokenizer_facts(self) -> dict[str, Any]:
        """Return the tokenizer's public facts: special tokens as text, their ids, vocabulary size, max_model_len."""
        facts = self._inputs.tokenizer.facts
        return {
            **{name: facts.special_names.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")},
            **facts.special_names,
            "vocab_size": facts.vocab_size,
            "bos_token_id": facts.bos_token_id,
            "eos_token_ids": list(facts.eos_token_ids),
            "special_token_ids": sorted(facts.special_token_ids),
            "max_model_len": self._inputs.limits.max_model_len,
        }

    def _is_long(self, text: str) -> bool:
        return len(text) >= self._inputs.tokenizer.inline_chars

    def _decode_known(self, token_ids: Sequence[int]) -> str:
        # A model's vocabulary may be padded beyond its tokenizer's; a tokenizer may have tokens its model lacks.
        size = max(self._inputs.limits.vocab_size, self._inputs.tokenizer.facts.vocab_size)
        for at, token_id in enumerate(token_ids):
            if not 0 <= token_id < size:
                raise RequestError(f"token {at} is {token_id}, outside the vocabulary of {size}", "tokens")
        return self.decode(token_ids)
