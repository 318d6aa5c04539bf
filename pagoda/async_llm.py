"""AsyncLLM: run a model in an asyncio program. Every request is an async iterator; leaving it aborts the request."""

import asyncio
import contextlib
import copy
import os
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import msgspec

from pagoda.assembly.assemble import text_engine_builder
from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.engine_args import EngineArgs, settings_of, with_options_of
from pagoda.base.errors import PagodaError, RequestError, UsageError
from pagoda.base.lora import LoRARequest
from pagoda.base.outputs import (
    BeamSearchOutput,
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    TranscriptionOutput,
)
from pagoda.base.pooling import PoolingParams, PoolingTask
from pagoda.base.sampling_params import BeamSearchParams, SamplingParams
from pagoda.core.stats import SchedulerStats
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.thread_client import ThreadClient
from pagoda.engine.inputs.adapters import Adapter
from pagoda.engine.inputs.callers_tokenizer import CallersTokenizer
from pagoda.engine.inputs.chat_prompts import ChatFields, chat_options
from pagoda.engine.inputs.params_preparer import Params
from pagoda.engine.inputs.pooling_inputs import instruction_of, texts_of, with_instruction, with_task
from pagoda.engine.inputs.prompts import Prompt, check_conversation, check_prompt, is_embeds, text_of
from pagoda.engine.inputs.scoring import PairOptions
from pagoda.engine.outputs.output_processor import OutputKind
from pagoda.engine.outputs.results import (
    beam_sampling,
    beams_of,
    classification_output,
    embedding_output,
    pooling_output,
    scoring_outputs,
)
from pagoda.engine.templates.chat_values import Message
from pagoda.engine.text_engine import TextEngine
from pagoda.engine.transcription.sound import load_sound
from pagoda.engine.transcription.transcriber import TranscriptionFields, TranscriptionOptions
from pagoda.vllm_names import missing_method


@dataclass(frozen=True, slots=True)
class _RequestOptions:
    """What a caller says about a prompt, as in `AsyncLLM.generate`.   params: None: the model's own."""

    params: Params | None
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", copy.copy(self.params))  # the caller may change theirs meanwhile


