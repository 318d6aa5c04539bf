"""The requests of this server as people and programs look at them: `/requests`, and the stream of the dashboard.

Nothing is computed while nobody looks.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagoda.metrics.observed_requests import Alike, RequestDetails, RequestRecord, num_cached_of
from pagoda.metrics.prometheus import ServerMetrics
from pagoda.server.errors import ApiError
from pagoda.server.live_ids import prefix_of
from pagoda.server.prefix_misses import PrefixMiss, explain_miss
from pagoda.server.request_state import request_state
from pagoda.server.routing import Router
from pagoda.server.seen_requests import RequestList, RequestTimeline, SeenRequests, Viewer
from pagoda.server.sending import EventStream, event, json_response
from pagoda.server.state import ServerState, state_of

router = Router()

FRAME_S = 0.5


def viewer_of(http: Request) -> Viewer:
    """Return who looks, and what it may see."""
    if state_of(http).is_operator(http):
        return Viewer("")
    return Viewer(prefix_of(request_state(http).caller.key) or None)


@router.get("/requests", answer=RequestList)
async def list_requests(http: Request) -> Response:
    """The caller's requests: what runs, what waits and why, and what ended last. Those of other keys are counts.

    The admin key sees all; so do all callers of a server of one machine that has no keys.
    """
    state = state_of(http)
    await state.looks.refresh()
    seen, now_s = await _see(http, with_ended=True), time.perf_counter()
    data = [*seen.live(now_s), *seen.ended(now_s)]
    in_line = (await state.starter.admission.read_counts()).num_in_line
    looked_s = state.looks.age_s
    as_of_s = round(state.starter.metrics.stats().age_s if looked_s is None else looked_s, 3)
    return json_response(RequestList(data=data, others=seen.others, in_line=in_line, as_of_s=as_of_s))


@router.get("/requests/{id:path}", answer=RequestTimeline)
async def show_request(http: Request) -> Response:
    """One of these requests, with what happened to it and when; 404 if it is none of the caller's, or long ended."""
    state, name = state_of(http), http.path_params["id"]
    viewer = viewer_of(http)
    await state.looks.refresh()
    details = None
    if viewer.prefix is not None:
        found = await state.peers.ask("details", viewer.prefix + name, returns=RequestDetails | None)
        known = sorted((one for one in found if one is not None), key=lambda one: one.record.arrived_s)
        details = known[-1] if known else None
    if details is None:
        raise ApiError(404, "no such request: it is none of yours, or has ended and is forgotten", "id")
    timeline = (await _see(http, with_ended=True)).timeline(name, details, time.perf_counter())
    if (miss := await miss_of(state, viewer, details)) is not None:
        timeline.prefix_miss = miss
    return json_response(timeline)


