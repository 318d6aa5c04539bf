"""The requests of this server as people and programs look at them: `/requests`, and the stream of the dashboard.

Nothing is computed without a reader.
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

from pagoda.metrics.observed_requests import RequestDetails, RequestRecord, num_cached_of
from pagoda.metrics.prometheus import ServerMetrics
from pagoda.server.errors import ApiError
from pagoda.server.live_ids import prefix_of
from pagoda.server.prefix_misses import PrefixMiss, explain_miss
from pagoda.server.request_state import request_state
from pagoda.server.routing import Router
from pagoda.server.seen_requests import OtherRequests, RequestList, RequestTimeline, SeenRequests, Viewer
from pagoda.server.sending import EventStream, event, json_response
from pagoda.server.served_model import ServedModel
from pagoda.server.served_models import ServedModels
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
    models = state.models.all
    await asyncio.gather(*(one.looks.refresh() for one in models))
    each, now_s = [await _see(http, one, with_ended=True) for one in models], time.perf_counter()
    live = sorted((one for seen in each for one in seen.live(now_s)), key=lambda one: -one.age_s)
    ended = sorted((pair for seen in each for pair in seen.ended(now_s)), key=lambda pair: -pair[0])
    data = [*live, *(one for _, one in ended)]
    others = [seen.others for seen in each]
    hidden = OtherRequests(sum(one.running for one in others), sum(one.waiting for one in others))
    in_line = (await state.admission.read_counts()).num_in_line
    as_of_s = round(max(map(_age_s, models)), 3)
    return json_response(RequestList(data=data, others=hidden, in_line=in_line, as_of_s=as_of_s))


def _age_s(model: ServedModel) -> float:
    """Return how long ago a model's engine said what it does."""
    looked_s = model.looks.age_s
    return model.starter.metrics.stats().age_s if looked_s is None else looked_s


@router.get("/requests/{id:path}", answer=RequestTimeline)
async def show_request(http: Request) -> Response:
    """One of these requests, with what happened to it and when; 404 if it is none of the caller's, or long ended.

    The admin key's own are also found by the id that its answers have.
    """
    state, viewer, given = state_of(http), viewer_of(http), http.path_params["id"]
    await asyncio.gather(*(one.looks.refresh() for one in state.models.all))
    own = prefix_of(request_state(http).caller.key)
    for name in (given, own + given) if viewer.prefix == "" and own else (given,):
        if (details := await _details(state, viewer, name)) is not None:
            break
    else:
        raise ApiError(404, "no such request: it is none of yours, or has ended and is forgotten", "id")
    model = state.models.of_record(details.record)
    timeline = (await _see(http, model, with_ended=True)).timeline(name, details, time.perf_counter())
    if (miss := await miss_of(state, viewer, details)) is not None:
        timeline.prefix_miss = miss
    return json_response(timeline)


async def _details(state: ServerState, viewer: Viewer, name: str) -> RequestDetails | None:
    """Return what is known of the last request that the viewer calls so, of all processes."""
    if viewer.prefix is None:
        return None
    found = await state.peers.ask(ServedModels.details, viewer.prefix + name)
    known = [one for one in found if one is not None]
    return max(known, key=lambda one: one.record.arrived_s, default=None)


async def miss_of(state: ServerState, viewer: Viewer, details: RequestDetails) -> PrefixMiss | None:
    """Return why no more of a request's prompt was found in the prefix cache."""
    record, tokens = details.record, details.tokens
    num_cached = num_cached_of(details.events)
    if tokens is None or num_cached is None or viewer.prefix is None:
        return None
    model = state.models.of_record(record)
    about = record.model, viewer.prefix, record.arrived_s, tokens
    alike = await state.peers.ask(ServedModels.most_alike, *about)
    last_first = sorted((one for one in alike if one is not None), key=lambda one: -one[0])
    earlier = [(viewer.name_of(request_id) or "", known) for _, request_id, known in last_first]
    tokenizer = model.llm.input_processor.tokenizer

    def text_of(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    return explain_miss(tokens, record.num_prompt_tokens, num_cached, model.block_size, earlier, text_of)


async def _see(http: Request, model: ServedModel, with_ended: bool = False) -> SeenRequests:
    state = state_of(http)
    viewer, reply = viewer_of(http), model.looks.reply
    records: list[RequestRecord] = []
    if viewer.prefix is not None:
        of_each = await state.peers.ask(ServedModels.requests, viewer.prefix, with_ended)
        records = [one for one in itertools.chain.from_iterable(of_each) if one.model == model.name]
        records.sort(key=lambda one: one.ended_s or one.arrived_s)
    is_up = model.engine_state in ("up", "stuck")
    view = reply.view if reply is not None and is_up else None
    return SeenRequests(viewer, records, view, model.starter.metrics.stats(), is_up)


async def _stream(http: Request) -> Response:
    """Send what the dashboard shows, two events per second: requests that changed, blocks, steps, counts.

    Of the first model, unless `model` names another.
    """
    request_state(http).route = STREAM.path
    model = state_of(http).pick(http, http.query_params.get("model")).model
    counted = contextlib.ExitStack()
    counted.enter_context(model.looks.stream())
    return EventStream(_frames(http, model), counted.close)


STREAM = Route("/dashboard/stream", _stream)
"""Not among the routes for programs: it is of the page, and has no end."""


async def _frames(http: Request, model: ServedModel) -> AsyncGenerator[bytes, None]:
    state = state_of(http)
    sent: dict[str, list[Any]] = {}
    metrics, num_steps = model.starter.metrics, model.looks.num_steps
    bounds = {"ttft": metrics.ttft.bounds, "itl": metrics.itl.bounds}
    names = [one.name for one in state.models.all]
    yield event({"model": model.name, "models": names, "bounds": bounds, "sees_all": viewer_of(http).prefix == ""})
    while not (state.drain.is_draining and state.drain.num_held == 0):
        began_s = time.monotonic()
        await model.looks.refresh()
        seen = await _see(http, model)
        steps = model.looks.steps_after(num_steps)
        num_steps = model.looks.num_steps
        frame = await _counts(state, model, metrics)
        frame["steps"] = [
            (
                one.step,
                round(one.began_s, 5),
                round(one.ended_s, 5),
                one.num_prompt_tokens,
                one.num_sampled,
                one.num_preempted,
                one.num_drafted,
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
            one.adapter,
        ]
        for one in seen.live(now_s)
    }
    changed = [row for name, row in rows.items() if sent.get(name) != row]
    gone = [name for name in sent if name not in rows]
    sent.clear()
    sent.update(rows)
    return changed, gone


async def _counts(state: ServerState, model: ServedModel, metrics: ServerMetrics) -> dict[str, Any]:
    counts, admission = (await state.peers.read_counts())[model.name], await state.admission.read_counts()
    engine = model.engine_state
    stats, tokens = metrics.stats(), counts["tokens"]
    return {
        "now": round(time.perf_counter(), 3),
        "as_of_s": round(_age_s(model), 1),
        "engine": "draining" if engine == "up" and state.drain.is_draining else engine,
        "restarts": model.num_restarts,
        "prompt_tokens": tokens["prompt"],
        "output_tokens": tokens["output"],
        "ttft": metrics.ttft.buckets(counts),
        "itl": metrics.itl.buckets(counts),
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "swapped": stats.num_swapped,
        "in_line": admission.num_in_line,
        "blocks": stats.num_blocks + stats.num_states,
        "free_blocks": stats.num_free_blocks + stats.num_free_states,
        "free_host_blocks": stats.num_free_host_blocks,
        "preemptions": stats.preemptions,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
    }
