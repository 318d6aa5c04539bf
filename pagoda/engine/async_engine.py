"""AsyncEngine: run requests as async iterators over an engine core in any process or thread."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from pagoda.base.abbreviate import shown_id
from pagoda.base.clock import SystemClock
from pagoda.base.errors import PagodaError, RequestError, WorkerDied, fresh
from pagoda.base.outputs import RequestOutput
from pagoda.core.events import ClientEvent
from pagoda.core.request import LoraRef, Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine.async_text import AsyncText
from pagoda.engine.inputs.adapters import Adapter, AdapterUses
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.outputs.mailbox import Mailbox
from pagoda.engine.outputs.output_processor import PROMPT_LOGPROBS, OutputKind, OutputProcessor, PromptLogprobs
from pagoda.engine.outputs.split_outputs import split_outputs
from pagoda.engine.transcription.piece import Job, Question

logger = logging.getLogger("pagoda")

_LOGPROBS_AT_ONCE = 2048
"""So many log-probabilities are turned into objects per turn of the event loop: about 2 ms."""


class EngineCoreClient(Protocol):
    """The way to one engine core that has started, in any process. One event loop calls it, which it does not block."""

    def add_request(self, request: Request) -> None:
        """Queue a request; its outputs, or its rejection, are returned by next_outputs."""
        ...

    def abort(self, handles: Sequence[int]) -> None:
        """Abort requests; ignore unknown ones. The only further output of an aborted request is its Ended event."""
        ...

    def finish_sequence(self, handle: int, sequence: int, status: RequestStatus) -> None:
        """Finish one sequence (a stop string was found); the request's other sequences continue."""
        ...

    async def next_outputs(self) -> EngineCoreOutputs:
        """Return the next step's outputs, to a single consumer. Raises the error that ended the engine for good."""
        ...

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool: ...

    async def load_adapter(self, lora: LoraRef) -> None:
        """Load a LoRA adapter. Raises RequestError if it cannot be used, WorkerDied if the engine dies meanwhile."""
        ...

    def unload_adapter(self, lora: LoraRef) -> None:
        """Free an adapter's memory once no running request uses it. Ignore one that is not loaded."""
        ...

    async def shutdown(self) -> None: ...


