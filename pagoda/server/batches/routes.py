"""/v1/batches: OpenAI's batches, which answer the lines of a file as `pagoda run-batch` does."""

import re
import time
import uuid
from typing import Annotated

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.server.batches.files import AgeSeconds
from pagoda.server.batches.lines import PATHS
from pagoda.server.batches.records import Batch, RequestCounts
from pagoda.server.batches.service import FileLimits, FileService
from pagoda.server.body import Body, OrDefault, one_of
from pagoda.server.listing import Listed, page_asked
from pagoda.server.routing import Router
from pagoda.server.sending import json_response
from pagoda.server.state import state_of
from pagoda.server.stored.asking import NOT_FOUND, owner_of
from pagoda.server.stored.conversations import Metadata

router = Router(errors=NOT_FOUND)
_PATH = "/v1/batches/{batch_id}"
_WINDOW = re.compile(r"([1-9]\d{0,2})([hd])", re.ASCII)
_MAX_WINDOW_S = 30 * 86_400


class OutputAge(Body, kw_only=True, frozen=True):
    """How old the output gets.

    seconds: From an hour to 30 days.
    anchor: Since when that counts.
    """

    seconds: AgeSeconds
    anchor: OrDefault[Annotated[str, one_of("created_at")]] = "created_at"


class BatchRequest(Body, kw_only=True, frozen=True):
    """POST /v1/batches

    input_file_id: A file of this key, of the purpose batch: a request per line, all of them to `endpoint`.
    endpoint: The route that answers them.
    completion_window: After this time, what has no answer fails: hours (24h) or days (7d), up to 30d.
    output_expires_after: How old the output gets; 30 days, if not given.
    """

    input_file_id: Annotated[str, Meta(max_length=256)]
    endpoint: Annotated[str, one_of(*PATHS)]
    completion_window: OrDefault[Annotated[str, Meta(max_length=16)]] = "24h"
    metadata: Metadata | None = None
    output_expires_after: OutputAge | None = None

    def check(self, limits: RequestLimits) -> None:
        if not 0 < self.window_s <= _MAX_WINDOW_S:
            text = f"completion_window: expected hours (24h) or days (7d), up to 30d, got {self.completion_window!r}"
            raise RequestError(text, "completion_window")

    @property
    def window_s(self) -> int:
        """How long it may take; 0 for something else."""
        given = _WINDOW.fullmatch(self.completion_window)
        return 0 if given is None else int(given[1]) * (3_600 if given[2] == "h" else 86_400)


class BatchList(Listed[Batch], frozen=True):
    """Batches of a key."""


@router.post("/v1/batches", body=BatchRequest, answer=Batch)
async def create_batch(http: Request) -> Response:
    """Begin a batch, which belongs to the key that is used: the answers to the lines of a file."""
    state = state_of(http)
    body = await state.bodies.read(http, BatchRequest)
    now_s = int(time.time())
    batch = Batch(
        id=f"batch_{uuid.uuid4().hex}",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now_s,
        expires_at=now_s + body.window_s,
        request_counts=RequestCounts(),
        metadata=body.metadata,
    )
    asked = body.output_expires_after
    age_s = FileLimits().age_s if asked is None else asked.seconds
    await state.owned.ask(FileService.create, owner_of(http), batch, age_s)
    return json_response(batch)


@router.get("/v1/batches", answer=BatchList, query=("after", "limit"))
async def list_batches(http: Request) -> Response:
    """List the batches of the key that is used: the last ones first."""
    after, limit, _ = page_asked(http)
    return json_response(await state_of(http).owned.ask(FileService.batches, owner_of(http), after, limit))


@router.get(_PATH, answer=Batch)
async def get_batch(http: Request) -> Response:
    """Return how far a batch is, and its files."""
    batch = await state_of(http).owned.ask(FileService.batch, owner_of(http), http.path_params["batch_id"])
    return json_response(batch)


@router.post(f"{_PATH}/cancel", answer=Batch)
async def cancel_batch(http: Request) -> Response:
    """Cancel a batch. The answers so far are its output; one that has ended stays as it is."""
    batch = await state_of(http).owned.ask(FileService.cancel, owner_of(http), http.path_params["batch_id"])
    return json_response(batch)
