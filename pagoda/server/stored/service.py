"""StoreService: the store in the process that owns it, for those of any process that ask."""

import asyncio
import itertools
import logging

import msgspec

from pagoda.engine.clients.calls import offered
from pagoda.server.errors import ApiError
from pagoda.server.listing import Listed, page_of
from pagoda.server.stored.asking import not_found
from pagoda.server.stored.file import StoreFile
from pagoda.server.stored.store import (
    MAX_CONTEXT_BYTES,
    NO_ROOM,
    Item,
    Key,
    Store,
    StoredConversation,
    StoredResponse,
    StoreLimits,
)

logger = logging.getLogger("pagoda.server")

_WAIT_S = 30.0
"""How long a call waits for a change, so that those whose callers have left end, too."""
_EVENTS_AT_ONCE = 256
_BYTES_AT_ONCE = 2**20


class Found(msgspec.Struct, frozen=True):
    """What is known of a response."""

    body: bytes
    is_running: bool
    is_background: bool
    has_events: bool


class Context(msgspec.Struct, frozen=True):
    """The items of a response or a conversation.

    items: packed: of a response, those that its model was given.   output: those that it made.
    problem: why no input can follow them.
    """

    items: bytes
    output: list[Item] = []
    problem: str = ""

    @property
    def num_bytes(self) -> int:
        return len(self.items) + sum(len(data) for _, data in self.output)


_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_FAILED = msgspec.Raw(b'"failed"')
_LOST = msgspec.Raw(
    b'{"code":"server_error","message":'
    b'"the process that generated this response ended before it was complete; send the request again"}'
)
pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(list[Item]).decode


class Events(msgspec.Struct, frozen=True):
    """Some of a response's events, which begin after those that were seen.   is_over: no others will follow."""

    events: list[bytes]
    is_over: bool


def _first_of(events: list[bytes]) -> list[bytes]:
    """Return the first of some events, at least one if there is one, of not too many bytes together."""
    ends = itertools.accumulate(map(len, events))
    return [event for event, end in zip(events, ends, strict=True) if end <= _BYTES_AT_ONCE] or events[:1]


def failed_event(number: int, body: bytes) -> bytes:
    """Return the event that ends the stream of a response.   body: as JSON."""
    head = f'event: response.failed\ndata: {{"type":"response.failed","sequence_number":{number},"response":'
    return b"%b%b}\n\n" % (head.encode(), body)


