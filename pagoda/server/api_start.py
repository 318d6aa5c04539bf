"""What an API process gets from its parent to start, and reports if it cannot."""

import contextlib

import msgspec

from pagoda.base.config import EngineConfig
from pagoda.base.errors import CapacityError, ConfigError, PagodaError, WorkerDied
from pagoda.process.child_process import RendezvousDir

SOCKET = "engine"  # in the rendezvous folder
LASTING_ERRORS = (ConfigError, CapacityError)
"""Errors of a start that another start cannot mend."""


class ApiStart(msgspec.Struct, frozen=True):
    """What a process needs.

    number: from 1.   is_first: none of its number has served yet.   folder: of the rendezvous.
    listeners: file descriptors of the sockets of all processes.
    """

    config: EngineConfig
    number: int
    is_first: bool
    folder: str
    listeners: list[int]
    salt_secret: bytes


def tell_error(place: RendezvousDir, number: int, error: PagodaError) -> None:
    """Tell the parent why this process cannot serve."""
    with contextlib.suppress(OSError):  # all end, and the folder is gone
        place.path(f"error-{number}").write_bytes(msgspec.json.encode((type(error).__name__, str(error))))


def take_error(place: RendezvousDir, number: int) -> PagodaError | None:
    """Return why a process could not serve, if it has said so; once."""
    path = place.path(f"error-{number}")
    with contextlib.suppress(OSError, msgspec.DecodeError):
        name, text = msgspec.json.decode(path.read_bytes(), type=tuple[str, str])
        path.unlink()
        return {one.__name__: one for one in LASTING_ERRORS}.get(name, WorkerDied)(text)
    return None
