"""Offline generation, as LLM does it: run lists of prompts to their end, and iterate over the deltas of one."""

import itertools
import logging
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from pagoda.base.errors import CapacityError, InvariantBroken, PagodaError, RequestError, WorkerDied, fresh
from pagoda.base.lora import LoRARequest
from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import Request
from pagoda.engine.answers.chat_answers import ChatAnswers
from pagoda.engine.engine_thread import EngineThread, result_of
from pagoda.engine.inputs.adapters import AdapterChoice, adapter_for_each
from pagoda.engine.inputs.prompts import Prompt, for_each, text_of
from pagoda.engine.outputs.output_processor import OutputKind
from pagoda.engine.text_engine import TextEngine

logger = logging.getLogger("pagoda")

_BAR_DELAY_S = 1.0  # short work shows no bar


Mail = queue.SimpleQueue[list[RequestOutput] | PagodaError | None]
"""Where a caller gets the outputs of its requests, those of one step at a time, and the error that ended the engine."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A prepared request.   prompt: its text, if it has one, for its outputs."""

    request: Request
    kind: OutputKind
    prompt: str | None = None


class _Delivery:
    """Puts the outputs of each request into its caller's mail, on the engine's thread."""

    def __init__(self) -> None:
        self._mail: dict[str, Mail] = {}  # by request id

    def add(self, engine: TextEngine, mail: Mail, new: Sequence[NewRequest]) -> dict[str, Exception]:
        """Queue requests; return the errors of those that were refused, by id."""
        refused: dict[str, Exception] = {}
        for one in new:
            try:
                engine.add(one.request, one.kind, one.prompt)
            except (WorkerDied, InvariantBroken):
                raise
            except Exception as error:  # concerns this request only: the core has removed it
                refused[one.request.request_id] = error
            else:
                self._mail[one.request.request_id] = mail
        return refused

    def step(self, engine: TextEngine) -> None:
        self.deliver(engine.step())

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        by_mail: dict[Mail, list[RequestOutput]] = {}
        for output in outputs:
            request_id = output.request_id
            mail = self._mail.pop(request_id, None) if output.finished else self._mail.get(request_id)
            if mail is not None:
                by_mail.setdefault(mail, []).append(output)
        for mail, some in by_mail.items():
            mail.put(some)

    def end(self, error: PagodaError) -> None:
        for mail in set(self._mail.values()):
            mail.put(error)
        self._mail.clear()


class OfflineThread(EngineThread):
    """The thread of an LLM: its callers get finished texts, or deltas."""

    def __init__(self, build: Callable[[], TextEngine]) -> None:
        """Start the thread and wait for the engine. Raises what `build` raises."""
        delivery = self._delivery = _Delivery()
        self._ids = itertools.count()
        ready: queue.SimpleQueue[tuple[TextEngine, BaseException | None]] = queue.SimpleQueue()
        super().__init__(build, lambda engine, error: ready.put((engine, error)), delivery.step, delivery.end, "LLM")
        self.engine = result_of(ready.get())

    def new_id(self) -> str:
        """Return a request id that no other call of this method has returned."""
        return str(next(self._ids))

    def add(self, mail: Mail, new: Sequence[NewRequest]) -> dict[str, Exception]:
        """Queue requests, which share their first step; return why some were refused, by id."""
        delivery = self._delivery
        return self.call(lambda engine: delivery.add(engine, mail, new))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests after the step in progress, without waiting. Ignore unknown ids."""
        delivery, ids = self._delivery, list(request_ids)
        self.post(lambda engine: delivery.deliver(engine.abort(ids)), lambda *_: None)


class _Waiter:
    """Requests that one caller waits for.   live: ids of those whose last output it has not returned."""

    __slots__ = ("live", "mail")

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.live = set(request_ids)
        self.mail: Mail = queue.SimpleQueue()

    def next_outputs(self) -> list[RequestOutput]:
        """Wait for outputs and return them; an empty list if all requests have finished. Raises the engine's error."""
        if not self.live:
            return []
        outputs = self.mail.get()
        if outputs is None or isinstance(outputs, PagodaError):
            self.mail.put(outputs)  # another thread may wait for the same stream
            if outputs is not None:
                raise fresh(outputs)
            return []
        self.live.difference_update(output.request_id for output in outputs if output.finished)
        if not self.live:
            self.mail.put(None)
        return outputs


