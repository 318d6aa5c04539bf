"""TemplateProcess: render chat templates in another process, which is killed at the deadline."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass

from pagoda.base.child_signals import signals_blocked
from pagoda.base.errors import ConfigError, RequestError
from pagoda.engine.templates.job import InProcessRenderer, TemplateJob
from pagoda.engine.templates.worker import (
    CANNOT_READ,
    NOT_A_TEMPLATE,
    NUM_KEPT,
    READY,
    RENDERED,
    REPLY,
    REQUEST,
    receive_exactly,
)

_START_S = 30.0  # for starting a process: imports can be slow on a busy machine, and do not count for the template


class ForeignValues(Exception):
    """The values cannot be sent to another process: they contain objects of a caller's own classes."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """timeout_s: for rendering one conversation.   memory_bytes: for the template while it renders."""

    timeout_s: float = 10.0
    memory_bytes: int = 512 * 2**20


class TemplateProcess:
    """One worker process, started on first use and after a kill. Thread-safe; runs one job at a time.

    niceness: added to the process's nice value.
    """

    def __init__(self, limits: TemplateLimits, niceness: int = 0) -> None:
        self._limits = limits
        self._niceness = niceness
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._job: TemplateJob | None = None
        self._cancelled: TemplateJob | None = None

    def render(self, job: TemplateJob) -> str:
        """Return the prompt. Raises RequestError, ForeignValues, or ConfigError for a template that is not Jinja."""
        with self._lock:
            self._job = job
            try:
                try:
                    return self._try(job)
                except (EOFError, ConnectionError):
                    # Something else may have killed the process, before or after it got the job.
                    return self._try(job)
            except TimeoutError:
                said = f"the chat template was stopped after {self._limits.timeout_s:g} s: it did not finish"
                raise RequestError(said, _culprit(job)) from None
            except (EOFError, ConnectionError):
                raise RequestError("the chat template crashed the process that rendered it", _culprit(job)) from None
            finally:
                self._job = self._cancelled = None

    def _try(self, job: TemplateJob) -> str:
        """Like `render`, once. Raises TimeoutError, EOFError or ConnectionError if the process is no longer usable."""
        worker = self._running()
        if self._cancelled is job:  # checked last: from here on, `cancel` kills this worker
            raise RequestError("the rendering was cancelled", _culprit(job))
        try:
            return worker.exchange(worker.pickle(job), self._limits.timeout_s)
        except (TimeoutError, EOFError, ConnectionError):
            worker.has_ended = True
            raise
        finally:
            if worker.has_ended:
                self._end()

    def cancel(self, job: TemplateJob) -> None:
        """Kill the process if it is rendering this job; `render` then raises. Thread-safe."""
        self._cancelled = job
        worker = self._worker
        if self._job is job and worker is not None:
            worker.process.kill()

    def start(self) -> None:
        """Start the process now, so that the first job does not wait for it."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """Kill the process, even during a job. Idempotent; another job starts a new one."""
        worker = self._worker
        if worker is not None:
            worker.process.kill()
        with self._lock:
            self._end()

    def _running(self) -> "_Worker":
        if self._worker is not None and not self._worker.is_usable():
            self._end()
        if self._worker is None:
            self._worker = _Worker(self._limits.memory_bytes, self._niceness)
        return self._worker

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()


class ProtectedRenderer:
    """A Renderer with one worker process, for programs that render one conversation at a time.

    Values that cannot be sent to it (objects of a caller's own classes) are rendered in this process, unprotected.
    """

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self._process = TemplateProcess(limits or TemplateLimits())
        self._here = InProcessRenderer()

    def render(self, job: TemplateJob) -> str:
        """Return the prompt. Raises RequestError, or ConfigError for a template that is not valid Jinja."""
        try:
            return self._process.render(job)
        except (ForeignValues, OSError):  # OSError: the process could not be started
            return self._here.render(job)

    def close(self) -> None:
        self._process.close()


class _Worker:
    """A running worker process.   has_ended: it exits, by its last reply or because it failed."""

    def __init__(self, memory_bytes: int, niceness: int) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs, signals_blocked(signal.SIGINT):  # Ctrl-C is for the parent
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pagoda.engine.templates.worker"),
                    *(str(memory_bytes), str(niceness), str(os.getpid())),
                ],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )
        self._owner = os.getpid()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._is_new = True
        self.has_ended = False
        self._finalizer = weakref.finalize(self, _kill, self.process, self._connection, self._owner)

    def is_usable(self) -> bool:
        """Return False if the process has exited, or if this is a fork of the process that started it."""
        return os.getpid() == self._owner and self.process.poll() is None

    def pickle(self, job: TemplateJob) -> bytes:
        key = job.source.key
        try:
            data = pickle.dumps((key, None if key in self._known else job.source, job.values()), 5)
        except RecursionError:
            raise RequestError("the messages are nested too deeply for a chat template", "messages") from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ForeignValues(str(error)) from None
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > NUM_KEPT:
            self._known.popitem(last=False)
        return data

    def exchange(self, data: bytes, timeout_s: float) -> str:
        """Send a job, return the prompt. Raises TimeoutError, EOFError or ConnectionError if the worker is unusable."""
        if self._is_new:
            self._receive(len(READY), time.monotonic() + _START_S)
            self._is_new = False
        until_s = time.monotonic() + timeout_s
        self._send(REQUEST.pack(timeout_s, len(data)) + data, until_s)
        outcome, self.has_ended, size = REPLY.unpack(self._receive(REPLY.size, until_s))
        text = self._receive(size, until_s).decode("utf-8", "surrogatepass")
        if outcome == RENDERED:
            return text
        if outcome == CANNOT_READ:
            self._known.clear()
            self.has_ended = True
            raise ForeignValues(text)
        if outcome == NOT_A_TEMPLATE:
            raise ConfigError(text)
        message, param = json.loads(text)
        raise RequestError(message, param)

    def _send(self, data: bytes, until_s: float) -> None:
        self._connection.settimeout(max(0.001, until_s - time.monotonic()))
        self._connection.sendall(data)

    def _receive(self, size: int, until_s: float) -> bytes:
        self._connection.settimeout(max(0.001, until_s - time.monotonic()))
        return receive_exactly(self._connection, size)

    def end(self) -> None:
        self._finalizer()


def _kill(process: "subprocess.Popen[bytes]", connection: socket.socket, owner: int) -> None:
    connection.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


def _culprit(job: TemplateJob) -> str:
    return "messages" if job.is_own else "chat_template"