def _kind_of(params: Params | None) -> OutputKind:
    kind = getattr(params, "output_kind", None)  # something else than parameters is refused later
    return kind if kind is not None else OutputKind.CUMULATIVE


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A loaded engine.   client: the way to its thread."""

    client: ThreadClient
    engine: AsyncEngine


async def _load(build: Callable[[], TextEngine]) -> _Loaded:
    """Build an engine on its own thread, without blocking the event loop."""
    client = ThreadClient(build, "AsyncLLM")
    return _Loaded(client, AsyncEngine(client, (await client.start()).input_processor))


def _stop_loaded(loading: asyncio.Task[_Loaded]) -> None:
    """Stop the engine that a finished task has loaded, if it has."""
    if not loading.cancelled() and loading.exception() is None:
        loading.result().engine.text.close()
        loading.result().client.thread.stop()


class AsyncLLM:
    """A model for the tasks of one event loop, on a thread of this process. Requests of all tasks run in one batch.

    async with AsyncLLM("smollm2-135m") as llm:
        async for output in llm.generate("The sky is", SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)

    `generate` and `chat` yield whole outputs: everything so far, the last one finished (as vLLM's AsyncLLM does).
    `stream` and `stream_chat` yield deltas. LLM has the same four. Leaving an iteration early aborts its request.
    The model is loaded by `async with`, `await llm.start()` or the first request.
    """

    @with_options_of(EngineArgs)
    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """Check the options, which are the same as for LLM, without loading the model. Raises ConfigError."""
        config = EngineConfig.for_engine(model=model, **options)
        check_settings(config)
        self._begin(text_engine_builder(config))

    @classmethod
    def over(cls, build: Callable[[], TextEngine]) -> Self:
        """Return an AsyncLLM over the engine that `build` returns, which is called on the thread that runs it."""
        llm = cls.__new__(cls)
        llm._begin(build)
        return llm

    def _begin(self, build: Callable[[], TextEngine]) -> None:
        self._build = build
        self._pid = os.getpid()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loading: asyncio.Task[_Loaded] | None = None
        self._finalizer: weakref.finalize[..., AsyncLLM] | None = None
        self._added: dict[int, Adapter] = {}  # adapters by lora_int_id

    @classmethod
    @with_options_of(EngineArgs)
    async def create(cls, model: str | os.PathLike[str] | None = None, **options: Any) -> Self:
        """Return a loaded model: `AsyncLLM(...)` and `start` in one."""
        return await cls(model, **options).start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs | EngineConfig) -> Self:
        """Return an AsyncLLM with the options of an `EngineArgs`. Raises as the constructor."""
        config = settings_of(engine_args)
        check_settings(config)
        return cls.over(text_engine_builder(config))

    async def start(self) -> Self:
        """Load the model if it is not loaded yet. Raises ConfigError or CapacityError as LLM does."""
        await self._running()
        return self

    @contextlib.asynccontextmanager
    async def trace(self, file: str | os.PathLike[str]) -> AsyncGenerator[None, None]:
        """Write what the engine does during the block to a file, as `LLM.trace` does."""
        end = await (await self._running()).client.begin_trace()
        try:
            yield
        finally:
            encoded = msgspec.json.encode(await end())
            await asyncio.to_thread(Path(file).write_bytes, encoded)

    async def close(self) -> None:
        """Free the model's memory after the step in progress; requests in flight raise UsageError. Idempotent."""
        self._is_closed = True
        if os.getpid() != self._pid or self._loading is None:
            return
        with contextlib.suppress(PagodaError):
            loaded = await asyncio.shield(self._loading)  # loading cannot be interrupted
            await loaded.engine.shutdown(UsageError("this AsyncLLM was closed while it generated"))

    def shutdown(self) -> None:
        """As `close`, without waiting for the step in progress. Call it where the event loop runs, or after it."""
        self._is_closed = True
        if os.getpid() != self._pid or self._loading is None:
            return
        if self._loading.done():
            _stop_loaded(self._loading)
        else:
            self._loading.add_done_callback(_stop_loaded)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_method(type(self), name)

    # ---- whole outputs

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's output as it grows, everything so far each time; the last one has `finished` set.

        sampling_params: the model's own defaults when not given; its `output_kind` may ask for deltas instead.

        prompt: a string, token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}` or `{"prompt_embeds": ...}` (see
            LLM.generate); one per call.
        lora_request: the LoRA adapter to use; needs enable_lora.
        Raises RequestError for a prompt that cannot be served, before anything runs; UsageError if the AsyncLLM is
        closed, WorkerDied if the engine ended. A request that the engine ends after some tokens has `error` set.
        """
        options = _RequestOptions(sampling_params, request_id, priority, cache_salt, lora_request)
        return self._run(prompt, options, _kind_of(options.params))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        **template_options: Unpack[ChatFields],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like `generate`, for the assistant's next turn in a conversation; template_options as in LLM.chat.

        A sequence that is finished has its `message`: the reasoning, the content and the tool calls of its text.
        """
        options = _RequestOptions(sampling_params, request_id, priority, cache_salt, lora_request)
        return self._chat(messages, template_options, options, _kind_of(options.params))

    # ---- deltas

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the new part of the request's output as it arrives; arguments and errors as in `generate`."""
        options = _RequestOptions(sampling_params, request_id, priority, cache_salt, lora_request)
        return self._run(prompt, options, OutputKind.DELTA)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        **template_options: Unpack[ChatFields],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like `stream`, for the assistant's next turn in a conversation; its last delta has its `message`."""
        options = _RequestOptions(sampling_params, request_id, priority, cache_salt, lora_request)
        return self._chat(messages, template_options, options, OutputKind.DELTA)

    # ---- the engine

    async def abort(self, request_ids: str | Sequence[str]) -> list[str]:
        """Abort requests; return the ids that were running. Each gets a last output with finish_reason "abort"."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        return await (await self._engine()).abort(ids)

    async def get_tokenizer(self) -> CallersTokenizer:
        """Return the tokenizer with the names of transformers'; as LLM.get_tokenizer."""
        loaded = await self._running()
        return CallersTokenizer(loaded.engine.input_processor, loaded.client.thread.entered)

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return what `generate` and `chat` use without sampling parameters; as LLM.get_default_sampling_params."""
        return SamplingParams.of_model((await self._engine()).input_processor.default_sampling)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Remove all cached prefixes; False if running requests hold some, unless they are to be preempted."""
        return await (await self._engine()).reset_prefix_cache(reset_running_requests)

    async def stats(self) -> SchedulerStats:
        """Return the engine's gauges and counters."""
        return await (await self._running()).client.stats()

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> BeamSearchOutput:
        """Return the `beam_width` best outputs of a prompt, best first; as LLM.beam_search, errors as in `generate`."""
        inputs = (await self._engine()).input_processor
        sampling = beam_sampling(params, inputs.limits.max_logprobs)
        options = _RequestOptions(sampling, request_id, priority, cache_salt, lora_request)
        return beams_of(await self._final(prompt, options), inputs.tokenizer, not is_embeds(prompt))

    # ---- speech

    async def transcribe(
        self, sound: Any, *, priority: int = 0, cache_salt: str | None = None, **options: Unpack[TranscriptionFields]
    ) -> TranscriptionOutput:
        """Return the text of a sound, with times; see LLM.transcribe. Cancelling the call aborts it.

        sound: a path, the bytes of a file, or an array of samples. Raises RequestError for one that cannot be
        transcribed, and for an option of the wrong kind.
        """
        engine = await self._engine()
        name = str(sound) if isinstance(sound, str | os.PathLike) else "sound"
        begun = await engine.text.begin_transcription(
            lambda limits, is_left: load_sound(sound, name, limits, is_left), TranscriptionOptions.of(options)
        )
        running = engine.run_job(begun.job(), lambda: uuid.uuid4().hex, cache_salt, priority=priority)
        async with contextlib.aclosing(running) as outputs:
            async for _ in outputs:
                pass
        return begun.output()

    # ---- LoRA adapters

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter now, so that the first request that uses it need not wait; as LLM.add_lora."""
        engine = await self._engine()
        lora = await engine.text.find_adapter(lora_request)
        await engine.load_adapter(lora)
        self._added[lora_request.lora_int_id] = lora
        return True

    async def remove_lora(self, lora_int_id: int) -> bool:
        """Free the memory of an adapter that `add_lora` loaded, once no running request uses it.

        Return False if there is none with this number.
        """
        engine = await self._engine()
        lora = self._added.pop(lora_int_id, None)
        if lora is not None:
            engine.unload_adapter(lora)
        return lora is not None

    # ---- pooling

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yield once: what the model makes of the prompt's hidden states, as an array; see LLM.encode."""
        params = with_task(pooling_params or PoolingParams(), pooling_task)
        options = _RequestOptions(params, request_id, priority, cache_salt, lora_request)
        yield pooling_output(await self._final(prompt, options))

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling_params: PoolingParams | None = None,
        prompt_name: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PoolingRequestOutput[EmbeddingOutput]:
        """Return the prompt's embedding; see LLM.embed."""
        plan = (await self._engine()).input_processor.limits.tasks.plan
        params = with_task(pooling_params or PoolingParams(), "embed")
        prompt = with_instruction(prompt, instruction_of(plan, prompt_name))
        options = _RequestOptions(params, request_id, priority, cache_salt, lora_request)
        return embedding_output(await self._final(prompt, options))

    async def classify(
        self,
        prompt: Prompt,
        *,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PoolingRequestOutput[ClassificationOutput]:
        """Return the class probabilities of the prompt."""
        params = with_task(pooling_params or PoolingParams(), "classify")
        options = _RequestOptions(params, request_id, priority, cache_salt, lora_request)
        return classification_output(await self._final(prompt, options))

    async def score(
        self,
        data_1: str,
        data_2: str,
        /,
        *,
        pooling_params: PoolingParams | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        instruction: str | None = None,
    ) -> PoolingRequestOutput[ScoringOutput]:
        """Return how well two texts match; see LLM.score, whose errors it raises."""
        text = (await self._engine()).text
        first, second = texts_of("data_1", data_1), texts_of("data_2", data_2)
        scoring = await text.plan_scores(
            first,
            second,
            pooling_params or PoolingParams(),
            ("data_1", "data_2"),
            options=PairOptions(chat_template, instruction),
        )
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self._final(prompt, _RequestOptions(params, None, priority, cache_salt, lora_request))
                    )
                    for prompt, params in zip(scoring.prompts, scoring.params, strict=True)
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        outputs = [task.result() for task in tasks]
        return scoring_outputs(scoring, outputs)[0]

    # ---- inside

    async def _chat(
        self, messages: Sequence[Message], template_options: ChatFields, options: _RequestOptions, kind: OutputKind
    ) -> AsyncGenerator[RequestOutput, None]:
        check_conversation(messages, None)
        chosen = chat_options(template_options)
        engine = await self._engine()
        rendered = await engine.text.render_chat(messages, chosen)
        answers = engine.input_processor.chats.answers_to(messages, chosen, rendered)
        params = options.params or SamplingParams.of_model(engine.input_processor.default_sampling)
        if isinstance(params, SamplingParams):  # else it is refused
            options = replace(options, params=answers.params(params))
        prompt: Prompt = {**rendered.prompt, "prompt": rendered.text}
        async with contextlib.aclosing(self._run(prompt, options, kind)) as outputs:
            async for output in outputs:
                answers.read(output, is_delta=kind is OutputKind.DELTA)
                yield output

    async def _final(self, prompt: Prompt, options: _RequestOptions) -> RequestOutput:
        """Return the finished output of a request."""
        async with contextlib.aclosing(self._run(prompt, options, OutputKind.FINAL_ONLY)) as outputs:
            async for output in outputs:
                return output
        raise AssertionError("a request ends with an output")

    async def _run(
        self, prompt: Prompt, options: _RequestOptions, kind: OutputKind
    ) -> AsyncGenerator[RequestOutput, None]:
        check_prompt(prompt, None)
        engine = await self._engine()
        params, lora = options.params, None
        if params is None:
            params = SamplingParams.of_model(engine.input_processor.default_sampling)
        if options.lora_request is not None:
            lora = await engine.text.find_adapter(options.lora_request)
        request = await engine.text.make_request(
            prompt,
            params,
            options.request_id if options.request_id is not None else uuid.uuid4().hex,
            arrival_time_s=engine.now(),
            priority=options.priority,
            cache_salt=options.cache_salt,
            lora=lora,
        )
        has_tokens = False
        async with contextlib.aclosing(engine.stream(request, kind, text_of(prompt))) as outputs:
            async for output in outputs:
                output.lora_request = options.lora_request
                has_tokens = has_tokens or any(part.token_ids for part in output.outputs)
                if output.error is not None and not has_tokens:
                    raise RequestError(output.error, "prompt")
                yield output

    async def _engine(self) -> AsyncEngine:
        return (await self._running()).engine

    async def _running(self) -> _Loaded:
        """Return the engine, after loading it if it is not loaded.

        Raises the errors of loading it, and UsageError after `close`, in a forked child, and in another event loop.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                f"this AsyncLLM belongs to process {self._pid}, and this is a fork of it; make a new one in the child"
            )
        if self._is_closed:
            raise UsageError("this AsyncLLM is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise UsageError("this AsyncLLM belongs to another event loop; make one for each loop, or share an LLM")
        if self._loading is None or (self._loading.done() and (self._loading.cancelled() or self._loading.exception())):
            self._loading = asyncio.create_task(_load(self._build))
        loaded = await asyncio.shield(self._loading)  # cancelling one caller does not cancel the load
        if self._is_closed:
            raise UsageError("this AsyncLLM was closed while it was loading")
        loaded.client.thread.check_usable()
        if self._finalizer is None:  # the engine's tasks refer to it, but not to this object
            self._finalizer = weakref.finalize(self, loaded.client.thread.stop)
        return loaded
