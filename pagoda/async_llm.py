"""AsyncLLM: run a model in an asyncio program. Every request is an async iterator; leaving it aborts the request."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from pagoda.assemble import build_engine_core
from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import RequestError, UsageError
from pagoda.base.lora import LoRARequest
from pagoda.base.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from pagoda.base.pooling import PoolingParams, PoolingTask
from pagoda.base.sampling_params import BeamSearchParams, SamplingParams
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.thread_client import ThreadClient
from pagoda.engine.inputs.adapters import Adapter
from pagoda.engine.inputs.chat_prompts import ChatOptions
from pagoda.engine.inputs.params_preparer import Params
from pagoda.engine.inputs.pooling_inputs import instruction_of, texts_of, with_instruction, with_task
from pagoda.engine.inputs.prompts import Prompt, check_conversation, check_prompt, text_of
from pagoda.engine.inputs.scoring import PairOptions
from pagoda.engine.lazy_engine import LazyEngine
from pagoda.engine.outputs.output_processor import OutputKind
from pagoda.engine.outputs.pooled import (
    classification_output,
    embedding_output,
    pooling_output,
    scoring_outputs,
)
from pagoda.engine.templates.chat_values import Message
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from pagoda.engine.wire import EngineStats
from pagoda.engine_setup import resolve_engine
from pagoda.input_setup import build_input_processor


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a caller says about a prompt, as in `AsyncLLM.generate`.   params: None: SamplingParams()."""

    params: Params | None
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None


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
        self._load = functools.partial(_load, config)
        self._engine = LazyEngine(self._load)
        self._added: dict[int, Adapter] = {}  # adapters by lora_int_id

    @classmethod
    def over(cls, engine: AsyncEngine) -> Self:
        """Return an AsyncLLM that uses an existing engine and closes it with itself."""
        llm = cls()
        llm._engine = LazyEngine(llm._load, engine)
        return llm

    @classmethod
    async def create(cls, model: str | None = None, **options: Any) -> Self:
        """Return a loaded model: `AsyncLLM(...)` and `start` in one."""
        return await cls(model, **options).start()

    async def start(self) -> Self:
        """Load the model if it is not loaded yet. Raises ConfigError or CapacityError as LLM does."""
        await self._engine.get()
        return self

    async def close(self) -> None:
        """Free the model's memory after the step in progress; requests in flight raise UsageError. Idempotent."""
        await self._engine.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- whole outputs

    async def generate(
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

        prompt: a string, token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}` or `{"prompt_embeds": ...}` (see
            LLM.generate); one per call.
        lora_request: the LoRA adapter to use; needs enable_lora.
        Raises RequestError for a prompt that cannot be served, before anything runs; UsageError if the AsyncLLM is
        closed, WorkerDied if the engine ended. A request that the engine ends after some tokens has `error` set.
        """
        asked = _Asked(sampling_params, request_id, priority, cache_salt, lora_request)
        async with self._running(prompt, asked, OutputKind.CUMULATIVE) as outputs:
            async for output in outputs:
                yield output

    async def chat(
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
        prompt = await self._render(messages, template_options)
        asked = _Asked(sampling_params, request_id, priority, cache_salt, lora_request)
        async with self._running(prompt, asked, OutputKind.CUMULATIVE) as outputs:
            async for output in outputs:
                yield output

    # ---- deltas

    async def stream(
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
        async with self._running(prompt, asked, OutputKind.DELTA) as outputs:
            async for output in outputs:
                yield output

    async def stream_chat(
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
        prompt = await self._render(messages, template_options)
        asked = _Asked(sampling_params, request_id, priority, cache_salt, lora_request)
        async with self._running(prompt, asked, OutputKind.DELTA) as outputs:
            async for output in outputs:
                yield output

    # ---- the engine

    async def abort(self, request_ids: str | Sequence[str]) -> list[str]:
        """Abort requests; return the ids that were running. Each gets a last output with finish_reason "abort"."""
        engine = await self._engine.get()
        return await engine.abort([request_ids] if isinstance(request_ids, str) else request_ids)

    async def get_tokenizer(self) -> Tokenizer:
        return (await self._engine.get()).input_processor.tokenizer

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Empty the prefix cache. Return False if blocks are in use and preempt_running is False."""
        return await (await self._engine.get()).reset_prefix_cache(preempt_running)

    async def stats(self) -> EngineStats:
        """Return the engine's latest gauges and counters."""
        return (await self._engine.get()).stats()

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

    # ---- LoRA adapters

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter now, so that the first request that uses it need not wait; as LLM.add_lora."""
        engine = await self._engine.get()
        lora = await engine.find_adapter(lora_request)
        await engine.load_adapter(lora)
        self._added[lora_request.lora_int_id] = lora
        return True

    async def remove_lora(self, lora_int_id: int) -> bool:
        """Free the memory of an adapter that `add_lora` loaded, after the last request that uses it has ended.

        Return False if there is none with this number.
        """
        engine = await self._engine.get()
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
        plan = (await self._engine.get()).input_processor.limits.tasks.plan
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
        """Return how well two texts match; see LLM.score."""
        text = (await self._engine.get()).text
        first, second = texts_of("data_1", data_1), texts_of("data_2", data_2)
        scoring = await text.plan_scores(
            first,
            second,
            pooling_params or PoolingParams(),
            ("data_1", "data_2"),
            options=PairOptions(chat_template, instruction),
        )
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._final(prompt, _Asked(params, lora_request=lora_request)))
                for prompt, params in zip(scoring.prompts, scoring.params, strict=True)
            ]
        outputs = [task.result() for task in tasks]
        return scoring_outputs(scoring, outputs)[0]

    # ---- inside

    async def _render(self, messages: Sequence[Message], template_options: dict[str, Any]) -> Prompt:
        check_conversation(messages, None)
        rendered = await (await self._engine.get()).text.render_chat(messages, ChatOptions(**template_options))
        return {"prompt_token_ids": rendered.token_ids, "prompt": rendered.text}

    def _running(
        self, prompt: Prompt, asked: _Asked, kind: OutputKind
    ) -> contextlib.aclosing[AsyncGenerator[RequestOutput, None]]:
        """Return the request's outputs; leaving the block aborts it."""
        return contextlib.aclosing(self._run(prompt, asked, kind))

    async def _final(self, prompt: Prompt, asked: _Asked) -> RequestOutput:
        """Return the finished output of a request."""
        async with self._running(prompt, asked, OutputKind.FINAL_ONLY) as outputs:
            async for output in outputs:
                return output
        raise AssertionError("a request ends with an output")

    async def _run(self, prompt: Prompt, asked: _Asked, kind: OutputKind) -> AsyncGenerator[RequestOutput, None]:
        check_prompt(prompt, None)
        engine = await self._engine.get()
        lora = await engine.find_adapter(asked.lora_request) if asked.lora_request is not None else None
        request = await engine.prepare(
            prompt,
            asked.params if asked.params is not None else SamplingParams(),
            asked.request_id,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            lora=lora,
        )
        has_tokens = False
        async with contextlib.aclosing(engine.stream(request, kind, text_of(prompt))) as outputs:
            async for output in outputs:
                output.lora_request = asked.lora_request
                has_tokens = has_tokens or any(part.token_ids for part in output.outputs)
                if output.error is not None and not has_tokens:
                    raise RequestError(output.error, "prompt")
                if self._engine.is_closed and any(part.finish_reason == "abort" for part in output.outputs):
                    raise UsageError("this AsyncLLM was closed while it generated")
                yield output


async def _load(config: EngineConfig) -> AsyncEngine:
    """Load a model into this process, on threads, without blocking the event loop."""
    setup = await asyncio.to_thread(resolve_engine, config)
    inputs = await asyncio.to_thread(build_input_processor, setup)
    client = ThreadClient(lambda: build_engine_core(setup))
    inputs.limits.fit((await client.start()).max_model_len)
    return AsyncEngine(client, inputs)
