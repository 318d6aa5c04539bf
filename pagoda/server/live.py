"""The requests of this server as people and programs look at them: `/requests`, and the stream of the dashboard.

Nothing is computed while nobody looks.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagoda.base.server_config import ServerConfig
from pagoda.metrics.prometheus import ServerMetrics
from pagoda.server.answers import RequestList, RequestTimeline
from pagoda.server.errors import ApiError
from pagoda.server.routing import Router
from pagoda.server.seen_requests import SeenRequests, Viewer
from pagoda.server.sending import EventStream, event, json_response
from pagoda.server.state import ServerState, state_of

router = Router()

FRAME_S = 0.5


def viewer_of(http: Request, config: ServerConfig) -> Viewer:
    """Return who looks, and what it may see."""
    caller = http.scope["state"]
    if caller["is_admin"] or (config.is_local and not config.api_keys and config.admin_api_key is None):
        return Viewer("")
    return Viewer(f"{caller['key']}/" if caller["key"] else None)


@router.get("/requests", answer=RequestList)
async def list_requests(http: Request) -> Response:
    """The caller's requests: what runs, what waits and why, and what ended last. Those of other keys are counts.

    The admin key sees all; so do all callers of a server of one machine that has no keys.
    """
    await state_of(http).looks.refresh()
    seen, now_s = _see(http), time.perf_counter()
    data = [*seen.live(now_s), *seen.ended(now_s)]
    in_line = state_of(http).starter.admission.num_in_line
    return json_response(RequestList(data=data, others=seen.others, in_line=in_line))


@router.get("/requests/{id:path}", answer=RequestTimeline)
async def show_request(http: Request) -> Response:
    """One of these requests, with what happened to it and when; 404 if it is none of the caller's, or long ended."""
    state = state_of(http)
    await state.looks.refresh()
    tokenizer = state.starter.llm.input_processor.tokenizer

    def text_of(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False)

    found = _see(http).find(http.path_params["id"], time.perf_counter(), state.block_size, text_of)
    if found is None:
        raise ApiError(404, "no such request: it is none of yours, or has ended and is forgotten", "id")
    return json_response(found)


def _see(http: Request) -> SeenRequests:
    state = state_of(http)
    reply, metrics = state.looks.reply, state.starter.metrics
    view = reply.view if reply is not None and _engine_state(state) == "up" else None
    return SeenRequests(viewer_of(http, state.config), metrics, view, metrics.stats())


async def _stream(http: Request) -> Response:
    """Send what the dashboard shows, two events per second: requests that changed, blocks, steps, counts."""
    http.scope["state"]["route"] = STREAM.path
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
    yield event(
        {"model": state.model_names[0], "bounds": bounds, "sees_all": viewer_of(http, state.config).prefix == ""}
    )
    while not (state.drain.is_draining and state.drain.num_held == 0):
        began_s = time.monotonic()
        await state.looks.refresh(takes_steps=True)
        seen = _see(http)
        steps = state.looks.steps_after(num_steps)
        num_steps = state.looks.num_steps
        frame = _counts(state, metrics)
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


def _counts(state: ServerState, metrics: ServerMetrics) -> dict[str, Any]:
    stats, admission = metrics.stats(), state.starter.admission
    return {
        "now": round(time.perf_counter(), 3),
        "engine": _engine_state(state),
        "restarts": state.engine.num_deaths if state.engine is not None else 0,
        "prompt_tokens": metrics.num_prompt_tokens,
        "output_tokens": metrics.num_output_tokens,
        "ttft": metrics.ttft.counts,
        "itl": metrics.itl.counts,
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
