"""Messages between an executor and the processes of its ranks: msgpack, as between API and engine process.

The executor sends every message to every rank, encoded once; each rank handles them in order and replies to each. A
reply's value is encoded by itself: its type follows from the message that it answers.
"""

import logging

import msgspec

from pagoda.base.config import EngineConfig
from pagoda.base.errors import (
    CapacityError,
    ConfigError,
    InvariantBroken,
    PagodaError,
    RequestError,
    StepTooLarge,
    WorkerDied,
)
from pagoda.base.ranks import RankPlace
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.process.out_of_memory import is_out_of_memory
from pagoda.worker.calls import StepSize


class Curve(msgspec.Struct, frozen=True):
    """The keys of a group whose messages cross a network. They are needed to send and to read messages.

    executor: the executor's public key.   public, secret: the key pair that all ranks share.
    """

    executor: bytes
    public: bytes
    secret: bytes


class RankStart(msgspec.Struct, frozen=True):
    """What a rank must know to start.

    config: of the engine; every rank resolves it to the same setup.
    local_number, num_local: which of the ranks on its machine it is, and how many they are.
    messages, replies: the addresses to connect to.   folder: of their sockets, if there is one.
    curve: None if only processes of this user can reach them.
    log_level: of the process that starts it, a number of `logging`.
    segment: file descriptor of the memory that the ranks of a machine share, or None if there is only one.
    previous, next: descriptors of sockets to this rank of the stages before and after, 0 where `segment` is theirs too.
    """

    config: EngineConfig
    place: RankPlace
    local_number: int
    num_local: int
    messages: str
    replies: str
    folder: str | None = None
    curve: Curve | None = None
    log_level: int = logging.WARNING
    segment: int | None = None
    previous: int = 0
    next: int = 0


LOADED = 0
"""Nothing is sent for a rank to load its weights: it replies with this number, and its Identity, once it has."""


class Identity(msgspec.Struct, frozen=True):
    """What must be the same on all ranks.

    digest: of pagoda's version, what the settings mean, and the model's files.   kernels: which ones, for which CPUs.
    """

    digest: str
    kernels: str


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    number: int
    sizes: tuple[StepSize, ...]


class SetPools(msgspec.Struct, frozen=True, tag="set_pools"):
    """counts: as the arguments of Executor.set_pools."""

    number: int
    counts: tuple[int, ...]


class Step(msgspec.Struct, frozen=True, tag="step"):
    number: int
    output: SchedulerOutput


class RankCall(msgspec.Struct, frozen=True, tag="call"):
    """arguments: encoded, since their types depend on the name."""

    number: int
    name: str
    arguments: msgspec.Raw


ToRank = Measure | SetPools | Step | RankCall


class Failure(msgspec.Struct, frozen=True):
    """An exception: its type, as far as callers tell types apart, and its message. param: of a RequestError."""

    kind: str
    message: str
    param: str | None = None


class Reply(msgspec.Struct, frozen=True):
    """A rank's reply to message `number`.

    value: encoded; that of a step is nil where the rank does not sample.   checksum: of a step, see ModelRunnerOutput.
    """

    rank: int
    number: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil
    checksum: int = 0
    failure: Failure | None = None


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        StepTooLarge,
        CapacityError,
        ConfigError,
        RequestError,
        WorkerDied,
        InvariantBroken,
        PagodaError,
        MemoryError,
        RuntimeError,
    )
}


def failure_of(error: Exception) -> Failure:
    """Return an exception as a value."""
    name = type(error).__name__
    if name in _KINDS:
        return Failure(name, str(error), getattr(error, "param", None))
    if is_out_of_memory(error):
        return Failure("MemoryError", str(error))
    return Failure("RuntimeError", f"{name}: {error}")


def error_of(failure: Failure) -> Exception:
    """Return the exception of a failure. One whose type callers do not tell apart has become a RuntimeError."""
    if failure.kind == "RequestError":
        return RequestError(failure.message, failure.param)
    return _KINDS[failure.kind](failure.message)
