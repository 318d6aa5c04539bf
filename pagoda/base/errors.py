"""Every error that pagoda raises on purpose."""


class PagodaError(Exception):
    """Root of pagoda's own errors: catching it catches all of them, and nothing else."""


class ConfigError(PagodaError, ValueError):
    """A setting, a model folder or a file cannot be used; the message names it and says the remedy."""


class RequestError(PagodaError, ValueError):
    """One request is malformed (an HTTP 4xx); no other request is touched.

    `param` names the offending field where there is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(PagodaError):
    """A well-formed request or model does not fit: pool, memory, queue or model length."""


class UsageError(PagodaError, RuntimeError):
    """The engine is used when or where it cannot be: after `close`, in a forked child, from a signal handler."""


class NotSupportedError(PagodaError, NotImplementedError):
    """A feature that is planned and not there yet; the message says what is missing."""


class WorkerDied(PagodaError):
    """The process or device that executes steps is gone; requests in flight can be replayed."""


class InvariantBroken(PagodaError, AssertionError):
    """A rule of the scheduler or the KV cache does not hold: a defect of pagoda, never of its input."""
