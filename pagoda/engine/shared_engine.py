"""SharedEngine: share an LLMEngine between threads. One thread steps it for all of them, the others wait.

The engine itself is not thread-safe, so every access holds one lock. A call that waits for outputs drives the engine if
no other call does: it delivers each step's outputs to the calls that own them, and hands over to another call when its
own output is there. The requests of all threads are therefore batched together.
"""

import contextlib
import itertools
import os
import queue
import threading
from collections import deque
from collections.abc import Generator

from pagoda.base.errors import PagodaError, UsageError, WorkerDied
from pagoda.base.lora import LoRARequest
from pagoda.base.outputs import RequestOutput
from pagoda.core.request import LoraRef
from pagoda.engine.inputs.adapters import Adapter
from pagoda.engine.inputs.params_preparer import Params
from pagoda.engine.inputs.prompts import Prompt
from pagoda.engine.llm_engine import LLMEngine
from pagoda.engine.outputs.output_processor import OutputKind
from pagoda.engine.signal_errors import raised_afterwards

_RETRY_S = 1.0  # waiting calls check this often that a call drives, in case an exception lost a nudge


class _Nudge:
    """A message to a waiting call: no call drives the engine."""


_NUDGE = _Nudge()


class Call:
    """Requests that one caller waits for.   live: ids of unfinished requests.   mail: their undelivered outputs."""

    __slots__ = ("live", "mail")

    def __init__(self) -> None:
        self.live: set[str] = set()
        # SimpleQueue's methods are atomic and reentrant: signal handlers and finalizers may interrupt them.
        self.mail: queue.SimpleQueue[RequestOutput | PagodaError | _Nudge] = queue.SimpleQueue()