async def miss_of(state: ServerState, viewer: Viewer, details: RequestDetails) -> PrefixMiss | None:
    """Return why no more of a request's prompt was found in the prefix cache."""
    record, tokens = details.record, details.tokens
    num_cached = num_cached_of(details.events)
    if tokens is None or num_cached is None:
        return None
    alike = await state.peers.ask("most_alike", viewer.prefix, record.arrived_s, tokens, returns=Alike | None)
    last_first = sorted((one for one in alike if one is not None), key=lambda one: -one[0])
    earlier = [(viewer.name_of(request_id) or "", known) for _, request_id, known in last_first]
    tokenizer = state.starter.llm.input_processor.tokenizer

    def text_of(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    return explain_miss(tokens, record.num_prompt_tokens, num_cached, state.block_size, earlier, text_of)


async def _see(http: Request, with_ended: bool = False) -> SeenRequests:
    state = state_of(http)
    viewer, reply = viewer_of(http), state.looks.reply
    records: list[RequestRecord] = []
    if viewer.prefix is not None:
        of_each = await state.peers.ask("requests", viewer.prefix, with_ended, returns=list[RequestRecord])
        records = sorted(itertools.chain.from_iterable(of_each), key=lambda one: one.ended_s or one.arrived_s)
    is_up = _engine_state(state) not in ("starting", "gone")
    view = reply.view if reply is not None and is_up else None
    return SeenRequests(viewer, records, view, state.starter.metrics.stats(), is_up)


async def _stream(http: Request) -> Response:
    """Send what the dashboard shows, two events per second: requests that changed, blocks, steps, counts."""
    request_state(http).route = STREAM.path
    counted = contextlib.ExitStack()
    counted.enter_context(state_of(http).looks.stream())
    return EventStream(_frames(http), counted.close)


STREAM = Route("/dashboard/stream", _stream)
"""Not among the routes for programs: it is of the page, and has no end."""


async def _frames(http: Request) -> AsyncGenerator[bytes, None]:
    state = state_of(http)
    sent: dict[str, list[Any]] = {}
    metrics, num_steps = state.starter.metrics, state.looks.num_steps
    bounds = {"ttft": metrics.ttft.bounds, "itl": metrics.itl.bounds}
    yield event({"model": state.model.names[0], "bounds": bounds, "sees_all": viewer_of(http).prefix == ""})
    while not (state.drain.is_draining and state.drain.num_held == 0):
        began_s = time.monotonic()
        await state.looks.refresh()
        seen = await _see(http)
        steps = state.looks.steps_after(num_steps)
        num_steps = state.looks.num_steps
        frame = await _counts(state, metrics)
        frame["steps"] = [
            (
                one.step,
                round(one.began_s, 5),
                round(one.ended_s, 5),
                one.num_prompt_tokens,
                one.num_sampled,
                one.num_preempted,
            )
            for one in steps
        ]
        frame["requests"], frame["gone"] = _changes(seen, sent)
        frame["others"] = seen.others
        frame["cells"], frame["host_cells"], frame["owners"] = seen.cells()
        yield event(frame)
        await asyncio.sleep(max(0.0, began_s + FRAME_S - time.monotonic()))


def _changes(seen: SeenRequests, sent: dict[str, list[Any]]) -> tuple[list[list[Any]], list[str]]:
    """Return the rows that differ from those `sent`, and the ids that are gone; note that they are sent."""
    now_s = time.perf_counter()
    rows = {
        one.id: [
            one.id,
            one.state,
            one.prompt_tokens,
            one.computed_tokens,
            one.output_tokens,
            one.cached_tokens,
            one.blocks,
            round(now_s - one.age_s, 1),
            one.reason,
        ]
        for one in seen.live(now_s)
    }
    changed = [row for name, row in rows.items() if sent.get(name) != row]
    gone = [name for name in sent if name not in rows]
    sent.clear()
    sent.update(rows)
    return changed, gone


def _engine_state(state: ServerState) -> str:
    engine = state.engine
    if state.starter.llm.died is not None or (engine is not None and engine.died is not None):
        return "gone"
    if engine is not None and not engine.is_up:
        return "starting"
    if engine is not None and engine.is_stuck:
        return "stuck"
    return "draining" if state.drain.is_draining else "up"


async def _counts(state: ServerState, metrics: ServerMetrics) -> dict[str, Any]:
    counts, admission = await state.peers.read_counts(), await state.starter.admission.read_counts()
    stats, tokens = metrics.stats(), counts["tokens"]
    return {
        "now": round(time.perf_counter(), 3),
        "engine": _engine_state(state),
        "restarts": state.engine.num_deaths if state.engine is not None else 0,
        "prompt_tokens": tokens["prompt"],
        "output_tokens": tokens["output"],
        "ttft": metrics.ttft.buckets(counts),
        "itl": metrics.itl.buckets(counts),
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "swapped": stats.num_swapped,
        "in_line": admission.num_in_line,
        "blocks": stats.num_blocks,
        "free_blocks": stats.num_free_blocks,
        "free_host_blocks": stats.num_free_host_blocks,
        "preemptions": stats.preemptions,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
    }
