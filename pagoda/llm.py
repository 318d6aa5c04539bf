"""LLM: run a model in a Python program. Outputs are returned in the order of the prompts."""

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import msgspec

from pagoda.assembly.assemble import text_engine_builder
from pagoda.base.config import EngineConfig
from pagoda.base.engine_args import EngineArgs, settings_of, with_options_of
from pagoda.base.errors import RequestError
from pagoda.base.lora import LoRARequest
from pagoda.base.outputs import (
    BeamSearchOutput,
    ClassificationOutput,
    EmbeddingOutput,
    Metric,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    TranscriptionOutput,
)
from pagoda.base.pooling import PoolingParams, PoolingTask
from pagoda.base.sampling_params import BeamSearchParams, SamplingParams
from pagoda.core.request import LoraRef
from pagoda.engine.answers.chat_answers import ChatAnswers
from pagoda.engine.inputs.adapters import Adapter, AdapterChoice
from pagoda.engine.inputs.callers_tokenizer import CallersTokenizer
from pagoda.engine.inputs.chat_prompts import ChatFields, ChatOptions, chat_options
from pagoda.engine.inputs.pooling_inputs import instruction_of, texts_of, with_instruction, with_task, with_truncation
from pagoda.engine.inputs.prompts import (
    Prompt,
    TokensPrompt,
    as_prompts,
    check_conversation,
    check_prompt,
    for_each,
    is_embeds,
    is_one_conversation,
)
from pagoda.engine.inputs.scoring import PairOptions, Scoring
from pagoda.engine.offline import (
    CallOptions,
    OfflineThread,
    OutputStream,
    generate_all,
    pool_all,
    prepared,
)
from pagoda.engine.offline_transcription import transcribe_all
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
from pagoda.engine.transcription.transcriber import (
    Transcriber,
    Transcription,
    TranscriptionFields,
    TranscriptionOptions,
)
from pagoda.vllm_names import missing_method

_METRICS: dict[str, tuple[str, Literal["gauge", "counter"]]] = {
    "num_requests_running": ("num_running", "gauge"),
    "num_requests_waiting": ("num_waiting", "gauge"),
    "num_requests_swapped": ("num_swapped", "gauge"),
    "kv_cache_usage_perc": ("kv_usage", "gauge"),
    "num_preemptions": ("preemptions", "counter"),
    "prefix_cache_queries": ("prefix_queries", "counter"),
    "prefix_cache_hits": ("prefix_hits", "counter"),
    "mm_cache_queries": ("encoder_queries", "counter"),
    "mm_cache_hits": ("encoder_hits", "counter"),
    "spec_decode_num_drafts": ("drafts", "counter"),
    "spec_decode_num_draft_tokens": ("drafted_tokens", "counter"),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "counter"),
}
"""Name without prefix -> field of SchedulerStats, and what it is."""