class AsyncEngine:
    """Prompts in, texts out, for one event loop. The server is built on it."""

    def __init__(self, client: EngineCoreClient, input_processor: InputProcessor) -> None:
        """client: already started; `shutdown` shuts it down."""
        self.input_processor = input_processor
        self.text = AsyncText(input_processor)
        self._client = client
        self._clock = SystemClock()
        self._outputs = OutputProcessor(input_processor.tokenizer, is_lazy=True)
        self._readers: dict[str, Mailbox] = {}
        self._adapter_uses = AdapterUses()
        self.on_event: Callable[[ClientEvent], object] = lambda _: None
        """Called with what happens to the requests, in order."""
        self._pump: asyncio.Task[None] | None = None
        self._died: PagodaError | None = None
        self._has_died = asyncio.Event()
        self._conversion = asyncio.Lock()  # held for a turn of the event loop, see _with_prompt_logprobs

    async def shutdown(self, error: PagodaError | None = None) -> None:
        """Shut down the engine; abort running requests. Idempotent.   error: what they raise instead of an output."""
        if error is not None and self._died is None:
            self._fail_all(error)
        self._deliver(self._outputs.abort(self._outputs.live_ids, self._clock.now()))
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
            self._pump = None
        self.text.close()
        await self._client.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    def now(self) -> float:
        """Return the time on the engine's clock, in seconds, as requests have it."""
        return self._clock.now()

    # ---- requests

    def run_job(
        self,
        job: Job,
        new_id: Callable[[], str],
        cache_salt: str | None = None,
        observed: Callable[
            [Request, AsyncGenerator[RequestOutput, None]], AsyncGenerator[RequestOutput, None]
        ] = lambda _, outputs: outputs,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a job of a transcription, as many of its requests at once as sequences run; see AsyncText.run_job.

        new_id: returns the id for a request.   cache_salt: encoder outputs are shared with requests of the same salt
        only.   observed: passes on the outputs of a request.
        Raises RequestError and WorkerDied.
        """

        def ask(question: Question) -> AsyncGenerator[RequestOutput, None]:
            request = self.input_processor.make_request(
                new_id(),
                question.prompt,
                question.params,
                arrival_time_s=self._clock.now(),
                priority=priority,
                cache_salt=cache_salt,
            )
            return observed(request, self.stream(request, OutputKind.FINAL_ONLY))

        return self.text.run_job(job, ask)

    async def stream(
        self, request: Request, kind: OutputKind = OutputKind.DELTA, prompt: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a prepared request's output as it grows; the last one has `finished` set.

        Close the iterator (or leave it under contextlib.aclosing) to abort the request. Raises the error that ended the
        engine for good. If the engine ends the request with an error, the last output has `error` set.
        """
        if self._died is not None:
            raise fresh(self._died)
        request_id = request.request_id
        if request_id in self._outputs:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        if request.lora is not None:
            self._adapter_uses.begin(request.lora)
        mailbox = Mailbox(kind)
        try:
            self._readers[request_id] = mailbox
            prompt_logprobs = self._outputs.open(request, kind, prompt, self._clock.now())
            if self._pump is None:
                self._pump = asyncio.create_task(self._pump_outputs())
            self._client.add_request(request)
            while True:
                output = await mailbox.get()
                if prompt_logprobs is not None:
                    output = await self._with_prompt_logprobs(output, prompt_logprobs)
                yield output
                if output.finished:
                    return
        finally:
            if self._readers.get(request_id) is mailbox:  # the id may be a later request's
                del self._readers[request_id]
                if request_id in self._outputs:
                    self._outputs.close(request_id)
                    self._client.abort([request.handle])
            if request.lora is not None and (unused := self._adapter_uses.end(request.lora)) is not None:
                self._client.unload_adapter(unused)

    async def _with_prompt_logprobs(self, output: RequestOutput, prompt_logprobs: PromptLogprobs) -> RequestOutput:
        """Return the output when all log-probabilities of its prompt have been converted.

        This is done here, in the reader's task and in pieces, so that it delays no other request: one piece per turn of
        the event loop, however many requests there are. If it fails, the request ends with an error.
        """
        try:
            while prompt_logprobs.has_more:
                async with self._conversion:
                    prompt_logprobs.convert_some()
                    await asyncio.sleep(0)
        except Exception as error:  # concerns this request only
            logger.exception("%s of request %s could not be processed", PROMPT_LOGPROBS, shown_id(output.request_id))
            said = f"{PROMPT_LOGPROBS} could not be processed: {type(error).__name__}: {error}"
            parts = [dataclasses.replace(part, finish_reason="error") for part in output.outputs]
            return dataclasses.replace(output, outputs=parts, finished=True, error=said)
        return output

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Abort requests and return the ids that were running. Each gets a last output with finish_reason "abort"."""
        live = [request_id for request_id in request_ids if request_id in self._outputs]
        self._client.abort(self._outputs.handles_of(live))
        self._deliver(self._outputs.abort(live, self._clock.now()))
        return live

    def fail_running(self, error: Exception) -> None:
        """Fail every running request: its reader gets the pending output, then `error`."""
        for mailbox in self._readers.values():
            mailbox.fail(error)

    async def _pump_outputs(self) -> None:
        """Deliver outputs from the engine to the readers until the engine dies."""
        try:
            while True:
                try:
                    outputs = await self._client.next_outputs()
                except PagodaError as error:
                    self._fail_all(error)
                    return
                for event in outputs.events:
                    self.on_event(event)
                for part in split_outputs(outputs, _LOGPROBS_AT_ONCE):
                    done = self._outputs.process(part, self._clock.now())
                    if done.failed:
                        self._client.abort(done.failed)
                    for handle, sequence in done.stopped:
                        self._client.finish_sequence(handle, sequence, RequestStatus.FINISHED_STOPPED)
                    self._deliver(done.outputs)
                    # The outputs of more steps may be ready: others get their turn between them.
                    await asyncio.sleep(0)
        except Exception as error:  # if this task ended silently, readers would wait forever
            logger.exception("failed to process the engine's outputs")
            self._fail_all(WorkerDied(f"internal error in the client: {type(error).__name__}: {error}"))

    def _fail_all(self, error: PagodaError) -> None:
        self._died = error
        self._has_died.set()
        for request_id in self._outputs.live_ids:
            self._outputs.close(request_id)
        for mailbox in self._readers.values():
            mailbox.fail(error)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            mailbox = self._readers.get(output.request_id)
            if mailbox is not None:
                mailbox.put(output)
                if output.finished:
                    del self._readers[output.request_id]

    # ---- the engine

    @property
    def died(self) -> PagodaError | None:
        """Return the error that ended the engine, or None while it can serve requests."""
        return self._died

    def revive(self) -> None:
        """Serve requests again: the client, whose engine had died or could not be read, has been started again."""
        if self._died is not None:
            self._died, self._pump = None, None
            self._has_died.clear()

    async def wait_until_dead(self) -> None:
        """Wait until no request can be served any more (see `died`)."""
        await self._has_died.wait()

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Empty the prefix cache. Return False if blocks are in use and preempt_running is False."""
        return await self._client.reset_prefix_cache(preempt_running)

    # ---- LoRA adapters

    async def load_adapter(self, lora: Adapter) -> None:
        """Load an adapter, so that the first request that uses it need not wait.

        Raises RequestError if it cannot be used, WorkerDied if the engine dies meanwhile.
        """
        if isinstance(lora, LoraRef):  # the engine does not know of prompt adapters
            self._adapter_uses.keep(lora)
            await self._client.load_adapter(lora)

    def unload_adapter(self, lora: Adapter) -> None:
        """Free an adapter's memory after the last request that uses it has ended."""
        unused = self._adapter_uses.unload(lora) if isinstance(lora, LoraRef) else None
        if unused is not None:
            self._client.unload_adapter(unused)
