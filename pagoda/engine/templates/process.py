"""TemplateProcess: render chat templates in another process, which is killed at the deadline."""

import functools
import json
import pickle
import threading
from collections import OrderedDict
from dataclasses import dataclass

from pagoda.base.errors import ConfigError, RequestError
from pagoda.engine.cancellation import Cancellation
from pagoda.engine.killable_process import KillableProcess
from pagoda.engine.templates.job import InProcessRenderer, TemplateJob
from pagoda.engine.templates.worker import CANNOT_READ, NOT_A_TEMPLATE, NUM_KEPT, RENDERED


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
        self._lock = threading.Lock()
        self.process = KillableProcess("pagoda.engine.templates.worker", limits.memory_bytes, niceness)
        self._known: OrderedDict[bytes, None] = OrderedDict()  # keys of the templates that the worker has

    def render(self, job: TemplateJob, cancellation: Cancellation | None = None) -> str:
        """Return the prompt.   cancellation: ends the rendering; then raises Cancelled.

        Raises RequestError, ForeignValues, or ConfigError for a template that is not Jinja.
        """
        message = functools.partial(self._message, job)
        with self._lock:
            try:
                return self._text_of(self.process.exchange(message, self._limits.timeout_s, cancellation))
            except TimeoutError:
                said = f"the chat template was stopped after {self._limits.timeout_s:g} s: it did not finish"
                raise RequestError(said, _culprit(job)) from None
            except EOFError:
                raise RequestError("the chat template crashed the process that rendered it", _culprit(job)) from None

    def start(self) -> None:
        """Start the process now, so that the first job does not wait for it."""
        self.process.start()

    def close(self) -> None:
        """Kill the process, even during a job. Idempotent; another job starts a new one."""
        self.process.close()

    def _message(self, job: TemplateJob, is_first: bool) -> bytes:
        if is_first:
            self._known.clear()
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

    def _text_of(self, reply: bytes) -> str:
        outcome, text = reply[0], reply[1:].decode("utf-8", "surrogatepass")
        if outcome == RENDERED:
            return text
        if outcome == CANNOT_READ:
            self.process.close()  # it does not have the template that it could not read
            raise ForeignValues(text)
        if outcome == NOT_A_TEMPLATE:
            raise ConfigError(text)
        raise RequestError(*json.loads(text))


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


def _culprit(job: TemplateJob) -> str:
    return "messages" if job.is_own else "chat_template"