class OutputStream(Iterator[RequestOutput]):
    """The deltas of one request. `close`, or dropping the last reference, aborts the request."""

    def __init__(
        self,
        thread: OfflineThread,
        new: NewRequest,
        lora_request: LoRARequest | None = None,
        answers: ChatAnswers | None = None,
    ) -> None:
        """Queue the request. Raises RequestError or CapacityError if it is refused.

        lora_request: the adapter that the request uses; its outputs have it.   answers: reads the finished texts.
        """
        self._thread, self._answers = thread, answers
        self._lora_request = lora_request
        self._has_tokens = False
        self._waiter = _Waiter([new.request.request_id])
        for error in thread.add(self._waiter.mail, [new]).values():
            self._waiter.live.clear()
            raise error

    def __next__(self) -> RequestOutput:
        """Return the next delta.

        Raises RequestError if the engine ends the request before its first token, UsageError if the LLM was closed
        meanwhile, WorkerDied if its engine died.
        """
        with self._thread.entered():  # if it refuses, as in a signal handler, the interrupted call goes on
            try:
                outputs = self._waiter.next_outputs()
            except BaseException:
                self.close()
                raise
        if not outputs:
            raise StopIteration
        (output,) = outputs
        output.lora_request = self._lora_request
        if self._answers is not None:
            self._answers.read(output, is_delta=True)
        self._has_tokens = self._has_tokens or any(part.token_ids for part in output.outputs)
        if output.error is not None and not self._has_tokens:
            raise RequestError(output.error, "prompt")
        return output

    def close(self) -> None:
        """Abort the request if it is still running. Never blocks. Idempotent."""
        live, self._waiter.live = self._waiter.live, set()
        if live:
            self._thread.abort(live)

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class OfflinePrompt:
    """One prompt of a list, with its parameters.   prompt: or the reason why it could not be rendered."""

    prompt: Prompt | RequestError
    params: SamplingParams | PoolingParams
    priority: int = 0
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a call says about its requests: priorities and adapters are for all, or one for each."""

    priority: int | Sequence[int] | None = None
    cache_salt: str | None = None
    lora_request: AdapterChoice = None

    def of_each(
        self, prompts: Sequence[Prompt | RequestError], params: Sequence[SamplingParams] | Sequence[PoolingParams]
    ) -> list[OfflinePrompt]:
        """Return the prompts with their options. Raises RequestError for priorities or adapters of another number."""
        count = len(prompts)
        priorities = for_each(0 if self.priority is None else self.priority, count, int, "priority")
        adapters = adapter_for_each(self.lora_request, count)
        each = zip(prompts, params, priorities, adapters, strict=True)
        return [OfflinePrompt(prompt, one, first, self.cache_salt, lora) for prompt, one, first, lora in each]


_Refuse = Callable[[int, str, RequestError | CapacityError], RequestOutput]
"""Called with the index of a prompt that cannot be served, its request id and the reason; returns its output or raises
an error, which ends all requests of the list."""


def generate_all(thread: OfflineThread, asks: Sequence[OfflinePrompt], use_tqdm: bool) -> list[RequestOutput]:
    """Return an output for each prompt, in their order; that of a prompt that cannot be served has `error` set.

    Raises RequestError or CapacityError if that is the only prompt.
    """

    def refuse(index: int, request_id: str, error: RequestError | CapacityError) -> RequestOutput:
        if len(asks) == 1:
            raise error
        logger.warning("prompt %d is not served: %s", index, error)
        prompt = asks[index].prompt
        shown = None if isinstance(prompt, RequestError) else text_of(prompt)
        ending = CompletionOutput(index=0, finish_reason="error")
        return RequestOutput(request_id, shown, outputs=[ending], finished=True, error=str(error))

    with thread.entered():
        outputs = _run(thread, asks, use_tqdm, refuse)
    if len(outputs) == 1 and outputs[0].error is not None and not any(o.token_ids for o in outputs[0].outputs):
        raise RequestError(outputs[0].error, "prompt")
    return outputs


def pool_all(thread: OfflineThread, asks: Sequence[OfflinePrompt], use_tqdm: bool) -> list[RequestOutput]:
    """Return an output for each prompt, all or none. Raises RequestError for the first that cannot be served."""

    def refuse(index: int, request_id: str, error: RequestError | CapacityError) -> RequestOutput:
        if not isinstance(error, RequestError) or len(asks) == 1:
            raise error
        raise RequestError(f"prompts[{index}]: {error}", error.param) from None

    prompts = [ask.prompt for ask in asks if not isinstance(ask.prompt, RequestError)]
    assert len(prompts) == len(asks), "prompts to pool are not rendered"
    with thread.entered():
        encoded = thread.engine.input_processor.tokenized(prompts, [ask.params for ask in asks])
        with_tokens = [replace(ask, prompt=prompt) for ask, prompt in zip(asks, encoded, strict=True)]
        return _run(thread, with_tokens, use_tqdm, refuse)


def _run(thread: OfflineThread, asks: Sequence[OfflinePrompt], use_tqdm: bool, refuse: _Refuse) -> list[RequestOutput]:
    """Run all prompts in one batch with those of other threads' calls."""
    index_of = {thread.new_id(): index for index in range(len(asks))}
    outputs: dict[str, RequestOutput] = {}
    new: list[NewRequest] = []
    for request_id, index in index_of.items():
        try:
            new.append(_prepare(thread.engine, request_id, asks[index], OutputKind.FINAL_ONLY))
        except (RequestError, CapacityError) as error:
            outputs[request_id] = refuse(index, request_id, error)
    waiter = _Waiter(one.request.request_id for one in new)
    try:
        for request_id, error in thread.add(waiter.mail, new).items() if new else ():
            waiter.live.discard(request_id)
            if not isinstance(error, RequestError | CapacityError):
                raise error
            outputs[request_id] = refuse(index_of[request_id], request_id, error)
        _collect(waiter, outputs, use_tqdm)
    finally:
        if waiter.live:
            thread.abort(waiter.live)
    results = [outputs[request_id] for request_id in index_of]
    for output, ask in zip(results, asks, strict=True):
        output.lora_request = ask.lora_request
    return results


