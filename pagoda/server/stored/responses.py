"""/v1/responses: OpenAI's Responses that are stored, run in the background, and follow one another."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.errors import RequestError
from pagoda.server.body_reader import run_for_body
from pagoda.server.dialects.responses.bodies import InputItem, ResponsesRequest
from pagoda.server.dialects.responses.dialect import ResponsesDialect, response_error
from pagoda.server.dialects.responses.events import TOO_LONG, ResponseAnswer, ResponseEvent, error_code
from pagoda.server.dialects.responses.input import conversation_of
from pagoda.server.dialects.responses.tools import ResponsesTools
from pagoda.server.errors import ApiError, as_api_error
from pagoda.server.listing import page_asked
from pagoda.server.render import count_prompt_tokens
from pagoda.server.request_state import request_state
from pagoda.server.respond import begin_turn, respond_with
from pagoda.server.routing import Router, flag, integer
from pagoda.server.sending import EventStream, Framing, cancel_on_disconnect, event, json_response
from pagoda.server.served_models import ServedModels
from pagoda.server.state import state_of
from pagoda.server.stored.asking import NOT_FOUND, Deleted, owner_of
from pagoda.server.stored.items import ItemList, given_items
from pagoda.server.stored.run import StoredTurn
from pagoda.server.stored.service import Found, StoreService, unpack
from pagoda.server.stored.store import Item
from pagoda.server.turn import naming_fields

router = Router(error_form=response_error)
stored_router = Router(error_form=response_error, errors=NOT_FOUND)
_PATH = "/v1/responses/{response_id}"
_decode = msgspec.json.Decoder(InputItem, strict=False).decode
_ABORT_S = 1.0
FRAMING = Framing(lambda error, request_id: event(response_error(error, request_id), "error"), b"")


@router.post("/v1/responses", answer=ResponseAnswer, chunk=ResponseEvent, body=ResponsesRequest)
async def create_response(http: Request) -> Response:
    """Generate the assistant's next turn, in the form of OpenAI's Responses."""
    state, owner = state_of(http), owner_of(http)
    body = await state.bodies.read(http, ResponsesRequest)
    earlier = await _earlier(http, body)
    given = await run_for_body(http, lambda: [_decode(data) for _, data in earlier()])
    dialect = ResponsesDialect(given)
    try:
        running = await begin_turn(http, dialect, body)
    except (ApiError, RequestError) as error:
        known = as_api_error(error)
        if not body.stream or error_code(known) != TOO_LONG:
            raise
        return dialect.failed(known)  # Codex makes room in its conversation for an event only, not for a 400
    if not body.store:
        return await respond_with(http, running)
    with contextlib.ExitStack() as at_end:
        at_end.callback(running.close)
        turn = StoredTurn(state.owned, running)
        own = await given_items(http, "input")
        entry = await run_for_body(http, lambda: turn.entry(owner, earlier(), own))
        await state.owned.ask(StoreService.add, entry)
        if not (body.stream or body.background):
            return await turn.whole(http)
        at_end.pop_all()
    if not body.background:
        return EventStream(turn.frames(), turn.close, turn.framing)
    known = request_state(http)
    known.work = state.drain.run(turn.run(known), turn.close)
    if body.stream:
        return EventStream(_followed(http, entry.id, -1), framing=FRAMING)
    return json_response(entry.body)


class InputTokens(Struct, frozen=True):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


@router.post("/v1/responses/input_tokens", answer=InputTokens, body=ResponsesRequest)
async def count_input_tokens(http: Request) -> Response:
    """Return how many tokens the prompt of /v1/responses would have."""
    state = state_of(http)
    body = await state.bodies.read(http, ResponsesRequest)
    earlier = await _earlier(http, body)
    picked = state.pick(http, body.model)

    tools = ResponsesTools(body.tools or ())
    conversation, made = await run_for_body(
        http, lambda: conversation_of(body, tools, [_decode(data) for _, data in earlier()])
    )
    async with picked.model.starter.admitted(http, 1, needs_engine=False):
        with naming_fields(made.origin):
            return json_response(InputTokens(await count_prompt_tokens(http, picked.model, conversation)))


async def _earlier(http: Request, body: ResponsesRequest) -> Callable[[], list[Item]]:
    """Return what unpacks the items before those of a request, which count for its size.

    Raises ApiError (404), RequestError.
    """
    if body.previous_response_id is not None:
        name, id, is_response = "previous_response_id", body.previous_response_id, True
    elif body.conversation_id is not None:
        name, id, is_response = "conversation", body.conversation_id, False
    else:
        return list
    context = await state_of(http).owned.ask(StoreService.context, owner_of(http), id, is_response, name)
    if context.problem:
        raise RequestError(f"{name}: {id[:100]!r} {context.problem}", name)
    known = request_state(http)
    known.hold(context.num_bytes)
    known.body_bytes += context.num_bytes
    return lambda: unpack(context.items) + context.output


async def _followed(http: Request, id: str, after: int) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stored response after that number, until it has ended."""
    owned, owner = state_of(http).owned, owner_of(http)
    while True:
        found = await owned.ask(StoreService.events, owner, id, after)
        if found is None:
            raise ApiError(404, "the events of this response are not kept any more")
        if found.events:
            yield b"".join(found.events)
        after += len(found.events)
        if found.is_over:
            return


