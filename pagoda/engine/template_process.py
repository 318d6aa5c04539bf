"""TemplateProcess: renders chat templates in another process, which is killed at the deadline."""

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass

from pagoda.base.errors import ConfigError, RequestError
from pagoda.engine.template_job import InProcessRenderer, TemplateJob
from pagoda.engine.template_worker import (
    CANNOT_READ,
    NOT_A_TEMPLATE,
    NUM_KEPT,
    READY,
    RENDERED,
    REPLY,
    REQUEST,
    receive_exactly,
)

_START_S = 30.0  # a new process: imports may be slow on a busy machine, and are not the template's fault


class ForeignValues(Exception):
    """Values that cannot be sent to another process: objects of a caller's own classes."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """timeout_s: for rendering one conversation.   memory_bytes: that the template may take meanwhile."""

    timeout_s: float = 10.0
    memory_bytes: int = 512 * 2**20


class TemplateProcess:
    """One worker process, started at the first job and again after a kill. Threads may share it: one job at a time.

    niceness: its process gives way to others by so much.
    """

    def __init__(self, limits: TemplateLimits, niceness: int = 0) -> None:
        self._limits = limits
        self._niceness = niceness
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._job: TemplateJob | None = None
        self._cancelled: TemplateJob | None = None

    def render(self, job: TemplateJob) -> str:
        """Raises RequestError, ConfigError for a template that is not Jinja, ForeignValues."""
        with self._lock:
            self._job = job
            try:
                try:
                    return self._try(job)
                except (EOFError, ConnectionError):
                    # Something else may have killed the process, before or after it got the job.
                    return self._try(job)
            except TimeoutError:
                said = f"the chat template was stopped after {self._limits.timeout_s:g} s: it did not come to an end"
                raise RequestError(said, _culprit(job)) from None
            except (EOFError, ConnectionError):
                raise RequestError("the chat template ended the process that rendered it", _culprit(job)) from None
            finally:
                self._job = self._cancelled = None

    def _try(self, job: TemplateJob) -> str:
        """As `render`. Raises TimeoutError, EOFError or ConnectionError when the process is of no more use."""
        worker = self._running()
        if self._cancelled is job:  # looked at last: from here on, cancelling kills this worker
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
        """Kill the process if it is rendering this job: `render` then raises. From any thread."""
        self._cancelled = job
        worker = self._worker
        if self._job is job and worker is not None:
            worker.process.kill()

    def start(self) -> None:
        """Start the process now, so that the first job does not wait for it."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the process, also in the middle of a job. Idempotent; another job starts a new one."""
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
    """A Renderer with one worker process, for programs that run one conversation after the other.

    Values that only this process understands (objects of a caller's own classes) are rendered here, unprotected.
    """

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self._process = TemplateProcess(limits or TemplateLimits())
        self._here = InProcessRenderer()

    def render(self, job: TemplateJob) -> str:
        """Raises RequestError, or ConfigError for a template that is not Jinja."""
        try:
            return self._process.render(job)
        except (ForeignValues, OSError):  # OSError: no process can be started
            return self._here.render(job)

    def close(self) -> None:
        self._process.close()


class _Worker:
    """One life of the process.   has_ended: its last reply said that it ends."""

    def __init__(self, memory_bytes: int, niceness: int) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pagoda.engine.template_worker"),
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
        """False once the process is gone, and in a process that was forked from the one that started it."""
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
        """Raises TimeoutError, EOFError or ConnectionError: the worker is of no more use then."""
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
