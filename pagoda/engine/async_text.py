"""AsyncText: tokenise, render and decode for one event loop, without blocking it."""

import asyncio
import contextlib
import copy
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack

from pagoda.base.errors import RequestError, UsageError
from pagoda.base.lora import LoRARequest
from pagoda.base.outputs import RequestOutput
from pagoda.base.pooling import PoolingParams
from pagoda.base.request_limits import RequestLimits
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import Request
from pagoda.engine.answers.same_message import MessageForm
from pagoda.engine.images.source import has_remote_images
from pagoda.engine.inputs.adapters import Adapter
from pagoda.engine.inputs.chat_prompts import DEFAULT_CHAT, ChatOptions, RenderedChat, WrittenChat
from pagoda.engine.inputs.input_processor import InputProcessor, RequestFields
from pagoda.engine.inputs.params_preparer import Params, PreparedParams
from pagoda.engine.inputs.prompt_encoder import EncodedPrompt
from pagoda.engine.inputs.prompts import Prompt, size_of
from pagoda.engine.inputs.sampled_messages import KnownMessages, SampledMessage
from pagoda.engine.inputs.scoring import PLAIN_PAIRS, PairOptions, Scoring
from pagoda.engine.outputs.mailbox import merged
from pagoda.engine.templates.chat_values import Message
from pagoda.engine.tokenizers.tokenizer import LONG_TEXT_CHARS
from pagoda.engine.transcription.piece import Job, Question
from pagoda.engine.transcription.sound import Sound
from pagoda.engine.transcription.transcriber import Transcriber, Transcription, TranscriptionOptions
from pagoda.process.allocator import return_freed_memory

T = TypeVar("T")

