"""RequestState: what the server knows of an HTTP request while it answers it, and Caller, who sent it."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagoda.server.errors import ApiError, ErrorForm, error_body

if TYPE_CHECKING:
    from pagoda.server.generation import Generation

ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, by its API key.

    key: what it is called: "admin", or its number in the settings; "" if none is needed. It goes into the log, where
        nothing that is derived from the key itself belongs.
    owner: whom what is stored for it belongs to, also if keys are listed in another order: a digest of the key.
    """

    key: str = ""
    owner: str = ""

    @property
    def is_admin(self) -> bool:
        return self.key == ADMIN

    @property
    def sees_key(self) -> str | None:
        """The key whose requests it may end; None: those of all."""
        return None if self.is_admin else self.key


@dataclass(slots=True)
class RequestState:
    """What is known of an HTTP request. AccessLog makes it; layers and routes fill it.

    error_form: of the API that it is for.   caller, hold: see Gate.
    route: as it is declared.   body_bytes: of its body, and of what it stands for.
    model: what its `model` was found to be.   audio_s: the length of its sound.
    ignored_fields, warning: become headers of the answer.
    generation: what ran for it.
    error: why it was refused or failed.   ended_as: the status to log for a stream that did not end well, after a 200.
    work: what goes on for it in the background, with which it ends.
    """

    request_id: str = ""
    error_form: ErrorForm = error_body
    caller: Caller = Caller()
    hold: Callable[[int], None] = lambda num_bytes: None
    route: str = ""
    body_bytes: int = 0
    model: str | None = None
    audio_s: float | None = None
    ignored_fields: str = ""
    warning: str = ""
    generation: "Generation | None" = None
    error: str = ""
    ended_as: int = 0
    work: asyncio.Task[Any] | None = None

    def fail(self, error: ApiError) -> None:
        """Note the error that it ends with, after its answer has begun."""
        self.ended_as, self.error = error.status, error.message


def request_state(http: Mapping[str, Any]) -> RequestState:
    """Return what is known of a request.   http: a Request, or its scope."""
    return http["state"]  # type: ignore[no-any-return]
