"""Traces of the engine in Chrome's format: GET /trace?seconds=N for so long, --trace FILE until the server ends."""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagoda.core.events import Events
from pagoda.engine.chrome_trace import ChromeTrace, joined
from pagoda.engine.clients.remote_client import EngineClient
from pagoda.server.admission import Refusal
from pagoda.server.errors import ApiError
from pagoda.server.live import FRAME_S, viewer_of
from pagoda.server.request_state import request_state
from pagoda.server.sending import cancel_on_disconnect
from pagoda.server.served_model import ServedModel
from pagoda.server.served_models import ServedModels
from pagoda.server.state import ServerState, state_of

logger = logging.getLogger("pagoda.server")

MAX_TRACE_S = 60.0
_DEFAULT_S = 5.0


async def _trace(http: Request) -> Response:
    """Answer with a trace of all requests, whose lengths and ids it shows: for the admin key, or a server of one
    machine that has no keys. Of all models, or of the one that `model` names.
    """
    request_state(http).route = TRACE.path
    state = state_of(http)
    if viewer_of(http).prefix != "":
        raise ApiError(403, "a trace shows the requests of all users: use the admin key (--admin-api-key)")
    name = http.query_params.get("model")
    models = state.models.all if name is None else (state.pick(http, name).model,)
    given = http.query_params.get("seconds", str(_DEFAULT_S))
    try:
        seconds = msgspec.convert(given, float, strict=False)  # which takes no digits of other scripts, as `float` does
    except msgspec.ValidationError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TRACE_S:
        raise ApiError(400, f"seconds: must be a number above 0, at most {MAX_TRACE_S:g} (got {given:.40})", "seconds")
    data = await cancel_on_disconnect(http, _record(state, models, seconds))
    disposition = {"Content-Disposition": 'attachment; filename="pagoda-trace.json"'}
    return Response(data, media_type="application/json", headers=disposition)


TRACE = Route("/trace", _trace)
"""Not among the routes that are described for programs: a call takes as long as the trace is."""


async def write_trace(state: ServerState, path: Path) -> None:
    """Write the trace of all models, from now until the server begins to end."""
    data = await _record(state, state.models.all, math.inf)
    try:
        await asyncio.to_thread(path.write_bytes, data)
    except OSError as error:
        logger.error("--trace %s cannot be written: %s", path, error)
    else:
        logger.info("the trace is in %s", path)


@dataclass(slots=True)
class _Traced:
    """A model and its trace.   num_steps: of the engine that were seen, see Looks."""

    model: ServedModel
    engine: EngineClient
    trace: ChromeTrace
    num_steps: int

    @contextlib.contextmanager
    def listens(self) -> Iterator[None]:
        """Add the events of the block, and have the engine note its steps."""
        self.engine.on_events = self._add
        try:
            with self.model.looks.reads_steps():
                yield
        finally:
            self.engine.on_events = None

    def _add(self, events: Events) -> None:
        for event in events:
            self.trace.add(event)

    async def read_steps(self) -> None:
        """Add the steps since they were read last."""
        looks = self.model.looks
        await looks.refresh()
        for note in looks.steps_after(self.num_steps):
            self.trace.add_step(note)
        self.num_steps = looks.num_steps


async def _record(state: ServerState, models: Sequence[ServedModel], seconds: float) -> bytes:
    """Return the trace of the next seconds; a shorter one if the server ends. Raises Refusal if one is made already."""
    engines = [(model, model.engine) for model in models if model.engine is not None]
    if not engines:
        raise ApiError(503, "this server has no engine process to trace")
    running = await state.peers.ask(ServedModels.requests, "", False)
    if any(engine.on_events is not None for _, engine in engines):
        raise Refusal("requests", "a trace is made already; ask again when it has ended")
    began_s = time.perf_counter()
    traced = [
        _Traced(model, engine, ChromeTrace(began_s, at, model.name if len(engines) > 1 else ""), model.looks.num_steps)
        for at, (model, engine) in enumerate(engines)
    ]
    trace_of = {one.model.name: one.trace for one in traced}
    for record in itertools.chain.from_iterable(running):
        if (trace := trace_of.get(record.model)) is not None:
            trace.begin_with(record.client, record.handle, record.request_id, next(iter(record.last), None))
    with contextlib.ExitStack() as at_end:
        for one in traced:
            at_end.enter_context(one.listens())
        while True:  # from the first time on, the engines note their steps
            await asyncio.gather(*(one.read_steps() for one in traced))
            left_s = began_s + seconds - time.perf_counter()
            if left_s <= 0 or state.drain.is_draining:
                break
            await asyncio.sleep(min(left_s, FRAME_S))
    written = [one.trace.written(time.perf_counter()) for one in traced]
    return await asyncio.to_thread(lambda: msgspec.json.encode(joined(written)))