_NUM_THREADS = 4
_NUM_LONG = 2
_NUM_COMPILERS = 2
_NUM_FETCHERS = 4
_VERY_LONG_CHARS = 64 * 1024
"""From this size on, texts have threads of their own: they take 50 ms or more, for which short ones do not wait."""
_LONG_TEXT_TOKENS = 2048
"""From this many token ids on, decoding runs on a thread."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """What finds earlier messages of the model.   form: of them all.   recall: returns those at some keys."""

    form: MessageForm
    recall: Callable[[Sequence[bytes]], Awaitable[Mapping[bytes, Sequence[SampledMessage]]]]


class AsyncText:
    """Short texts are handled at once; long ones, and all chat templates, on a few threads; very long ones, grammars,
    sounds, and chats with images that must be fetched, on threads of their own, because they may take seconds.

    Cancelling a call drops it while it waits for a thread; once it has begun, it runs to its end. What waits for a
    thread when this is closed, or needs one afterwards, raises UsageError.
    """

    def __init__(self, inputs: InputProcessor) -> None:
        self._inputs = inputs
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "pagoda-text")
        self._long = ThreadPoolExecutor(_NUM_LONG, "pagoda-long-text")
        self._compilers = ThreadPoolExecutor(_NUM_COMPILERS, "pagoda-grammar")
        self._fetchers = ThreadPoolExecutor(_NUM_FETCHERS, "pagoda-fetch")
        self._decoder = ThreadPoolExecutor(1, "pagoda-sound")
        self._decoding = asyncio.Lock()
        self._is_closed = False

    def close(self) -> None:
        """End the threads after the calls that they are in. Idempotent."""
        self._is_closed = True
        # Cancelling what waits would look to its callers as if they had been cancelled: each raises instead.
        self._threads.shutdown(wait=False)
        self._long.shutdown(wait=False)
        self._compilers.shutdown(wait=False)
        self._fetchers.shutdown(wait=False)
        self._decoder.shutdown(wait=False)

    async def prepare_params(self, params: Params) -> PreparedParams:
        """Validate parameters once for all prompts that share them. Raises RequestError."""
        if not isinstance(params, SamplingParams):
            return self._inputs.params.prepare(params)
        params = copy.copy(params)
        self._inputs.limits.of_request.check_lists(params)

        def prepare() -> PreparedParams:
            return self._inputs.params.prepare(params)

        structure = self._inputs.params.structure_of(params)
        if structure is not None and self._inputs.grammars.known(structure) is None:
            return await self._run_in(self._compilers, prepare)
        if params.bad_words or len(params.allowed_token_ids or ()) > _LONG_TEXT_TOKENS:
            return await self._run(prepare)
        return prepare()

    async def write_grammar(self, write: Callable[[], T]) -> T:
        """Return write(), called on a grammars' thread: it turns a caller's schemas into a grammar's text."""
        return await self._run_in(self._compilers, write)

    async def make_request(
        self,
        prompt: Prompt,
        params: Params | PreparedParams,
        request_id: str,
        *,
        arrival_time_s: float,
        add_special_tokens: bool = True,
        **fields: Unpack[RequestFields],
    ) -> Request:
        """Tokenise and validate a prompt and its parameters, like InputProcessor.process. Raises RequestError."""
        inputs, params = self._inputs, copy.copy(params)  # the caller may change theirs while the prompt is read

        def read() -> EncodedPrompt:
            inputs.check_before_tokenising(prompt, params)
            return inputs.prompts.read(prompt, add_special_tokens, inputs.num_kept(params))

        size = size_of(prompt)
        encoded = read() if size < LONG_TEXT_CHARS else await self._run(read, size)
        if isinstance(params, SamplingParams) and (params.bad_words or params.structured_outputs is not None):
            params = await self.prepare_params(params)

        def make() -> Request:
            return inputs.make_request(request_id, encoded, params, arrival_time_s=arrival_time_s, **fields)

        given = params.params if isinstance(params, PreparedParams) else params
        num_tokens = len(encoded.token_ids)
        if num_tokens > _LONG_TEXT_TOKENS and inputs.params.reads_prompt(given):
            return await self._run(make, num_tokens)
        return make()

    async def find_adapter(self, given: LoRARequest) -> Adapter:
        """Return the adapter that a caller names, after checking its files on a thread. Raises RequestError."""
        known = self._inputs.remembered_adapter(given)
        return known if known is not None else await asyncio.to_thread(self._inputs.find_adapter, given)

    async def plan_scores(
        self,
        first: Sequence[str],
        second: Sequence[str],
        params: PoolingParams,
        names: tuple[str, str],
        options: PairOptions = PLAIN_PAIRS,
    ) -> Scoring:
        """Return which prompts give the scores of pairs of texts; see Scoring. Raises RequestError."""

        def plan() -> Scoring:
            return Scoring(first, second, params, self._inputs, names, options)

        num_chars = sum(map(len, first)) + sum(map(len, second))
        is_rendered = bool(options.template or self._inputs.score_template)
        return plan() if num_chars < LONG_TEXT_CHARS and not is_rendered else await self._run(plan, num_chars)

    async def render_chat(
        self,
        messages: Sequence[Message],
        options: ChatOptions = DEFAULT_CHAT,
        *,
        must_fit: bool = False,
        is_bounded: bool = False,
        size: int = 0,
        earlier: Earlier | None = None,
    ) -> RenderedChat:
        """Render a conversation into the model's prompt; see ChatPrompts.render.

        size: about how many characters it has.
        earlier: finds what is known of its messages; None: its answer is not to be found again.
        """
        chats = self._inputs.chats
        known = None if earlier is None else KnownMessages({}, earlier.form)

        def write() -> WrittenChat:
            return chats.write(messages, options, must_fit=must_fit, is_bounded=is_bounded)

        def encode(written: WrittenChat) -> RenderedChat:
            rendered = chats.encode(written, known)
            if len(rendered.text) >= _VERY_LONG_CHARS:
                return_freed_memory()
            return rendered

        def begin() -> RenderedChat | tuple[WrittenChat, list[bytes], Earlier]:
            written = write()
            has_answers = any(isinstance(one, Mapping) and one.get("role") == "assistant" for one in messages)
            if earlier is None or not has_answers:
                return encode(written)
            return written, [place.key for place in chats.places.find(written.text, earlier.form)[0]], earlier

        if size >= LONG_TEXT_CHARS:
            is_remote = await self._run_in(self._threads, lambda: has_remote_images(messages))
        else:
            is_remote = has_remote_images(messages)
        threads = self._fetchers if is_remote else self._of_size(size)
        begun = await self._run_in(threads, begin)
        if isinstance(begun, RenderedChat):
            return begun
        written, keys, known_to = begun
        known = KnownMessages(await known_to.recall(keys), known_to.form)
        return await self._run_in(threads, lambda: encode(written))

    async def begin_transcription(
        self,
        read: Callable[[RequestLimits, Callable[[], bool]], Sound],
        options: TranscriptionOptions,
        claim: Callable[[RequestLimits], int] | None = None,
        hold: Callable[[int], Awaitable[None]] | None = None,
    ) -> Transcription:
        """Decode a sound on a thread of its own.

        read: returns the sound; called there. It should stop once what it is given returns True: the call was
        cancelled.   claim: returns about how many bytes that takes; called there.   hold: counts so many bytes, in all,
        when there is room: those claimed before it is decoded, then those it has, before the next is decoded. A claim
        may be wrong, so one at a time is all that is in memory uncounted.
        Raises RequestError, and the errors of `read`, `claim` and `hold`.
        """
        limits, left = self._inputs.limits.of_request, threading.Event()

        def begin() -> Transcription:
            transcriber = Transcriber(self._inputs)
            try:
                return transcriber.begin(read(limits, left.is_set), options)
            finally:
                return_freed_memory()

        async with self._decoding:
            if claim is not None and hold is not None:
                await hold(await self._run_in(self._decoder, lambda: claim(limits)))
            try:
                begun = await self._run_in(self._decoder, begin)
            finally:
                left.set()
            if hold is not None:
                await hold(begun.num_bytes)
        return begun

    async def _advance(self, job: Job, answer: RequestOutput | None) -> "Question | list[Job] | None":
        """Send an answer to a job, on a thread; return its next question, or None at its end. Raises RequestError."""

        def advance() -> "Question | list[Job] | None":
            try:
                return job.send(answer) if answer is not None else next(job)
            except StopIteration:  # which no future can hold
                return None

        return await self._run(advance)

    async def run_job(
        self, job: Job, ask: Callable[[Question], AsyncGenerator[RequestOutput, None]]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a job of a transcription to its end, with all that it starts; yield the output of each of its requests.

        As many of them run at once as the engine runs sequences.   ask: starts the request of a question, and yields
        its output. Close the iterator to abort it. Raises RequestError, and what `ask` raises.
        """
        asked = await self._advance(job, None)
        while asked is not None:
            if isinstance(asked, list):
                places = asyncio.Semaphore(self._inputs.limits.max_num_seqs)
                jobs = [_when_there_is_room(places, self.run_job(one, ask)) for one in asked]
                async with contextlib.aclosing(merged(jobs)) as outputs:
                    async for output in outputs:
                        yield output
                asked = await self._advance(job, None)
                continue
            async with contextlib.aclosing(ask(asked)) as outputs:
                async for output in outputs:
                    if output.finished:
                        if output.error is not None:
                            raise RequestError(output.error, "file")
                        if output.outputs[0].finish_reason == "abort":
                            raise RequestError("the transcription was aborted")
                        asked = await self._advance(job, output)
                        yield output

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises RequestError if it is not valid Unicode."""

        def encode() -> list[int]:
            return self._inputs.prompts.encode(text, add_special_tokens)

        return encode() if len(text) < LONG_TEXT_CHARS else await self._run(encode, len(text))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, skipping unknown ids. Runs on the calling thread: meant for short lists."""
        return self._inputs.tokenizer.decode(token_ids, skip_special_tokens)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Like `decode`, but long lists are decoded on a thread.

        Raises RequestError for an id outside the vocabulary of both the model and the tokenizer.
        """
        if len(token_ids) < _LONG_TEXT_TOKENS:
            return self._decode_known(token_ids)
        return await self._run(lambda: self._decode_known(token_ids), len(token_ids))

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary writes it."""

        def texts() -> list[str]:
            return list(map(self._inputs.tokenizer.token_string, token_ids))

        return await self._run(texts, len(token_ids))

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

    async def _run(self, function: Callable[[], T], size: int = 0) -> T:
        """Return function(), called on a thread.   size: how many characters or tokens it is about."""

        def run() -> T:
            try:
                return function()
            finally:
                if size >= _VERY_LONG_CHARS:
                    return_freed_memory()  # tokenising takes a hundred times the text's size, which malloc would keep

        return await self._run_in(self._of_size(size), run)

    def _of_size(self, size: int) -> ThreadPoolExecutor:
        return self._long if size >= _VERY_LONG_CHARS else self._threads

    async def _run_in(self, threads: ThreadPoolExecutor, function: Callable[[], T]) -> T:
        def run() -> T:
            self._check_open()
            return function()

        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(threads, run)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the engine was closed before it had read this request")

    def _decode_known(self, token_ids: Sequence[int]) -> str:
        # A model's vocabulary may be padded beyond its tokenizer's; a tokenizer may have tokens its model lacks.
        size = max(self._inputs.limits.vocab_size, self._inputs.tokenizer.facts.vocab_size)
        for at, token_id in enumerate(token_ids):
            if not 0 <= token_id < size:
                raise RequestError(f"token {at} is {token_id}, out of vocabulary (0 .. {size - 1})", "tokens")
        return self.decode(token_ids)


async def _when_there_is_room(
    places: asyncio.Semaphore, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncGenerator[RequestOutput, None]:
    async with places, contextlib.aclosing(outputs):
        async for output in outputs:
            yield output