class SharedEngine:
    """Thread-safe access to one engine. Never blocks a signal handler, a finalizer or a forked child."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._pid = os.getpid()
        self._ids = itertools.count()
        self._inside: set[int] = set()  # threads in a call
        self._owners: dict[str, Call] = {}  # by request id
        self._waiting: dict[object, Call] = {}
        self._wheel: dict[str, object] = {}  # "driver" -> the driving call; dict operations are atomic
        # A command locks the turnstile, then the engine. The driver passes the turnstile before each step, so commands
        # run between two steps; with a single lock, the driver would take it again at once.
        self._turnstile = threading.Lock()
        self._held = threading.Lock()
        self._abandoned: deque[str] = deque()  # ids to abort when the engine is free
        self._closed = False
        self._is_shut_down = False
        self._failure: PagodaError | None = None

    # ---- calls

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """Mark the calling thread as being in a call.

        Raises UsageError if the engine is closed, belongs to the parent of this process, or is already in use by this
        thread (the caller is a signal handler). Raises the engine's own error if it has failed.
        """
        self._check_usable()
        me = threading.get_ident()
        if me in self._inside:
            raise UsageError(
                "this LLM is in use by the same thread: it cannot be called from a signal handler or a callback that "
                "interrupts one of its calls; set a flag there and call it afterwards"
            )
        try:
            self._inside.add(me)
            yield
        finally:
            self._inside.discard(me)
            if self._closed and not self._is_shut_down:  # closed by a signal handler that interrupted this call
                self._shut_down()

    def new_id(self) -> str:
        """Return a request id that no other request has."""
        return str(next(self._ids))

    def find_adapter(self, given: LoRARequest | None) -> Adapter | None:
        """Return the adapter that a caller names, if any. Raises RequestError if it cannot be used."""
        return None if given is None else self.engine.input_processor.find_adapter(given)

    def add(
        self,
        call: Call,
        request_id: str,
        prompt: Prompt,
        params: Params,
        kind: OutputKind,
        priority: int = 0,
        lora: Adapter | None = None,
    ) -> None:
        """Queue a request whose outputs go to `call`. If it raises RequestError or CapacityError, nothing is queued."""
        prompt = self._tokenized(prompt, params)
        with self._commanding():
            self._owners[request_id] = call
            call.live.add(request_id)
            try:
                self.engine.add_request(request_id, prompt, params, kind, priority=priority, lora=lora)
            except BaseException:
                self._forget(call, request_id)
                raise

    def load_adapter(self, lora: Adapter) -> None:
        """Load a LoRA adapter between two steps. Raises RequestError if it cannot be used."""
        if isinstance(lora, LoraRef):  # the engine does not know of prompt adapters
            with self._commanding():
                self.engine.core.load_adapter(lora)

    def unload_adapter(self, lora: Adapter) -> None:
        """Free an adapter's memory once no running request uses it."""
        if isinstance(lora, LoraRef):
            with self._commanding():
                self.engine.core.unload_adapter(lora)

    def next_output(self, call: Call) -> RequestOutput | None:
        """Return the next output of the call's requests, stepping the engine or waiting; None if all have finished.

        Raises UsageError if the engine is closed meanwhile, WorkerDied if it ends.
        """
        while call.live or not call.mail.empty():
            try:
                item = call.mail.get_nowait()
            except queue.Empty:
                item = self._wait(call)
            if isinstance(item, PagodaError):
                raise item
            if isinstance(item, RequestOutput):
                return item
        return None

    def drop(self, call: Call) -> None:
        """Abort the call's unfinished requests."""
        with raised_afterwards():
            live = [request_id for request_id in list(call.live) if self._forget(call, request_id)]
            if live and self._is_usable():
                with self._commanding():
                    self.engine.abort(live)

    def abandon(self, call: Call) -> None:
        """Like `drop`, for finalizers: never blocks. If the engine is busy, the next step aborts the requests."""
        with raised_afterwards():
            self._abandoned.extend([request_id for request_id in list(call.live) if self._forget(call, request_id)])
            if self._is_usable() and self._held.acquire(blocking=False):
                try:
                    self._abort_abandoned()
                finally:
                    self._held.release()

    def close(self) -> None:
        """Shut down the engine after the current step; calls in other threads raise UsageError. Idempotent.

        From a signal handler that interrupts a call, the engine is released when that call ends. In a forked child
        nothing is released: the engine is the parent's.
        """
        self._closed = True
        if os.getpid() == self._pid and threading.get_ident() not in self._inside:
            self._shut_down()

    # ---- inside

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"this LLM belongs to process {self._pid}, and this is a fork of it, without its threads; "
                "make a new LLM in the child, or start the child with the spawn method"
            )
        if self._closed:
            raise UsageError("this LLM is closed")
        if self._failure is not None:
            raise self._failure

    def _is_usable(self) -> bool:
        return not self._closed and self._failure is None and os.getpid() == self._pid

    def _tokenized(self, prompt: Prompt, params: Params) -> Prompt:
        """Tokenise a text before locking the engine if other calls are running, so that their steps continue."""
        if isinstance(prompt, str) and len(self._inside) > 1:
            inputs = self.engine.input_processor
            token_ids = inputs.prompts.token_ids_of(prompt, keep=inputs.num_kept(params))
            return {"prompt": prompt, "prompt_token_ids": list(token_ids)}
        return prompt

    @contextlib.contextmanager
    def _commanding(self) -> Generator[None]:
        """Lock the engine between two steps."""
        with raised_afterwards(), self._turnstile, self._held:
            self._check_usable()
            self._abort_abandoned()
            yield

    def _wait(self, call: Call) -> "RequestOutput | PagodaError | _Nudge":
        """Drive the engine until the call has mail; if another call drives, wait for it to deliver."""
        me = object()
        try:
            self._waiting[me] = call
            if self._wheel.setdefault("driver", me) is not me:
                return call.mail.get(timeout=_RETRY_S)
            while call.live and call.mail.empty():
                self._step()
            return call.mail.get_nowait()
        except queue.Empty:
            return _NUDGE
        finally:
            if self._wheel.get("driver") is me:
                del self._wheel["driver"]
            self._waiting.pop(me, None)
            # Also if this call did not drive: it may have received the nudge and ended without driving.
            if not self._wheel and self._waiting:
                for other in list(self._waiting.values())[:1]:
                    other.mail.put(_NUDGE)

    def _step(self) -> None:
        """Run one step and deliver its outputs. What a signal handler raises, it raises after the step."""
        with raised_afterwards():
            with self._turnstile:
                pass
            with self._held:
                if self._closed or self._failure is not None:
                    self._end_calls(self._failure or UsageError("this LLM was closed while it generated"))
                    return
                try:
                    self._abort_abandoned()
                    outputs = self.engine.step()
                except BaseException as error:
                    self._fail(error)
                    raise
                for output in outputs:
                    call = self._owners.get(output.request_id)
                    if call is not None:
                        call.mail.put(output)
                        if output.finished:
                            self._forget(call, output.request_id)

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            self.engine.abort([self._abandoned.popleft()])

    def _forget(self, call: Call, request_id: str) -> bool:
        call.live.discard(request_id)
        return self._owners.pop(request_id, None) is not None

    def _fail(self, error: BaseException) -> None:
        """Fail all calls: an interrupted step leaves the engine in an unknown state."""
        if isinstance(error, PagodaError):
            self._failure = error
        elif isinstance(error, Exception):
            self._failure = WorkerDied(f"a step of this LLM failed: {type(error).__name__}: {error}; make a new LLM")
        else:
            self._failure = UsageError(f"a step of this LLM was interrupted by {type(error).__name__}; make a new LLM")
        self._end_calls(self._failure)

    def _end_calls(self, error: PagodaError) -> None:
        calls = set(self._owners.values())
        self._owners.clear()
        for call in calls:
            call.mail.put(error)
            call.live.clear()

    def _shut_down(self) -> None:
        with raised_afterwards(), self._turnstile, self._held:
            if not self._is_shut_down:
                self._is_shut_down = True
                self._end_calls(UsageError("this LLM was closed while it generated"))
                self.engine.shutdown()
