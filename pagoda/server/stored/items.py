"""Items of stored conversations: as requests give them, and as answers list them."""

import re
import uuid
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import msgspec
from msgspec import Raw
from starlette.requests import Request

from pagoda.server.body_reader import run_for_body
from pagoda.server.listing import Listed, page_of
from pagoda.server.stored.store import Item

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
"""Of ids, by the type of an item."""
_ID = re.compile(r"[\w-]{1,128}", re.ASCII)


async def given_items(http: Request, name: str) -> list[Item]:
    """Return the items in a field of a request's body, whose form was checked. Each has an id, a type and its parts as
    a list.

    References are left out: what they refer to comes before the input.
    """
    return await run_for_body(http, partial(_items_of, await http.body(), name))


@cache
def _decoder(name: str) -> msgspec.json.Decoder[Any]:
    """Return what finds a field of items, and passes over all others."""
    return msgspec.json.Decoder(msgspec.defstruct("Given", [(name, str | list[dict[str, Any]] | None, None)]))


def _items_of(data: bytes, name: str) -> list[Item]:
    items = getattr(_decoder(name).decode(data), name) or []
    each = [{"role": "user", "content": items}] if isinstance(items, str) else items
    return [_whole(kind, one) for one in each if (kind := _kind_of(one)) != "item_reference"]


def _kind_of(given: dict[str, Any]) -> str:
    return given.get("type") or ("message" if given.get("role") is not None else "item_reference")


def _whole(kind: str, given: dict[str, Any]) -> Item:
    item = {"type": kind, **{name: value for name, value in given.items() if value is not None}}
    if not _ID.fullmatch(item.get("id") or ""):
        item["id"] = f"{_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"
    if kind == "message":
        item.setdefault("status", "completed")
    if kind == "message" and isinstance(text := item.get("content"), str):
        is_output = item.get("role") == "assistant"
        part = {"type": "output_text", "text": text, "annotations": []} if is_output else {}
        item["content"] = [part or {"type": "input_text", "text": text}]
    return item["id"], msgspec.json.encode(item)


class ItemList(Listed[Raw], frozen=True):
    """Items of a conversation, of those that were asked for."""

    @classmethod
    def of(cls, page: Listed[bytes]) -> "ItemList":
        return cls([*map(Raw, page.data)], page.first_id or "", page.last_id or "", page.has_more)


def all_of(items: Sequence[Item]) -> Listed[bytes]:
    """Return items as a list."""
    return page_of(dict(items), "item", "", len(items), True)
