"""/v1/conversations: OpenAI's conversations, to whose items responses add theirs."""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.server.body import Body
from pagoda.server.body_reader import run_for_body
from pagoda.server.dialects.responses.bodies import MAX_ADDED, InputItem
from pagoda.server.dialects.responses.input import check_items
from pagoda.server.listing import page_asked
from pagoda.server.routing import Router
from pagoda.server.sending import json_response
from pagoda.server.state import state_of
from pagoda.server.stored.asking import NOT_FOUND, Deleted, owner_of
from pagoda.server.stored.items import ItemList, all_of, given_items
from pagoda.server.stored.service import StoreService
from pagoda.server.stored.store import StoredConversation

router = Router(errors=NOT_FOUND)
_PATH = "/v1/conversations/{conversation_id}"
Items = Annotated[list[InputItem], Meta(max_length=MAX_ADDED)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class ConversationRequest(Body, kw_only=True, frozen=True):
    """POST /v1/conversations

    items: What it begins with.
    """

    items: Items | None = None
    metadata: Metadata | None = None

    def check(self, limits: RequestLimits) -> None:
        _check_items(self.items or (), limits)


class ConversationUpdate(Body, kw_only=True, frozen=True):
    """POST /v1/conversations/{conversation_id}

    metadata: Replaces the former; none with null.
    """

    metadata: Metadata | None


class ItemsRequest(Body, kw_only=True, frozen=True):
    """POST /v1/conversations/{conversation_id}/items

    items: What is added at the end. One whose id is there already replaces it.
    """

    items: Items

    def check(self, limits: RequestLimits) -> None:
        _check_items(self.items, limits)


def _check_items(items: Sequence[InputItem], limits: RequestLimits) -> None:
    for index, item in enumerate(items):
        if item.kind == "item_reference":
            raise RequestError(f"items[{index}]: expected an item, not a reference to one", f"items[{index}]")
    check_items("items", items, limits)


class ConversationAnswer(Struct, frozen=True):
    """A conversation."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"


def _id_of(http: Request) -> str:
    return http.path_params["conversation_id"]


async def _body_of(http: Request) -> bytes:
    """Return the body of the conversation that is asked for. Raises ApiError (404)."""
    return await state_of(http).owned.ask(StoreService.conversation, owner_of(http), _id_of(http))


@router.post("/v1/conversations", body=ConversationRequest, answer=ConversationAnswer)
async def create_conversation(http: Request) -> Response:
    """Begin a conversation, which belongs to the key that is used."""
    state = state_of(http)
    body = await state.bodies.read(http, ConversationRequest)
    items = dict(await given_items(http, "items"))
    answer = ConversationAnswer(f"conv_{uuid.uuid4().hex}", int(time.time()), body.metadata or {})
    entry = StoredConversation(owner=owner_of(http), id=answer.id, body=msgspec.json.encode(answer), items=items)
    await state.owned.ask(StoreService.add, entry)
    return json_response(entry.body)


@router.get(_PATH, answer=ConversationAnswer)
async def get_conversation(http: Request) -> Response:
    """Return a conversation, without its items."""
    return json_response(await _body_of(http))


@router.post(_PATH, body=ConversationUpdate, answer=ConversationAnswer)
async def update_conversation(http: Request) -> Response:
    """Replace the metadata of a conversation."""
    state = state_of(http)
    body = await state.bodies.read(http, ConversationUpdate)
    former = msgspec.json.decode(await _body_of(http), type=ConversationAnswer)
    answer = msgspec.json.encode(msgspec.structs.replace(former, metadata=body.metadata or {}))
    await state.owned.ask(StoreService.change_conversation, owner_of(http), former.id, answer)
    return json_response(answer)


@router.delete(_PATH, answer=Deleted)
async def delete_conversation(http: Request) -> Response:
    """Delete a conversation and its items. Responses that used it keep what they were given."""
    await state_of(http).owned.ask(StoreService.delete, owner_of(http), _id_of(http), False)
    return json_response(Deleted(_id_of(http), "conversation.deleted"))


@router.get(f"{_PATH}/items", answer=ItemList, query=("after", "limit", "order"))
async def list_conversation_items(http: Request) -> Response:
    """List items of a conversation: the last ones first, unless `order` is asc."""
    asked = page_asked(http)
    page = await state_of(http).owned.ask(StoreService.page, owner_of(http), _id_of(http), *asked)
    return json_response(ItemList.of(page))


@router.post(f"{_PATH}/items", body=ItemsRequest, answer=ItemList)
async def create_conversation_items(http: Request) -> Response:
    """Add items to a conversation, and return them."""
    state = state_of(http)
    await state.bodies.read(http, ItemsRequest)
    items = await given_items(http, "items")
    await state.owned.ask(StoreService.add_items, owner_of(http), _id_of(http), items)
    return await run_for_body(http, lambda: json_response(ItemList.of(all_of(items))))


@router.get(f"{_PATH}/items/{{item_id}}", answer="application/json")
async def get_conversation_item(http: Request) -> Response:
    """Return an item of a conversation."""
    item = http.path_params["item_id"]
    return json_response(await state_of(http).owned.ask(StoreService.item, owner_of(http), _id_of(http), item))


@router.delete(f"{_PATH}/items/{{item_id}}", answer=ConversationAnswer)
async def delete_conversation_item(http: Request) -> Response:
    """Delete an item of a conversation, which is returned without its items."""
    item = http.path_params["item_id"]
    return json_response(await state_of(http).owned.ask(StoreService.delete_item, owner_of(http), _id_of(http), item))
