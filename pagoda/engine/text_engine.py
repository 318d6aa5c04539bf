"""TextEngine: prompts in, texts out, one step at a time, on the caller's thread."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from pagoda.base.errors import RequestError, UsageError
from pagoda.base.outputs import RequestOutput
from pagoda.core.events import CacheEvent, Event
from pagoda.core.request import Request, RequestStatus
from pagoda.engine.chrome_trace import ChromeTrace
from pagoda.engine.engine_core import EngineCore
from pagoda.engine.inputs.input_processor import InputProcessor, RequestFields
from pagoda.engine.inputs.params_preparer import Params
from pagoda.engine.inputs.prompts import Prompt
from pagoda.engine.outputs.output_processor import OutputKind, OutputProcessor


class TextEngine:
    """An EngineCore with an input and an output processor. Nothing runs between calls of `step`."""

    def __init__(self, core: EngineCore, input_processor: InputProcessor) -> None:
        self.core = core
        self.input_processor = input_processor
        self._outputs = OutputProcessor(input_processor.tokenizer)
        self._is_traced = False

    def prepare(self, request_id: str, prompt: Prompt, params: Params, **fields: Unpack[RequestFields]) -> Request:
        """Tokenise and validate a prompt and its parameters. Raises RequestError. Thread-safe, unlike all else."""
        return self.input_processor.process(request_id, prompt, params, arrival_time_s=self.core.now(), **fields)

    def add(self, request: Request, kind: OutputKind, prompt: str | None = None) -> None:
        """Queue a prepared request. If it raises, nothing is queued: RequestError for an id in use, for example."""
        request_id = request.request_id
        if request_id in self._outputs:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        self._outputs.open(request, kind, prompt)
        try:
            self.core.add_request(request)
        except BaseException:  # leave no trace of a request that the engine did not accept
            self._outputs.close(request_id)
            raise

    def step(self) -> list[RequestOutput]:
        """Run one step; return its outputs, per request as its OutputKind says. Raises WorkerDied."""
        ready: list[RequestOutput] = []
        for outputs in self.core.step().values():
            done = self._outputs.process(outputs, self.core.now())
            if done.failed:
                self.core.abort([(0, handle) for handle in done.failed])
            for handle, sequence in done.stopped:
                self.core.finish_sequence((0, handle), sequence, RequestStatus.FINISHED_STOPPED)
            ready += done.outputs
        return ready

    def abort(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """Abort requests; return their last outputs, with finish_reason "abort". Ignore unknown ids."""
        self.core.abort([(0, handle) for handle in self._outputs.handles_of(request_ids)])
        return self._outputs.abort(request_ids, self.core.now())

    def begin_trace(self) -> Callable[[], dict[str, Any]]:
        """Record what the engine does from now on. Return what ends that, and returns the trace for JSON.

        Raises UsageError if a trace is made already.
        """
        if self._is_traced:
            raise UsageError("a trace of this engine is made already; begin another one when it has ended")
        self._is_traced = True
        core = self.core
        trace = ChromeTrace(core.now())
        for request in self._outputs.last_events():
            trace.begin_with(0, *request)

        def add(event: Event) -> None:
            if not isinstance(event, CacheEvent):
                trace.add(event)

        unsubscribe = core.subscribe(add)
        core.strip.on_step = trace.add_step

        def end() -> dict[str, Any]:
            unsubscribe()
            core.strip.on_step = None
            self._is_traced = False
            return trace.written(core.now())

        return end

    def get_num_unfinished_requests(self) -> int:
        return len(self._outputs)

    def has_unfinished_requests(self) -> bool:
        return len(self._outputs) > 0

    def shutdown(self) -> None:
        """Release the model and its memory. Idempotent."""
        self.core.shutdown()