class StoreService:
    """Answers what processes ask of the store."""

    def __init__(self, path: str | None = None, limits: StoreLimits | None = None) -> None:
        """path: of the file, if there is one. Raises ConfigError if it cannot be used."""
        self._file = None if path is None else StoreFile(path)
        self._changed: dict[Key, asyncio.Event] = {}
        if self._file is None:
            self._store = Store(limits)
            return
        self._store = Store(limits, on_change=self._file.write)
        for entry in self._file.load():
            self._store.restore(entry)
            if isinstance(entry, StoredResponse) and entry.is_running:
                self._lose(entry)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def end_client(self, client: int) -> None:
        """End the responses of a process that has gone."""
        for entry in self._store.running(client):
            self._lose(entry)

    def _lose(self, entry: StoredResponse) -> None:
        body = msgspec.json.encode(_decode(entry.body) | {"status": _FAILED, "error": _LOST})
        self.append(0, *entry.key, [failed_event(len(entry.events or ()), body)])
        self.finish(0, *entry.key, body, [])

    # ---- responses

    @offered
    async def add(self, client: int, entry: StoredResponse | StoredConversation) -> None:
        """Keep a new entry. Raises NO_ROOM."""
        if isinstance(entry, StoredResponse):
            entry.client = client
            if entry.conversation and self._store.conversation(entry.owner, entry.conversation) is None:
                entry.conversation = ""  # deleted meanwhile
            # Checked now, while the caller can still get the error; what a turn makes is then added at any size.
            self._store.check_room(entry.owner, entry.conversation, entry.own, num_more=1)
        self._store.add(entry)

    @offered
    def append(self, client: int, owner: str, id: str, events: list[bytes], body: bytes = b"") -> None:
        """Add events to a response.   body: replaces the one before, unless it is empty."""
        self._store.append(owner, id, events, body)
        self._wake((owner, id))

    @offered
    def finish(self, client: int, owner: str, id: str, body: bytes, output: list[Item]) -> None:
        try:
            self._store.finish(owner, id, body, output)
        except NO_ROOM as error:
            logger.warning("the items of a response are not added to its conversation: %s", error)
        self._wake((owner, id))

    @offered
    async def response(self, client: int, owner: str, id: str, when_ended: bool) -> Found:
        """Return what is known of a response.   when_ended: once it has ended, or after a while.

        Raises ApiError (404).
        """
        until_s = _now() + _WAIT_S
        while (entry := self._response(owner, id)).is_running and when_ended:
            if not await self._has_changed((owner, id), until_s):
                break
        return Found(entry.body, entry.is_running, entry.is_background, entry.events is not None)

    @offered
    async def events(self, client: int, owner: str, id: str, after: int) -> Events | None:
        """Return the events after that number, once there are any, or none after a while.

        None if they are not kept, or not any more.
        """
        until_s = _now() + _WAIT_S
        while (entry := self._store.response(owner, id)) is not None and entry.events is not None:
            found = _first_of(entry.events[after + 1 : after + 1 + _EVENTS_AT_ONCE])
            is_over = not entry.is_running and after + 1 + len(found) >= len(entry.events)
            if found or is_over or not await self._has_changed((owner, id), until_s):
                return Events(found, is_over)
        return None

    @offered
    async def delete(self, client: int, owner: str, id: str, is_response: bool) -> None:
        """Delete an entry. Raises ApiError (404)."""
        (self._response if is_response else self._conversation)(owner, id)
        self.drop(client, owner, id)

    @offered
    def drop(self, client: int, owner: str, id: str) -> None:
        self._store.delete(owner, id)
        self._wake((owner, id))

    # ---- items

    @offered
    async def context(self, client: int, owner: str, id: str, is_response: bool, param: str = "response_id") -> Context:
        """Return the items of a response or a conversation. Raises ApiError (404).   param: that names it."""
        if is_response:
            response = self._response(owner, id, param)
            problem = "has not ended yet; wait for it" if response.is_running else ""
            context = Context(response.items, response.output, problem)
            return _too_large(context.num_bytes) or context
        conversation = self._conversation(owner, id, param)
        items = list(conversation.items.items())
        return _too_large(conversation.num_bytes) or Context(await asyncio.to_thread(pack, items))

    @offered
    async def input_page(
        self, client: int, owner: str, id: str, after: str, limit: int, is_ascending: bool
    ) -> Listed[bytes]:
        """Return some of the items that a response was given, see page_of. Raises ApiError (404)."""
        packed = self._response(owner, id).items
        return await asyncio.to_thread(lambda: page_of(dict(unpack(packed)), "item", after, limit, is_ascending))

    # ---- conversations

    @offered
    async def conversation(self, client: int, owner: str, id: str) -> bytes:
        """Return the body of a conversation. Raises ApiError (404)."""
        return self._conversation(owner, id).body

    @offered
    async def page(self, client: int, owner: str, id: str, after: str, limit: int, is_ascending: bool) -> Listed[bytes]:
        """Return some items of a conversation, see page_of. Raises ApiError (404)."""
        return page_of(self._conversation(owner, id).items, "item", after, limit, is_ascending)

    @offered
    async def item(self, client: int, owner: str, id: str, item: str) -> bytes:
        """Return an item of a conversation. Raises ApiError (404)."""
        if (found := self._conversation(owner, id).items.get(item)) is None:
            raise ApiError(404, f"item_id: the conversation has no item {item[:100]!r}", "item_id")
        return found

    @offered
    async def change_conversation(self, client: int, owner: str, id: str, body: bytes) -> None:
        self._store.change_conversation(owner, id, body)

    @offered
    async def add_items(self, client: int, owner: str, id: str, items: list[Item]) -> None:
        """Add items to a conversation. Raises ApiError (404), NO_ROOM."""
        self._conversation(owner, id)
        self._store.check_room(owner, id, items)
        self._store.add_items(owner, id, items)

    @offered
    async def delete_item(self, client: int, owner: str, id: str, item: str) -> bytes:
        """Delete an item of a conversation, and return the conversation's body. Raises ApiError (404)."""
        await self.item(client, owner, id, item)
        self._store.delete_item(owner, id, item)
        return self._conversation(owner, id).body

    # ---- what is found

    def _response(self, owner: str, id: str, param: str = "response_id") -> StoredResponse:
        """Return a response. Raises ApiError (404).   param: that names it."""
        if (entry := self._store.response(owner, id)) is None:
            raise not_found("response", id, param)
        return entry

    def _conversation(self, owner: str, id: str, param: str = "conversation_id") -> StoredConversation:
        if (entry := self._store.conversation(owner, id)) is None:
            raise not_found("conversation", id, param)
        return entry

    # ---- who waits

    async def _has_changed(self, key: Key, until_s: float) -> bool:
        """Wait for the next change of an entry; return False if there was none until then."""
        try:
            async with asyncio.timeout_at(until_s):
                return await self._changed.setdefault(key, asyncio.Event()).wait()
        except TimeoutError:
            return False

    def _wake(self, key: Key) -> None:
        if (event := self._changed.pop(key, None)) is not None:
            event.set()


def _too_large(num_bytes: int) -> Context | None:
    if num_bytes <= MAX_CONTEXT_BYTES:
        return None
    return Context(b"", problem=f"has items of {num_bytes} bytes, which are more than {MAX_CONTEXT_BYTES}")


def _now() -> float:
    return asyncio.get_running_loop().time()
