"""Traces of the engine in Chrome's format: GET /trace?seconds=N for so long, --trace FILE until the server ends."""

import asyncio
import itertools
import logging
import math
import time
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagoda.core.events import Events
from pagoda.engine.chrome_trace import ChromeTrace
from pagoda.metrics.observed_requests import RequestRecord
from pagoda.server.admission import Refusal
from pagoda.server.errors import ApiError
from pagoda.server.live import FRAME_S, viewer_of
from pagoda.server.request_state import request_state
from pagoda.server.sending import cancel_on_disconnect
from pagoda.server.served_model import ServedModel
from pagoda.server.state import ServerState, state_of

logger = logging.getLogger("pagoda.server")

MAX_TRACE_S = 60.0
_DEFAULT_S = 5.0


async def _trace(http: Request) -> Response:
    """Answer with a trace of all requests, whose lengths and ids it shows: for the admin key, or a server of one
    machine that has no keys. Of the first model, unless `model` names another.
    """
    request_state(http).route = TRACE.path
    state = state_of(http)
    if viewer_of(http).prefix != "":
        raise ApiError(403, "a trace shows the requests of all users: use the admin key (--admin-api-key)")
    model = state.pick(http, http.query_params.get("model")).model
    given = http.query_params.get("seconds", str(_DEFAULT_S))
    try:
        seconds = msgspec.convert(given, float, strict=False)  # which takes no digits of other scripts, as `float` does
    except msgspec.ValidationError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TRACE_S:
        raise ApiError(400, f"seconds: must be a number above 0, at most {MAX_TRACE_S:g} (got {given:.40})", "seconds")
    data = await cancel_on_disconnect(http, _record(state, model, seconds))
    disposition = {"Content-Disposition": 'attachment; filename="pagoda-trace.json"'}
    return Response(data, media_type="application/json", headers=disposition)


TRACE = Route("/trace", _trace)
"""Not among the routes that are described for programs: a call takes as long as the trace is."""


async def write_trace(state: ServerState, path: Path) -> None:
    """Write the trace of the first model, from now until the server begins to end."""
    data = await _record(state, state.model, math.inf)
    try:
        await asyncio.to_thread(path.write_bytes, data)
    except OSError as error:
        logger.error("--trace %s cannot be written: %s", path, error)
    else:
        logger.info("the trace is in %s", path)


async def _record(state: ServerState, model: ServedModel, seconds: float) -> bytes:
    """Return the trace of the next seconds; a shorter one if the server ends. Raises Refusal if one is made already."""
    engine, looks = model.engine, model.looks
    if engine is None:
        raise ApiError(503, "this server has no engine process to trace")
    running = await state.peers.ask("requests", "", False, returns=list[RequestRecord])
    if engine.on_events is not None:
        raise Refusal("requests", "a trace is made already; ask again when it has ended")
    began_s = time.perf_counter()
    trace = ChromeTrace(began_s)
    for record in itertools.chain.from_iterable(running):
        if record.model == model.name:
            trace.begin_with(record.client, record.handle, record.request_id, record.has_run)

    def add(events: Events) -> None:
        for event in events:
            trace.add(event)

    engine.on_events = add
    try:
        with looks.reads_steps():
            num_steps = looks.num_steps
            await looks.refresh()  # from now on, the engine notes its steps
            while (left_s := began_s + seconds - time.perf_counter()) > 0 and not state.drain.is_draining:
                await asyncio.sleep(min(left_s, FRAME_S))
                await looks.refresh()
                for note in looks.steps_after(num_steps):
                    trace.add_step(note)
                num_steps = looks.num_steps
    finally:
        engine.on_events = None
    written = trace.written(time.perf_counter())
    return await asyncio.to_thread(msgspec.json.encode, written)
