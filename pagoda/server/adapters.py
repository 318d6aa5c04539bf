"""POST /v1/load_lora_adapter, /v1/unload_lora_adapter"""

import functools
from typing import TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from pagoda.server.answers import ERRORS
from pagoda.server.body import described_body, read_body
from pagoda.server.fields import Body
from pagoda.server.protocol import LoadAdapterRequest, UnloadAdapterRequest
from pagoda.server.served_adapters import ServedAdapters
from pagoda.server.state import state_of

router = APIRouter()
_post = functools.partial(router.post, response_class=PlainTextResponse, responses=ERRORS)

B = TypeVar("B", bound=Body)


@_post("/v1/load_lora_adapter", openapi_extra=described_body(LoadAdapterRequest))
async def load_lora_adapter(http: Request) -> Response:
    """Load a LoRA adapter from below `--lora-dir`; requests choose it by its name as `model`.

    If the server has an admin key, this needs it.
    """
    adapters, body = await _read_as_admin(http, LoadAdapterRequest)
    await adapters.load(body.lora_name, body.lora_path, body.base_model_name, body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@_post("/v1/unload_lora_adapter", openapi_extra=described_body(UnloadAdapterRequest))
async def unload_lora_adapter(http: Request) -> Response:
    """Remove a LoRA adapter. Requests that use it finish; new ones get 404.

    If the server has an admin key, this needs it.
    """
    adapters, body = await _read_as_admin(http, UnloadAdapterRequest)
    await adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _read_as_admin(http: Request, kind: type[B]) -> tuple[ServedAdapters, B]:
    """Return the server's adapters and the body of a request to change them. Raises ApiError (403) without the key."""
    state = state_of(http)
    state.check_admin(http)
    return state.adapters, await read_body(http, kind, state.request_limits)
