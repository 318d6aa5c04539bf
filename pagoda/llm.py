"""LLM: a model in a Python program. Prompts go in, outputs come back in their order."""

import contextlib
import itertools
import logging
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from tqdm import tqdm

from pagoda.assemble import build_engine_core, resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.base.errors import CapacityError, RequestError
from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.chat_template import Message
from pagoda.engine.input_processor import Prompt, TokensPrompt, build_input_processor, text_of
from pagoda.engine.llm_engine import LLMEngine
from pagoda.engine.output_processor import OutputKind
from pagoda.engine.tokenizer import Tokenizer

logger = logging.getLogger("pagoda")

_BAR_DELAY_S = 1.0  # short work shows no bar


class LLM:
    """A loaded model. One thread at a time may use it; `close` (or `with`) gives its memory back.

    with LLM("smollm2-135m") as llm:
        for output in llm.generate(["The sky is", "Once upon a time"], SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """model: a catalog name, folder, .gguf file, hub id or `pypi:PACKAGE`; the default model when not given.

        options: the fields of EngineConfig's parts by name (`max_num_seqs=8, dtype="float32"`).
        Raises ConfigError for a model or an option that cannot be used, CapacityError when it does not fit.
        """
        if model is not None:
            options["model"] = model
        setup = resolve_engine(EngineConfig.from_options(**options))
        # The tokenizer first: what is wrong with it shows before the weights are read.
        inputs = build_input_processor(setup.config, setup.files, setup.spec.vocab_size, setup.max_model_len)
        self._begin(LLMEngine(build_engine_core(setup), inputs))

    @classmethod
    def over(cls, engine: LLMEngine) -> Self:
        """An LLM over an engine that was put together elsewhere."""
        llm = cls.__new__(cls)
        llm._begin(engine)
        return llm

    def _begin(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._numbers = itertools.count()
        self._mail: dict[str, deque[RequestOutput]] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.input_processor.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def close(self) -> None:
        """Give back the model's memory. Idempotent; nothing can be generated afterwards."""
        self.engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- batches

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One output for each prompt, in their order.

        prompts: text, token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}`, or a list of those.
        sampling_params: for all prompts, or one for each; SamplingParams() when not given.
        use_tqdm: show progress on a terminal when it takes long.   priority: one for each prompt, smaller is sooner.

        A prompt of a list that cannot be served has its output's `error` set and finish_reason "error"; the others are
        served. A single prompt raises RequestError or CapacityError. Ctrl-C ends all of them; the LLM stays usable.
        """
        if not isinstance(prompts, str | Mapping) and not hasattr(prompts, "__len__"):
            raise RequestError(f"prompts is {type(prompts).__name__}, expected a prompt or a list of them", "prompt")
        is_single = _is_one_prompt(prompts)
        each: list[Prompt] = [prompts] if is_single else list(prompts)  # type: ignore[list-item,arg-type]
        return self._generate(each, sampling_params, use_tqdm, priority, is_single)

    def _generate(
        self,
        each: Sequence[Prompt | RequestError],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        is_single: bool,
    ) -> list[RequestOutput]:
        """`generate` for a list, in which an error stands for a prompt that could not even be written."""
        params = _for_each(sampling_params, len(each))
        if priority is not None and len(priority) != len(each):
            raise RequestError(f"{len(priority)} priorities for {len(each)} prompts", "priority")
        outputs: dict[str, RequestOutput] = {}
        ids = [str(next(self._numbers)) for _ in each]
        live: set[str] = set()
        try:
            for index, (request_id, prompt) in enumerate(zip(ids, each, strict=True)):
                try:
                    if isinstance(prompt, RequestError):
                        raise prompt
                    own_priority = priority[index] if priority is not None else 0
                    self._add(request_id, prompt, params[index], OutputKind.FINAL_ONLY, own_priority)
                    live.add(request_id)
                except (RequestError, CapacityError) as error:
                    if is_single:
                        raise
                    logger.warning("prompt %d is not served: %s", index, error)
                    outputs[request_id] = _refused(request_id, prompt, error)
            self._run(live, outputs, use_tqdm)
        finally:
            self._drop(set(ids))
        return [outputs[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """The assistant's next turn in a conversation, or in each of several; as `generate` otherwise, errors included.

        template_options: chat_template, tools, add_generation_prompt, continue_final_message, template_kwargs (see
        InputProcessor.render_chat).
        """
        if isinstance(messages, str | bytes):
            raise RequestError("messages is text, expected a list of objects with a role and content", "messages")
        if _is_one_conversation(messages):
            return self.generate(self._render(messages, template_options), sampling_params, use_tqdm=use_tqdm)  # type: ignore[arg-type]
        prompts: list[Prompt | RequestError] = []
        for conversation in messages:
            try:
                prompts.append(self._render(conversation, template_options))  # type: ignore[arg-type]
            except RequestError as error:
                prompts.append(error)
        return self._generate(prompts, sampling_params, use_tqdm, None, is_single=False)

    def _render(self, messages: Sequence[Message], template_options: Mapping[str, Any]) -> TokensPrompt:
        rendered = self.engine.input_processor.render_chat(messages, **template_options)
        return {"prompt_token_ids": rendered.token_ids, "prompt": rendered.text}

    # ---- one at a time, as it comes

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Deltas of one prompt's output, as they come. Leaving the iteration early ends the request.

        Raises RequestError or CapacityError before the first delta.
        """
        request_id = str(next(self._numbers))
        self._add(request_id, prompt, sampling_params or SamplingParams(), OutputKind.DELTA, 0)
        return self._follow(request_id)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **template_options: Any
    ) -> Iterator[RequestOutput]:
        """As `stream`, for the assistant's next turn in a conversation."""
        return self.stream(self._render(messages, template_options), sampling_params)

    def _follow(self, request_id: str) -> Iterator[RequestOutput]:
        try:
            while True:
                mail = self._mail[request_id]
                while mail:
                    delta = mail.popleft()
                    yield delta
                    if delta.finished:
                        return
                self._step()
        finally:
            self._drop({request_id})

    # ---- the engine, one step at a time

    def _add(self, request_id: str, prompt: Prompt, params: SamplingParams, kind: OutputKind, priority: int) -> None:
        with _interrupt_afterwards():
            self.engine.add_request(request_id, prompt, params, kind, priority=priority)
            self._mail[request_id] = deque()

    def _run(self, live: set[str], outputs: dict[str, RequestOutput], use_tqdm: bool) -> None:
        """Step until all of `live` have ended; their outputs go into `outputs`."""
        disable = None if use_tqdm else True  # None: off when there is no terminal
        with tqdm(total=len(live), desc="Prompts", unit="prompt", disable=disable, delay=_BAR_DELAY_S) as bar:
            while live:
                for request_id in live.intersection(self._step()):
                    outputs[request_id] = self._mail.pop(request_id).popleft()
                    live.discard(request_id)
                    bar.update()

    def _step(self) -> list[str]:
        """One step of the engine; every output goes to whoever waits for it. Ctrl-C is answered behind the step.

        Returns the ids of the requests that have mail.
        """
        with _interrupt_afterwards():
            outputs = self.engine.step()
            for output in outputs:
                self._mail[output.request_id].append(output)
        return [output.request_id for output in outputs]

    def _drop(self, request_ids: set[str]) -> None:
        """End those that are still live and forget them."""
        self.engine.abort(list(request_ids))
        for request_id in request_ids:
            self._mail.pop(request_id, None)


@contextlib.contextmanager
def _interrupt_afterwards() -> Iterator[None]:
    """Holds Ctrl-C back until the block is left, so that no step is torn apart. The second one comes through at once.

    Only where Ctrl-C means KeyboardInterrupt, and on the main thread, which alone receives it.
    """
    default = signal.default_int_handler
    is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is default
    if not is_ours:
        yield
        return
    came: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(signal.SIGINT, default)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default)
    if came:
        raise KeyboardInterrupt


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Text, an object, or a flat list of numbers; an empty list is a batch of none."""
    if isinstance(prompts, str | Mapping):
        return True
    return (
        len(prompts) > 0 and not isinstance(prompts[0], str | Mapping | Sequence) and not hasattr(prompts[0], "__len__")
    )


def _is_one_conversation(messages: Sequence[Any]) -> bool:
    return len(messages) == 0 or isinstance(messages[0], Mapping)


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise RequestError(
            f"sampling_params is {type(params).__name__}, expected SamplingParams or a list of them", "sampling_params"
        )
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts", "sampling_params")
    return params


def _refused(request_id: str, prompt: Prompt | RequestError, error: Exception) -> RequestOutput:
    """The output of a prompt that never ran."""
    shown = None if isinstance(prompt, RequestError) else text_of(prompt)
    ending = CompletionOutput(index=0, finish_reason="error")
    return RequestOutput(request_id, shown, outputs=[ending], finished=True, error=str(error))
