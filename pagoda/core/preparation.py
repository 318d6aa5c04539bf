"""The interface of what requests need on the workers before they run: a compiled grammar, a loaded adapter."""

from typing import Protocol

from pagoda.core.decision_log import Reason
from pagoda.core.request import Request


class Preparations(Protocol):
    """Prepares what requests need, and keeps it while they run."""

    def why_not_ready(self, request: Request) -> Reason | None:
        """Return None if the workers have what the request needs; otherwise begin to prepare it, say what is missing.

        Raises RequestError that says why it cannot be had.
        """
        ...

    def pin(self, request: Request) -> None:
        """The request enters the running batch: keep what it needs until `unpin`. It was ready just before."""
        ...

    def unpin(self, request: Request) -> None:
        """Undo one `pin`."""
        ...
