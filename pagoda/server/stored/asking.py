"""What all routes of stored responses and conversations have in common."""

from msgspec import Struct
from starlette.requests import Request

from pagoda.server.errors import ApiError
from pagoda.server.request_state import request_state
from pagoda.server.routing import ERRORS

NOT_FOUND = {**ERRORS, 404: "This key has none of this id"}


class Deleted(Struct, frozen=True):
    """What was deleted."""

    id: str
    object: str
    deleted: bool = True


def owner_of(http: Request) -> str:
    """Return whom what a request stores belongs to."""
    return request_state(http).caller.owner


def not_found(what: str, id: str, param: str) -> ApiError:
    text = f"{param}: this key has no {what} {id[:100]!r}; it was deleted or not stored, or newer ones took its room"
    return ApiError(404, text, param)
