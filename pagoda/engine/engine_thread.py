"""EngineThread: run a TextEngine on a thread of its own, for all threads or tasks of a program.

Callers post commands: requests, aborts, adapters. The thread runs them between two steps, so that the requests of all
callers share one batch, and `step` passes on what each step puts out. Callers only wait. Everything that they share
with the thread is a SimpleQueue or a single dict operation: a signal handler, a finalizer or a fork may interrupt a
caller anywhere without leaving a lock behind.
"""

import contextlib
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from pagoda.base.errors import InvariantBroken, PagodaError, UsageError, WorkerDied, fresh
from pagoda.engine.text_engine import TextEngine

logger = logging.getLogger("pagoda.engine")

T = TypeVar("T")

Reply = Callable[[Any, BaseException | None], object]
"""Called on the engine's thread with a command's result, or with its error. Must not block."""

_EXIT_WAIT_S = 10.0  # how long the end of the program waits for the step in progress


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[TextEngine], object]
    reply: Reply


class EngineThread:
    """Thread-safe access to one TextEngine. The engine ends with `stop`, or when nothing refers to this object."""

    def __init__(
        self,
        build: Callable[[], TextEngine],
        on_ready: Reply,
        step: Callable[[TextEngine], object],
        on_end: Callable[[PagodaError], object],
        name: str,
    ) -> None:
        """Start the thread. What is given must not refer to this object; all is called on the thread.

        build: makes the engine there, because the thread settings of math libraries apply to the calling thread.
        on_ready: gets the engine, or the error of `build`.   step: runs a step, and passes on its outputs without
            blocking.   on_end: gets the error that says why there are no further outputs.
        name: what errors call the object that the caller uses.
        """
        self._runner = _Runner(step, on_end, name)
        self._name = name
        self._pid = os.getpid()
        self._is_stopped = False
        self._inside: set[int] = set()  # threads in a call
        # The thread refers to the runner only, so that this object can be dropped while it runs.
        self._thread = threading.Thread(
            target=self._runner.run, args=(build, on_ready), name="pagoda-engine", daemon=True
        )
        weakref.finalize(self, self._runner.commands.put, None)
        # A finalizer of its own, because the thread may still release the engine when this object is gone. Python runs
        # it at the program's end, for as long as the thread lives.
        weakref.finalize(self._thread, _await_end, weakref.ref(self._thread), self._runner.commands, self._pid)
        self._thread.start()

    # ---- callers

    def check_usable(self) -> None:
        """Raise UsageError if the engine is stopped or belongs to the parent of this process, or its own error."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"this {self._name} belongs to process {self._pid}, and this is a fork of it, without its threads; "
                f"make a new {self._name} in the child, or start the child with the spawn method"
            )
        if self._is_stopped:
            raise UsageError(f"this {self._name} is closed")
        if self._runner.error is not None:
            raise fresh(self._runner.error)

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """Mark the calling thread as being in a call, which may hold locks of tokenizers and templates.

        Raises UsageError if this thread is in one already (the caller is a signal handler); errors of `check_usable`.
        """
        self.check_usable()
        me = threading.get_ident()
        if me in self._inside:
            raise UsageError(
                f"this {self._name} is in use by the same thread: it cannot be called from a signal handler or a "
                "callback that interrupts one of its calls; set a flag there and call it afterwards"
            )
        try:
            self._inside.add(me)
            yield
        finally:
            self._inside.discard(me)

    def post(self, run: Callable[[TextEngine], object], reply: Reply) -> None:
        """Run a command between two steps and pass its result to `reply`; the engine's error if it has ended."""
        self._runner.commands.put(_Command(run, reply))
        if self._runner.error is not None:  # the thread may have ended before it could see the command
            self._runner.refuse_commands()

    def call(self, run: Callable[[TextEngine], T]) -> T:
        """Run a command between two steps and wait for its result. Raises its errors, and the engine's."""
        done: queue.SimpleQueue[tuple[T, BaseException | None]] = queue.SimpleQueue()
        self.post(run, lambda result, error: done.put((result, error)))
        return result_of(done.get())

    # ---- the end

    def stop(self) -> None:
        """End the engine after the step in progress, without waiting: callers get UsageError. Idempotent.

        In a forked child nothing ends: the engine is the parent's.
        """
        self._is_stopped = True
        if os.getpid() == self._pid:
            self._runner.commands.put(None)

    def join(self) -> None:
        """Wait until the engine has ended and released its memory.

        Does not wait in a forked child, and in a signal handler that interrupts a call: that may hold what the engine
        waits for.
        """
        if os.getpid() == self._pid and threading.get_ident() not in self._inside:
            self._thread.join()


class _Runner:
    """What the thread runs, and what callers share with it."""

    def __init__(
        self, step: Callable[[TextEngine], object], on_end: Callable[[PagodaError], object], name: str
    ) -> None:
        self.commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self.error: PagodaError | None = None  # why the engine has ended
        self._step, self._on_end = step, on_end
        self._name = name

    def run(self, build: Callable[[], TextEngine], on_ready: Reply) -> None:
        """Build the engine, and step it until it is stopped or fails."""
        try:
            engine = build()
        except BaseException as error:  # passed on to the caller
            self._end(UsageError(f"this {self._name} could not be loaded: {error}"))
            on_ready(None, error)
            return
        on_ready(engine, None)
        reason: PagodaError = UsageError(f"this {self._name} was closed while it generated")
        try:
            while self._run_commands(engine):
                self._step(engine)
        except Exception as error:
            reason = self._reason(error)
        finally:
            self._end(reason)
            engine.shutdown()

    def _run_commands(self, engine: TextEngine) -> bool:
        """Run all posted commands; wait for one if the engine is idle. Return False to stop."""
        commands = self.commands
        while not engine.core.has_unfinished_requests() or not commands.empty():
            command = commands.get()
            if command is None:
                return False
            try:
                result = command.run(engine)
            except Exception as error:
                command.reply(None, error)
                if isinstance(error, WorkerDied | InvariantBroken):
                    raise
            else:
                command.reply(result, None)
            del command  # its requests, while this waits for the next one
        return True

    def refuse_commands(self) -> None:
        """Reply to commands that will not run. Any thread may call this once the engine has ended."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self.commands.get_nowait()
                if command is not None and self.error is not None:
                    command.reply(None, fresh(self.error))

    def _end(self, error: PagodaError) -> None:
        self.error = error  # before the queue is emptied: see `post`
        self.refuse_commands()
        self._on_end(error)

    def _reason(self, error: Exception) -> PagodaError:
        """Return the error that callers get after `error` ended the engine."""
        if isinstance(error, PagodaError) and not isinstance(error, InvariantBroken):
            return fresh(error)  # without the engine's frames, which hold its memory
        logger.exception("the engine failed", exc_info=error)
        return WorkerDied(f"a step of this {self._name} failed: {type(error).__name__}: {error}; make a new one")


def _await_end(
    thread: "weakref.ref[threading.Thread]", commands: "queue.SimpleQueue[_Command | None]", pid: int
) -> None:
    """End the engine at the program's end and wait: a thread in native code must not outlive the interpreter."""
    running = thread()
    if running is not None and os.getpid() == pid:
        commands.put(None)
        running.join(_EXIT_WAIT_S)


def result_of(done: tuple[T, BaseException | None]) -> T:
    """Return the result of a command, or raise its error."""
    result, error = done
    if error is not None:
        raise error
    return result
