"""The exceptions that pagoda raises."""

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class PagodaError(Exception):
    """Base class of pagoda's exceptions."""


class ConfigError(PagodaError, ValueError):
    """A setting, a model folder or a file cannot be used; the message names it and the remedy."""


class RequestError(PagodaError, ValueError):
    """One request is invalid (an HTTP 4xx); no other request is affected.

    `param` names the offending field where there is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(PagodaError):
    """A well-formed request or model does not fit: pool, memory, queue or model length."""


class StepTooLarge(CapacityError):
    """A step of the largest size that the settings allow does not fit in the device's memory."""


class UsageError(PagodaError, RuntimeError):
    """The engine is used where it is not allowed: after `close`, in a forked child, from a signal handler."""


class WorkerDied(PagodaError):
    """The process or device that executes steps has died; running requests can be replayed."""


class InvariantBroken(PagodaError, AssertionError):
    """An invariant of the scheduler or the KV cache is violated: a bug in pagoda, not in its input."""


def fresh(error: E) -> E:
    """Return a copy of an error that several callers get, to be raised once.

    Each raise of one instance makes its traceback longer, which keeps the frames of all its callers.
    """
    copied = type(error).__new__(type(error), *error.args)  # copy.copy needs arguments that __init__ accepts
    copied.__dict__.update(error.__dict__)
    return copied