async def _find(http: Request, when_ended: bool = False) -> Found:
    """Return the response that is asked for. Raises ApiError (404)."""
    id = http.path_params["response_id"]
    return await state_of(http).owned.ask(StoreService.response, owner_of(http), id, when_ended)


@stored_router.get(_PATH, answer=ResponseAnswer, chunk=ResponseEvent, flags=("stream",), query=("starting_after",))
async def get_response(http: Request) -> Response:
    """Return a stored response as it is now; with `stream`, its events, and those that follow until it has ended.

    `starting_after`: only the events after the one of this sequence number.
    """
    is_stream, after = flag(http, "stream"), integer(http, "starting_after", -1, -1, 10**9)
    found = await _find(http)
    if not is_stream:
        return json_response(found.body)
    if not found.has_events:
        text = "stream: only events of responses in the background are kept, unless they take too much room"
        raise ApiError(400, f"{text}; get it without `stream`", "stream")
    return EventStream(_followed(http, http.path_params["response_id"], after), framing=FRAMING)


@stored_router.post(f"{_PATH}/cancel", answer=ResponseAnswer)
async def cancel_response(http: Request) -> Response:
    """End a response in the background; return it with its output so far. One that has ended is returned as it is."""
    found = await _find(http)
    if not found.is_background:
        raise ApiError(400, "only a response in the background can be cancelled; this one ends with its connection")
    while found.is_running:  # again and again: it may not have reached the engine yet
        await _abort(http)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                found = await cancel_on_disconnect(http, _find(http, when_ended=True))
    return json_response(found.body)


async def _abort(http: Request) -> None:
    key = request_state(http).caller.key
    await state_of(http).peers.ask(ServedModels.abort, {http.path_params["response_id"]}, key)


@stored_router.delete(_PATH, answer=Deleted)
async def delete_response(http: Request) -> Response:
    """Delete a stored response; one that runs in the background is cancelled. Those that follow it keep its items."""
    found, id = await _find(http), http.path_params["response_id"]
    await state_of(http).owned.ask(StoreService.delete, owner_of(http), id, True)
    if found.is_running and found.is_background:
        await _abort(http)
    return json_response(Deleted(id, "response"))


@stored_router.get(f"{_PATH}/input_items", answer=ItemList, query=("after", "limit", "order"))
async def list_input_items(http: Request) -> Response:
    """List the items that a response was given, with those before its input; the last ones first, unless `order` is
    asc."""
    asked = page_asked(http)
    owned, id = state_of(http).owned, http.path_params["response_id"]
    return json_response(ItemList.of(await owned.ask(StoreService.input_page, owner_of(http), id, *asked)))