class LLM:
    """A loaded model. Thread-safe: requests of all threads run in one batch. `close` (or `with`) frees its memory.

    with LLM("smollm2-135m") as llm:
        for output in llm.generate(["The sky is", "Once upon a time"], SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)

    `generate` and `chat` return whole outputs, `stream` and `stream_chat` yield deltas; AsyncLLM has the same four.
    After `close`, in a forked child, and from a signal handler that interrupts one of its calls, every method raises
    UsageError.
    """

    @with_options_of(EngineArgs)
    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """Load a model.

        model: a catalog name, folder, .gguf file, hub id or `pypi:PACKAGE`; the default model when not given.
        options: the fields of EngineConfig's parts by name (`max_num_seqs=8, dtype="float32"`).
        Raises ConfigError for a model or an option that cannot be used, CapacityError when it does not fit.
        """
        self._begin(text_engine_builder(EngineConfig.for_engine(model=model, **options)))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs | EngineConfig) -> Self:
        """Load a model with the options of an `EngineArgs`. Raises as the constructor."""
        return cls.over(text_engine_builder(settings_of(engine_args)))

    @classmethod
    def over(cls, build: Callable[[], TextEngine]) -> Self:
        """Return an LLM over the engine that `build` returns, which is called on the thread that runs it."""
        llm = cls.__new__(cls)
        llm._begin(build)
        return llm

    def _begin(self, build: Callable[[], TextEngine]) -> None:
        self._thread = OfflineThread(build)
        self.llm_engine = self._thread.engine
        self._added: dict[int, Adapter] = {}  # by lora_int_id

    def get_tokenizer(self) -> CallersTokenizer:
        """Return the tokenizer with the names of transformers' (`tok(text).input_ids`, `apply_chat_template`)."""
        return CallersTokenizer(self.llm_engine.input_processor, self._thread.entered)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Remove all cached prefixes; False if running requests hold some, unless they are to be preempted."""
        return self._thread.call(lambda engine: engine.core.reset_prefix_cache(reset_running_requests))

    def get_metrics(self) -> list[Metric]:
        """Return the gauges and counters of the engine, by their Prometheus names."""
        stats = self._thread.call(lambda engine: engine.core.make_stats())
        return [Metric(f"vllm:{name}", float(getattr(stats, field)), kind) for name, (field, kind) in _METRICS.items()]

    @contextlib.contextmanager
    def trace(self, file: str | os.PathLike[str]) -> Generator[None]:
        """Write what the engine does during the block to a file, in Chrome's trace format, which Perfetto shows.

        with llm.trace("trace.json"):
            llm.generate(prompts)

        One track has the steps, each request has one with what it waits for and when it runs. Outside of such a block,
        nothing is recorded. Raises UsageError if a trace is made already, OSError if the file cannot be written.
        """
        end = self._thread.call(lambda engine: engine.begin_trace())
        try:
            yield
        finally:
            written = self._thread.call(lambda _: end())
            Path(file).write_bytes(msgspec.json.encode(written))

    def close(self) -> None:
        """Free the model's memory after the step in progress; calls of other threads raise UsageError. Idempotent."""
        self._thread.stop()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_method(type(self), name)

    # ---- whole outputs

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: AdapterChoice = None,
        priority: int | Sequence[int] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Return one finished output for each prompt, in their order.

        prompts: a string, token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}`, `{"prompt_embeds": ...}` (a numpy
            array or torch tensor [tokens, hidden size]; needs enable_prompt_embeds), or a list of those.
        sampling_params: for all prompts, or one for each; `get_default_sampling_params()` when not given.
        use_tqdm: show progress on a terminal when it takes long.
        priority: of all, or one for each; smaller is sooner.   cache_salt: prefixes and images in the cache are shared
            with requests of the same salt only.
        lora_request: the adapter of all prompts, or a list with one (or None) for each; needs enable_lora.

        Raises RequestError for arguments of the wrong kind. A prompt that cannot be served (empty, too long) raises
        RequestError or CapacityError if it is the only one; otherwise its output has `error` set and finish_reason
        "error", and the others are served. Ctrl-C aborts this call's requests; the LLM stays usable.
        """
        each = as_prompts(prompts)
        asks = CallOptions(priority, cache_salt, lora_request).of_each(
            each, self._params_of_each(sampling_params, len(each))
        )
        return generate_all(self._thread, asks, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: AdapterChoice = None,
        priority: int | Sequence[int] | None = None,
        *,
        cache_salt: str | None = None,
        **template_options: Unpack[ChatFields],
    ) -> list[RequestOutput]:
        """Return the assistant's next turn in a conversation, or in each of several; errors as in `generate`.

        The `message` of each output has the reasoning, the content and the tool calls of its text.

        messages: a list of objects with a role and content, or a list of such lists.
        template_options: the fields of ChatOptions by name (`chat_template`, `tools`, `add_generation_prompt`, ...).
        """
        each = [messages] if is_one_conversation(messages) else list(messages)
        for index, conversation in enumerate(each):
            check_conversation(conversation, index if len(each) > 1 else None)
        chosen = chat_options(template_options)
        params = list(self._params_of_each(sampling_params, len(each)))
        prompts: list[Prompt | RequestError] = []
        readers: dict[int, ChatAnswers] = {}
        for index, conversation in enumerate(each):
            try:
                prompt, readers[index] = self._render(conversation, chosen)  # type: ignore[arg-type]
            except RequestError as error:
                prompts.append(error)
            else:
                prompts.append(prompt)
                params[index] = readers[index].params(params[index])
        options = CallOptions(priority, cache_salt, lora_request)
        outputs = generate_all(self._thread, options.of_each(prompts, params), use_tqdm)
        for index, answers in readers.items():
            answers.read(outputs[index])
        return outputs

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what `generate` and `chat` use without sampling parameters: the model's own recommendation.

        It comes from the model's generation_config.json, its GGUF file or the catalog (see the setting
        generation_config).
        """
        return SamplingParams.of_model(self.llm_engine.input_processor.default_sampling)

    def _params_of_each(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        """Return the parameters of each prompt, copied: callers may change theirs while the prompts are read."""
        each = for_each(
            self.get_default_sampling_params() if given is None else given, count, SamplingParams, "sampling_params"
        )
        copies = {id(one): one.clone() for one in each}
        return [copies[id(one)] for one in each]

    def _render(self, messages: Sequence[Message], options: ChatOptions) -> tuple[TokensPrompt, ChatAnswers]:
        """Return the prompt that a conversation is, and what reads its answers."""
        chats = self.llm_engine.input_processor.chats
        with self._thread.entered():  # rendering takes a lock: a signal handler or a forked child must not wait for it
            rendered = chats.render(messages, options)
            answers = chats.answers_to(messages, options, rendered)
        return {**rendered.prompt, "prompt": rendered.text}, answers

    # ---- deltas

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> OutputStream:
        """Return an iterator over the deltas of one prompt's output. Leaving the iteration early aborts the request.

        Raises RequestError or CapacityError before the first delta.
        """
        return self._stream(prompt, sampling_params, CallOptions(priority, cache_salt, lora_request))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        **template_options: Unpack[ChatFields],
    ) -> OutputStream:
        """Like `stream`, for the assistant's next turn in a conversation; the last delta has its `message`."""
        check_conversation(messages, None)
        prompt, answers = self._render(messages, chat_options(template_options))
        return self._stream(prompt, sampling_params, CallOptions(priority, cache_salt, lora_request), answers)

    def _stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        options: CallOptions,
        answers: ChatAnswers | None = None,
    ) -> OutputStream:
        check_prompt(prompt, None)
        with self._thread.entered():
            params = sampling_params or self.get_default_sampling_params()
            if answers is not None and isinstance(params, SamplingParams):  # else it is refused
                params = answers.params(params)
            (ask,) = options.of_each([prompt], [params])
            return OutputStream(self._thread, prepared(self._thread, ask, OutputKind.DELTA), ask.lora_request, answers)

    # ---- beam search

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        lora_request: AdapterChoice = None,
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` best outputs of each prompt, best first, in the order of the prompts.

        prompts, use_tqdm, priority, cache_salt, lora_request, errors: as in `generate`.
        concurrency_limit: prompts in the engine at once; None: all.
        """
        sampling = beam_sampling(params, self.llm_engine.input_processor.limits.max_logprobs)
        if concurrency_limit is not None and (not isinstance(concurrency_limit, int) or concurrency_limit < 1):
            raise RequestError(f"concurrency_limit must be at least 1 (got {concurrency_limit!r:.80})", "params")
        each = as_prompts(prompts)
        asks = CallOptions(priority, cache_salt, lora_request).of_each(each, [sampling] * len(each))
        size = concurrency_limit or max(len(each), 1)
        outputs: list[RequestOutput] = []
        for begin in range(0, len(each), size):
            outputs += generate_all(self._thread, asks[begin : begin + size], use_tqdm)
        pairs = zip(outputs, each, strict=True)
        return [
            beams_of(output, self.llm_engine.input_processor.tokenizer, not is_embeds(prompt))
            for output, prompt in pairs
        ]

    # ---- speech

    def transcribe(
        self,
        sounds: Any,
        use_tqdm: bool = True,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        **options: Unpack[TranscriptionFields],
    ) -> list[TranscriptionOutput]:
        """Return the text of each sound, with times, in their order. Needs a Whisper model, and the extra "audio".

        sounds: a path, the bytes of a file, an array of samples (float, 16 kHz, mono, in [-1, 1]), or a list of those.
            Formats: wav, mp3, flac, ogg (Opus, Vorbis), m4a, mp4, webm. The files of a list run together.
        options: the fields of TranscriptionOptions by name (`language`, `task`, `prompt`, `temperature`,
            `cut_at_silences`, ...).   use_tqdm: show progress on a terminal.   priority, cache_salt: as in `generate`.
        Raises RequestError for an option of the wrong kind, and for the only sound if it cannot be transcribed; one of
        several has `error` set in its output then, and the others are transcribed.
        """
        inputs = self.llm_engine.input_processor
        with self._thread.entered():
            transcriber, chosen = Transcriber(inputs), TranscriptionOptions.of(options)
        each: list[Any] = list(sounds) if isinstance(sounds, list | tuple) else [sounds]
        names = [str(one) if isinstance(one, str | Path) else f"sounds[{at}]" for at, one in enumerate(each)]
        limits = inputs.limits.of_request

        def begin(at: int) -> Transcription:
            return transcriber.begin(load_sound(each[at], names[at], limits), chosen)

        begins = [partial(begin, at) for at in range(len(each))]
        return transcribe_all(self._thread, begins, names, use_tqdm, priority, cache_salt)

    # ---- LoRA adapters

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter now, so that the first request that uses it need not wait.

        Requests load the adapters that they need: this only moves the wait, and the errors, to now. Returns True.
        Raises RequestError for an adapter that cannot be used.
        """
        with self._thread.entered():
            lora = self.llm_engine.input_processor.find_adapter(lora_request)
            if isinstance(lora, LoraRef):  # the engine does not know of prompt adapters
                loaded = self._thread.call(lambda engine: engine.core.begin_load_adapter(lora))
                wait([loaded])
                self._thread.call(lambda engine: engine.core.end_load_adapter(lora, loaded))
            self._added[lora_request.lora_int_id] = lora
        return True

    def remove_lora(self, lora_int_id: int) -> bool:
        """Free the memory of an adapter that `add_lora` loaded, once no running request uses it.

        Return False if there is none with this number.
        """
        with self._thread.entered():
            lora = self._added.pop(lora_int_id, None)
            if isinstance(lora, LoraRef):
                self._thread.call(lambda engine: engine.core.unload_adapter(lora))
        return lora is not None

    # ---- pooling

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        lora_request: AdapterChoice = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return what the model makes of each prompt's hidden states, as arrays, in the order of the prompts.

        prompts: as in `generate`.   pooling_params: for all prompts, or one for each.
        pooling_task: "embed", "classify", "score", "token_embed" or "token_classify" (a vector, or the classes, of each
        token); None: what the model is for.
        truncate_prompt_tokens: see PoolingParams; replaces the value there.
        priority, cache_salt, lora_request: as in `generate`.
        Raises RequestError, which names the prompt, if one of them cannot be served or the model cannot do the task.
        """
        options = CallOptions(priority, cache_salt, lora_request)
        outputs = self._pool(prompts, pooling_params, pooling_task, truncate_prompt_tokens, use_tqdm, options)
        return [pooling_output(output) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        lora_request: AdapterChoice = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return the embedding of each prompt, in their order; arguments and errors as in `encode`.

        prompt_name: the model's instruction to put in front of each text, such as "query"; by default the one that the
        model's files name, if they do.
        """
        instruction = instruction_of(self.llm_engine.input_processor.limits.tasks.plan, prompt_name)
        options = CallOptions(priority, cache_salt, lora_request)
        outputs = self._pool(prompts, pooling_params, "embed", truncate_prompt_tokens, use_tqdm, options, instruction)
        return [embedding_output(output) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        lora_request: AdapterChoice = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the class probabilities of each prompt, in their order; arguments and errors as in `encode`."""
        options = CallOptions(priority, cache_salt, lora_request)
        outputs = self._pool(prompts, pooling_params, "classify", truncate_prompt_tokens, use_tqdm, options)
        return [classification_output(output) for output in outputs]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        instruction: str | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return how well each pair of texts matches: what a cross-encoder says, or the cosine of their embeddings.

        data_1: one text, paired with each of data_2, or as many as there are in data_2.   errors: as in `encode`.
        priority, cache_salt, lora_request: of all texts.
        chat_template: Jinja text that makes one prompt of a pair, from messages of the roles query and document.
        instruction: for templates that have a place for one.
        """
        first, second = texts_of("data_1", data_1), texts_of("data_2", data_2)
        params = with_truncation(pooling_params or PoolingParams(), truncate_prompt_tokens)
        with self._thread.entered():
            pairs = PairOptions(chat_template, instruction)
            scoring = Scoring(first, second, params, self.llm_engine.input_processor, options=pairs)
        asks = CallOptions(priority, cache_salt, lora_request).of_each(scoring.prompts, scoring.params)
        outputs = pool_all(self._thread, asks, use_tqdm)
        return scoring_outputs(scoring, outputs)

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: PoolingTask | None,
        truncate: int | None,
        use_tqdm: bool,
        options: CallOptions,
        instruction: str = "",
    ) -> list[RequestOutput]:
        each = as_prompts(prompts)
        given = for_each(params, len(each), PoolingParams, "pooling_params")
        each = [with_instruction(prompt, instruction) for prompt in each]
        asks = options.of_each(each, [with_truncation(with_task(one, task), truncate) for one in given])
        return pool_all(self._thread, asks, use_tqdm)
