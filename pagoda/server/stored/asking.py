"""What all routes of stored responses and conversations have in common."""

import hashlib

from msgspec import Struct
from starlette.requests import Request

from pagoda.base.errors import RequestError
from pagoda.server.admission import Refusal
from pagoda.server.errors import ApiError
from pagoda.server.routing import ERRORS
from pagoda.server.state import state_of
from pagoda.server.stored.service import Refused

NOT_FOUND = {**ERRORS, 404: "This key has none of this id"}


class Deleted(Struct, frozen=True):
    """What was deleted."""

    id: str
    object: str
    deleted: bool = True


def owner_of(http: Request) -> str:
    """Return whom what a request stores belongs to: its API key. The name holds if keys are listed in another order."""
    name, config = http.scope["state"]["key"], state_of(http).config
    if not name:
        return ""
    return owner_name(config.api_keys[int(name) - 1] if name.isdecimal() else config.admin_api_key or "")


def owner_name(key: str) -> str:
    """Return what the owner of an API key is called."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def not_found(what: str, id: str, param: str) -> ApiError:
    text = f"{param}: this key has no {what} {id[:100]!r}; it was deleted or not stored, or newer ones took its room"
    return ApiError(404, text, param)


def check_kept(refused: Refused | None) -> None:
    """Raise an error if something could not be stored."""
    if refused is not None and refused.is_lasting:
        raise RequestError(f"{refused.message}; send less, or store: false", "store")
    if refused is not None:
        raise Refusal("stored", refused.message)
