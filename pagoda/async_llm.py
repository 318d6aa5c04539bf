"""AsyncLLM: run a model in an asyncio program. Every request is an async iterator; leaving it aborts the request."""

import asyncio
import contextlib
import copy
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from pagoda.assembly.assemble import llm_engine_builder
from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import PagodaError, RequestError, UsageError
from pagoda.base.lora import LoRARequest
from pagoda.base.outputs import (
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
from pagoda.core.request import LoraRef
from pagoda.core.scheduler import SchedulerStats
from pagoda.engine.async_text import AsyncText
from pagoda.engine.engine_thread import EngineThread, NewRequest, Reply
from pagoda.engine.inputs.adapters import Adapter
from pagoda.engine.inputs.chat_prompts import chat_options
from pagoda.engine.inputs.params_preparer import Params
from pagoda.engine.inputs.pooling_inputs import instruction_of, texts_of, with_instruction, with_task
from pagoda.engine.inputs.prompts import Prompt, check_conversation, check_prompt, text_of
from pagoda.engine.inputs.scoring import PairOptions
from pagoda.engine.llm_engine import LLMEngine
from pagoda.engine.outputs.mailbox import Mailbox
from pagoda.engine.outputs.output_processor import OutputKind
from pagoda.engine.outputs.results import (
    classification_output,
    embedding_output,
    pooling_output,
    scoring_outputs,
)
from pagoda.engine.templates.chat_values import Message
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from pagoda.engine.transcription.piece import Question
from pagoda.engine.transcription.sound import load_sound
from pagoda.engine.transcription.transcriber import TranscriptionOptions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a caller says about a prompt, as in `AsyncLLM.generate`.   params: None: the model's own."""

    params: Params | None
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", copy.copy(self.params))  # the caller may change theirs meanwhile


def _kind_of(params: Params | None) -> OutputKind:
    asked = getattr(params, "output_kind", None)  # something else than parameters is refused later
    return asked if asked is not None else OutputKind.CUMULATIVE


class AsyncLLM:
    """A model for the tasks of one event loop, on a thread of this process. Requests of all tasks run in one batch.

    async with AsyncLLM("smollm2-135m") as llm:
        async for output in llm.generate("The sky is", SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)

    `generate` and `chat` yield whole outputs: everything so far, the last one finished (as vLLM's AsyncLLM does).
    `stream` and `stream_chat` yield deltas. LLM has the same four. Leaving an iteration early aborts its request.
    The model is loaded by `async with`, `await llm.start()` or the first request.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """Check the options, which are the same as for LLM, without loading the model. Raises ConfigError."""
        if model is not None:
            options["model"] = model
        config = EngineConfig.for_engine(**options)
        check_settings(config)
        self._begin(llm_engine_builder(config))

    @classmethod
    def over(cls, build: Callable[[], LLMEngine]) -> Self:
        """Return an AsyncLLM over the engine that `build` returns, which is called on the thread that runs it."""
        llm = cls.__new__(cls)
        llm._begin(build)
        return llm

    def _begin(self, build: Callable[[], LLMEngine]) -> None:
        self._build = build
        self._pid = os.getpid()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loading: asyncio.Task[_Running] | None = None
        self._added: dict[int, Adapter] = {}  # adapters by lora_int_id

    @classmethod
    async def create(cls, model: str | None = None, **options: Any) -> Self:
        """Return a loaded model: `AsyncLLM(...)` and `start` in one."""
        return await cls(model, **options).start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Return an AsyncLLM with the settings that `EngineArgs` returned."""
        check_settings(engine_args)
        return cls.over(llm_engine_builder(engine_args))

    async def start(self) -> Self:
        """Load the model if it is not loaded yet. Raises ConfigError or CapacityError as LLM does."""
        await self._running()
        return self

    async def close(self) -> None:
        """Free the model's memory after the step in progress; requests in flight raise UsageError. Idempotent."""
        was_closed, self._is_closed = self._is_closed, True
        if was_closed or os.getpid() != self._pid or self._loading is None:
            return
        with contextlib.suppress(PagodaError):
            running = await asyncio.shield(self._loading)  # loading cannot be interrupted
            running.text.close()
            running.thread.stop()
            await asyncio.to_thread(running.thread.join)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

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
        asked = _Asked(sampling_params, request_id, priority, cache_salt, lora_request)
        return self._run(prompt, asked, _kind_of(asked.params))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like `generate`, for the assistant's next turn in a conversation; template_options as in LLM.chat."""
        asked = _Asked(sampling_params, request_id, priority, cache_salt, lora_request)
        return self._chat(messages, template_options, asked, _kind_of(asked.params))

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
        asked = _Asked(sampling_params, request_id, priority, cache_salt, lora_request)
        return self._run(prompt, asked, OutputKind.DELTA)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like `stream`, for the assistant's next turn in a conversation."""
        asked = _Asked(sampling_params, request_id, priority, cache_salt, lora_request)
        return self._chat(messages, template_options, asked, OutputKind.DELTA)

    # ---- the engine

    async def abort(self, request_ids: str | Sequence[str]) -> list[str]:
        """Abort requests; return the ids that were running. Each gets a last output with finish_reason "abort"."""
        running = await self._running()
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        return await running.call(running.thread.aborting(ids))

    async def get_tokenizer(self) -> Tokenizer:
        return (await self._running()).inputs.tokenizer

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Empty the prefix cache. Return False if blocks are in use and preempt_running is False."""
        return await (await self._running()).call(lambda engine: engine.core.reset_prefix_cache(preempt_running))

    async def stats(self) -> SchedulerStats:
        """Return the engine's gauges and counters."""
        return await (await self._running()).call(lambda engine: engine.core.make_stats())

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """Return the finished output of a beam search: `beam_width` outputs, best first; errors as in `generate`."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params is {type(params).__name__}, expected BeamSearchParams", "params")
        sampling = params.sampling_params(logprobs=0)
        return await self._final(prompt, _Asked(sampling, request_id, priority, cache_salt, lora_request))

    # ---- speech

    async def transcribe(self, sound: Any, **options: Any) -> TranscriptionOutput:
        """Return the text of a sound, with times; see LLM.transcribe. Cancelling the call aborts it.

        sound: a path, the bytes of a file, or an array of samples. Raises RequestError for one that cannot be
        transcribed, and for an option of the wrong kind.
        """
        running = await self._running()
        name = str(sound) if isinstance(sound, str | os.PathLike) else "sound"
        begun = await running.text.begin_transcription(
            lambda limits, is_left: load_sound(sound, name, limits, is_left), TranscriptionOptions.of(options)
        )

        def ask(question: Question) -> AsyncGenerator[RequestOutput, None]:
            now_s = running.engine.core.now()
            request = running.inputs.make_request(
                uuid.uuid4().hex, question.prompt, question.params, arrival_time_s=now_s
            )
            return running.stream(NewRequest(request, OutputKind.FINAL_ONLY))

        async with contextlib.aclosing(running.text.run_job(begun.job(), ask)) as outputs:
            async for _ in outputs:
                pass
        return begun.output()

    # ---- LoRA adapters

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter now, so that the first request that uses it need not wait; as LLM.add_lora."""
        running = await self._running()
        lora = await running.text.find_adapter(lora_request)
        if isinstance(lora, LoraRef):  # the engine does not know of prompt adapters
            await running.call(lambda engine: engine.core.load_adapter(lora))
        self._added[lora_request.lora_int_id] = lora
        return True

    async def remove_lora(self, lora_int_id: int) -> bool:
        """Free the memory of an adapter that `add_lora` loaded, once no running request uses it.

        Return False if there is none with this number.
        """
        running = await self._running()
        lora = self._added.pop(lora_int_id, None)
        if isinstance(lora, LoraRef):
            await running.call(lambda engine: engine.core.unload_adapter(lora))
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
        asked = _Asked(params, request_id, priority, cache_salt, lora_request)
        yield pooling_output(await self._final(prompt, asked))

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
        plan = (await self._running()).inputs.limits.tasks.plan
        params = with_task(pooling_params or PoolingParams(), "embed")
        prompt = with_instruction(prompt, instruction_of(plan, prompt_name))
        asked = _Asked(params, request_id, priority, cache_salt, lora_request)
        return embedding_output(await self._final(prompt, asked))

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
        asked = _Asked(params, request_id, priority, cache_salt, lora_request)
        return classification_output(await self._final(prompt, asked))

    async def score(
        self,
        data_1: str,
        data_2: str,
        /,
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        instruction: str | None = None,
    ) -> PoolingRequestOutput[ScoringOutput]:
        """Return how well two texts match; see LLM.score, whose errors it raises."""
        text = (await self._running()).text
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
                    group.create_task(self._final(prompt, _Asked(params, lora_request=lora_request)))
                    for prompt, params in zip(scoring.prompts, scoring.params, strict=True)
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        outputs = [task.result() for task in tasks]
        return scoring_outputs(scoring, outputs)[0]

    # ---- inside

    async def _chat(
        self, messages: Sequence[Message], template_options: dict[str, Any], asked: _Asked, kind: OutputKind
    ) -> AsyncGenerator[RequestOutput, None]:
        check_conversation(messages, None)
        rendered = await (await self._running()).text.render_chat(messages, chat_options(template_options))
        prompt: Prompt = {"prompt_token_ids": rendered.token_ids, "prompt": rendered.text, "media": rendered.media}
        async with contextlib.aclosing(self._run(prompt, asked, kind)) as outputs:
            async for output in outputs:
                yield output

    async def _final(self, prompt: Prompt, asked: _Asked) -> RequestOutput:
        """Return the finished output of a request."""
        async with contextlib.aclosing(self._run(prompt, asked, OutputKind.FINAL_ONLY)) as outputs:
            async for output in outputs:
                return output
        raise AssertionError("a request ends with an output")

    async def _run(self, prompt: Prompt, asked: _Asked, kind: OutputKind) -> AsyncGenerator[RequestOutput, None]:
        check_prompt(prompt, None)
        running = await self._running()
        request = await running.text.make_request(
            prompt,
            asked.params if asked.params is not None else SamplingParams.of_model(running.inputs.default_sampling),
            asked.request_id if asked.request_id is not None else uuid.uuid4().hex,
            arrival_time_s=running.engine.core.now(),
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            lora=await running.text.find_adapter(asked.lora_request) if asked.lora_request is not None else None,
        )
        has_tokens = False
        async with contextlib.aclosing(running.stream(NewRequest(request, kind, text_of(prompt)))) as outputs:
            async for output in outputs:
                output.lora_request = asked.lora_request
                has_tokens = has_tokens or any(part.token_ids for part in output.outputs)
                if output.error is not None and not has_tokens:
                    raise RequestError(output.error, "prompt")
                yield output

    async def _running(self) -> "_Running":
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
        running = await asyncio.shield(self._loading)  # cancelling one caller does not cancel the load
        if self._is_closed:
            raise UsageError("this AsyncLLM was closed while it was loading")
        running.thread.check_usable()
        return running


class _Running:
    """A loaded engine for the tasks of one event loop; the Listener of all their requests."""

    def __init__(self, thread: EngineThread, engine: LLMEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.thread = thread
        self.engine = engine
        self.inputs = engine.input_processor
        self.text = AsyncText(engine.input_processor)
        self._ids: set[str] = set()  # of requests that have a reader
        self._listener = _Mailboxes(loop)

    async def call(self, run: Callable[[LLMEngine], T]) -> T:
        """Run a command between two steps. Raises its errors, and the engine's."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.thread.post(run, _settling(done))
        return await done

    async def stream(self, new: NewRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run a prepared request. Raises RequestError if it is refused. Leaving the iteration aborts it."""
        request_id = new.request.request_id
        if request_id in self._ids:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        self._ids.add(request_id)
        mailbox = Mailbox(new.kind)
        is_running = True
        try:
            for error in (await self.call(self._listener.adding(self.thread, new, mailbox))).values():
                is_running = False
                raise error
            while is_running:
                output = await mailbox.get()
                is_running = not output.finished
                yield output
        finally:
            self._ids.remove(request_id)
            if is_running:
                self.thread.abort([request_id])


class _Mailboxes:
    """A Listener that fills the mailboxes of requests on an event loop.

    by_id: of the requests in the engine. Only the engine's thread uses it, in the order of its commands: what it has
    put out for a request that was left never reaches a later one with the same id.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.by_id: dict[str, Mailbox] = {}
        self._loop = loop

    def adding(
        self, thread: EngineThread, new: NewRequest, mailbox: Mailbox
    ) -> Callable[[LLMEngine], dict[str, Exception]]:
        """Return a command that queues a request, whose outputs go to `mailbox`; its result as EngineThread.adding."""
        add = thread.adding(self, [new])

        def run(engine: LLMEngine) -> dict[str, Exception]:
            refused = add(engine)
            if not refused:
                self.by_id[new.request.request_id] = mailbox
            return refused

        return run

    def deliver(self, outputs: list[RequestOutput]) -> None:
        mail: list[tuple[Mailbox, RequestOutput]] = []
        for output in outputs:
            request_id = output.request_id
            mail.append((self.by_id.pop(request_id) if output.finished else self.by_id[request_id], output))
        _call_on(self._loop, _put, mail)

    def end(self, error: PagodaError) -> None:
        _call_on(self._loop, _fail, list(self.by_id.values()), error)


def _put(mail: list[tuple[Mailbox, RequestOutput]]) -> None:
    for mailbox, output in mail:
        mailbox.put(output)


def _fail(mailboxes: list[Mailbox], error: PagodaError) -> None:
    for mailbox in mailboxes:
        mailbox.fail(error)


async def _load(build: Callable[[], LLMEngine]) -> _Running:
    """Build an engine on its own thread, without blocking the event loop."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[LLMEngine] = loop.create_future()
    thread = EngineThread(build, _settling(ready), "AsyncLLM")
    return _Running(thread, await ready, loop)


def _settling(future: "asyncio.Future[Any]") -> Reply:
    """Return a Reply that settles a future in its event loop."""

    def settle(result: object, error: BaseException | None) -> None:
        if future.done():  # its waiter may have been cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    return lambda result, error: _call_on(future.get_loop(), settle, result, error)


def _call_on(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Run `call` on an event loop; do nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)