def prepared(thread: OfflineThread, ask: OfflinePrompt, kind: OutputKind) -> NewRequest:
    """Return the request of a prompt, under an id of its own. Raises RequestError."""
    return _prepare(thread.engine, thread.new_id(), ask, kind)


def _prepare(engine: TextEngine, request_id: str, ask: OfflinePrompt, kind: OutputKind) -> NewRequest:
    if isinstance(ask.prompt, RequestError):
        raise ask.prompt
    lora = engine.input_processor.find_adapter(ask.lora_request) if ask.lora_request is not None else None
    request = engine.prepare(
        request_id, ask.prompt, ask.params, priority=ask.priority, cache_salt=ask.cache_salt, lora=lora
    )
    return NewRequest(request, kind, text_of(ask.prompt))


def _collect(waiter: _Waiter, outputs: dict[str, RequestOutput], use_tqdm: bool) -> None:
    """Wait until all requests have finished; store their outputs in `outputs`."""
    disable = None if use_tqdm else True  # None: off when there is no terminal
    with tqdm(total=len(waiter.live), desc="Prompts", unit="prompt", disable=disable, delay=_BAR_DELAY_S) as bar:
        while some := waiter.next_outputs():
            outputs.update((output.request_id, output) for output in some)
            bar.update(len(some))
