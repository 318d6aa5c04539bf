"""Lists that are read a page at a time: what is asked for, and what it is of the list."""

from collections.abc import Mapping
from typing import Generic, TypeVar

from msgspec import Struct
from starlette.requests import Request

from pagoda.base.errors import RequestError
from pagoda.server.routing import integer

T = TypeVar("T")
MAX_LIMIT = 100


class Listed(Struct, Generic[T], frozen=True):
    """Some of a list, by the ids of the first and the last one.   has_more: others follow the last one."""

    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def page_asked(http: Request, usual: int = 20, most: int = MAX_LIMIT) -> tuple[str, int, bool]:
    """Return `after`, `limit`, and whether the order is ascending, of the URL of a list. Raises RequestError."""
    asked = http.query_params
    after, order = asked.get("after", ""), asked.get("order", "desc")
    limit = integer(http, "limit", usual, 1, most)
    if order not in ("asc", "desc"):
        raise RequestError(f"order: expected asc or desc, got {order!r:.80}", "order")
    return after, limit, order == "asc"


def page_of(entries: Mapping[str, T], what: str, after: str, limit: int, is_ascending: bool) -> Listed[T]:
    """Return some entries after the one of an id ("": from the first on).

    entries: by id, in ascending order.   what: an entry is called.   Raises RequestError if there is no such id.
    """
    if after and after not in entries:
        raise RequestError(f"after: there is no {what} {after[:100]!r}", "after")
    ids = list(entries) if is_ascending else list(entries)[::-1]
    begin = ids.index(after) + 1 if after else 0
    some = ids[begin : begin + limit]
    first, last = (some[0], some[-1]) if some else (None, None)
    return Listed([entries[id] for id in some], first, last, begin + limit < len(ids))
