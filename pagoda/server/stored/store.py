"""Store: the responses and conversations that a server keeps, each for the API key that made it.

Bounded in number, bytes and age, of each key and in all: what was changed least recently goes first, but never a
response that runs. It reads nothing of the JSON that it holds. For one event loop, so it needs no lock.
"""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from pagoda.base.errors import RequestError
from pagoda.server.admission import Refusal

Item = tuple[str, bytes]
"""An item of a conversation: its id, and the item as JSON."""
Key = tuple[str, str]
"""The owner and the id of an entry."""

ENTRY_BYTES = 1024
"""What an entry counts for besides its content."""
PART_BYTES = 128
"""What each of its items and events counts for besides its content."""
MAX_CONVERSATION_ITEMS = 10_000
MAX_CONTEXT_BYTES = 16 * 2**20
"""The most bytes of items that come before an input, and that a conversation grows to."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much is kept: responses and conversations, and their bytes, of one key and in all; for how long.

    key_background: responses of a key that may run in the background at once.
    """

    key_entries: int = 2_000
    key_bytes: int = 64 * 2**20
    entries: int = 10_000
    num_bytes: int = 256 * 2**20
    age_s: float = 30 * 86_400.0
    key_background: int = 100


NO_ROOM = (Refusal, RequestError)
"""What is raised if there is no room: now, or even if nothing else were kept."""


def _full(message: str) -> Refusal:
    return Refusal("stored", message)


def _too_large(message: str) -> RequestError:
    return RequestError(f"{message}; send less, or store: false", "store")


class Entry(msgspec.Struct, eq=False, kw_only=True):
    """A response or a conversation.

    owner: the key that made it.   body: what its GET answers, as JSON.   changed_s: when, by time.time.
    num_bytes: what it counts for. Both are set by the store.
    """

    owner: str
    id: str
    body: bytes
    changed_s: float = 0.0
    num_bytes: int = 0

    @property
    def key(self) -> Key:
        return self.owner, self.id

    @property
    def may_go(self) -> bool:
        """Whether it may be removed to make room."""
        return True


class StoredResponse(Entry, tag="response", eq=False, kw_only=True):
    """A response.

    client: the process that runs it.
    items: that the model was given, packed, so that none of it is looked at here.   output: those that it made.
    events: of its stream, each as it was sent; None: they are not kept.
    conversation: to which its input, `own`, and its output are added when it ends.
    """

    items: bytes
    own: list[Item] = []
    output: list[Item] = []
    events: list[bytes] | None = None
    conversation: str = ""
    is_background: bool = False
    is_running: bool = True
    client: int = 0

    @property
    def may_go(self) -> bool:
        return not self.is_running


class StoredConversation(Entry, tag="conversation", eq=False, kw_only=True):
    """A conversation.   items: by their ids, in order."""

    items: dict[str, bytes] = {}


def size_of(entry: Entry) -> int:
    """Return what an entry counts for, in bytes."""
    size = ENTRY_BYTES + len(entry.body)
    if isinstance(entry, StoredConversation):
        return size + _size(entry.items.values())
    assert isinstance(entry, StoredResponse)
    parts = [data for _, data in (*entry.own, *entry.output)]
    return size + len(entry.items) + _size(parts) + _size(entry.events or ())


def _size(parts: Iterable[bytes]) -> int:
    return sum(len(part) + PART_BYTES for part in parts)


@dataclass(slots=True)
class _Use:
    """What one key, or all, have in the store.

    fixed_*: of that, what may not go.   order: what may, the least recently changed first.
    """

    max_entries: int
    max_bytes: int
    num_entries: int = 0
    num_bytes: int = 0
    fixed_entries: int = 0
    fixed_bytes: int = 0
    num_background: int = 0
    order: OrderedDict[Key, Entry] = field(default_factory=OrderedDict[Key, Entry])

    def count(self, entry: Entry, sign: int) -> None:
        self.num_entries += sign
        self.num_bytes += sign * entry.num_bytes
        if entry.may_go:
            if sign > 0:
                self.order[entry.key] = entry
            else:
                del self.order[entry.key]
            return
        self.fixed_entries += sign
        self.fixed_bytes += sign * entry.num_bytes
        self.num_background += sign * (isinstance(entry, StoredResponse) and entry.is_background)

    def is_over(self, more_entries: int, more_bytes: int) -> bool:
        return self.num_entries + more_entries > self.max_entries or self.num_bytes + more_bytes > self.max_bytes

    def is_full(self, more_entries: int, more_bytes: int) -> bool:
        """Return whether there would be no room even if all went that may."""
        return self.fixed_entries + more_entries > self.max_entries or self.fixed_bytes + more_bytes > self.max_bytes


OnChange = Callable[[Key, str, Entry | bytes | None], object]
"""Called with what is to be written: an entry's key, the id of an item of it or "", and the value; None: it is gone."""


class Store:
    """The entries of all keys. None is changed but by its methods."""

    def __init__(
        self,
        limits: StoreLimits | None = None,
        now: Callable[[], float] = time.time,
        on_change: OnChange = lambda key, item, value: None,
    ) -> None:
        self._limits = limits = limits or StoreLimits()
        self._now, self._on_change = now, on_change
        self._entries: dict[Key, Entry] = {}
        self._all = _Use(limits.entries, limits.num_bytes)
        self._of: defaultdict[str, _Use] = defaultdict(lambda: _Use(limits.key_entries, limits.key_bytes))

    @property
    def num_bytes(self) -> int:
        return self._all.num_bytes

    def response(self, owner: str, id: str) -> StoredResponse | None:
        entry = self._find(owner, id)
        return entry if isinstance(entry, StoredResponse) else None

    def conversation(self, owner: str, id: str) -> StoredConversation | None:
        entry = self._find(owner, id)
        return entry if isinstance(entry, StoredConversation) else None

    def running(self, client: int) -> list[StoredResponse]:
        """Return the responses that a process runs."""
        each = (one for one in self._entries.values() if isinstance(one, StoredResponse))
        return [one for one in each if one.is_running and one.client == client]

    def add(self, entry: Entry) -> None:
        """Keep a new entry. Raises NO_ROOM."""
        self._drop_old()
        is_background = isinstance(entry, StoredResponse) and entry.is_background and entry.is_running
        num, most = self._of[entry.owner].num_background, self._limits.key_background
        if is_background and num >= most:
            raise _full(f"this key has {num} responses in the background of {most}; wait for one, or cancel it")
        entry.num_bytes = size_of(entry)
        self._make_room(entry.owner, 1, entry.num_bytes)
        self._put(entry)

    def restore(self, entry: Entry) -> None:
        """Take back an entry that was kept before: those that were changed least recently come first."""
        changed_s = entry.changed_s
        entry.num_bytes = size_of(entry)
        self._insert(entry)
        entry.changed_s = changed_s

    def append(self, owner: str, id: str, events: Sequence[bytes], body: bytes = b"") -> None:
        """Add events to a response that runs; keep none of it from now on if there is no room for them.

        body: replaces the one before, unless it is empty.
        """
        entry = self.response(owner, id)
        if entry is None or not entry.is_running or entry.events is None:
            return
        body = body or entry.body
        size = _size(events) + len(body) - len(entry.body)
        try:
            self._make_room(owner, 0, size)
        except NO_ROOM:
            self._grow(entry, -_size(entry.events))
            entry.events = None
        else:
            self._grow(entry, size)
            entry.events += events
            entry.body = body

    def finish(self, owner: str, id: str, body: bytes, output: list[Item]) -> None:
        """Note how a response has ended; it may go from now on.

        Raises NO_ROOM, after that, if its items do not fit into its conversation.
        """
        entry = self.response(owner, id)
        if entry is None or not entry.is_running:
            return
        self._take(entry)
        entry.body, entry.output, entry.is_running = body, output, False
        entry.num_bytes = size_of(entry)
        self._put(entry)
        self._make_room(owner, 0, 0)
        if entry.conversation:
            self.add_items(owner, entry.conversation, [*entry.own, *output])

    def delete(self, owner: str, id: str) -> None:
        if (entry := self._entries.get((owner, id))) is not None:
            self._remove(entry)

    def change_conversation(self, owner: str, id: str, body: bytes) -> None:
        """Replace the body of a conversation. Raises NO_ROOM."""
        if (entry := self.conversation(owner, id)) is not None:
            self._change(entry, len(body) - len(entry.body))
            entry.body = body
            self._on_change(entry.key, "", entry)

    def check_room(self, owner: str, id: str, items: Sequence[Item], num_more: int = 0) -> None:
        """Check that a conversation may have these items, too, and a number of others. Raises NO_ROOM."""
        if (entry := self.conversation(owner, id)) is not None:
            new = {item: data for item, data in items if item not in entry.items}
            most = f"a conversation has at most {MAX_CONVERSATION_ITEMS} items and {MAX_CONTEXT_BYTES} bytes"
            if len(entry.items) + len(new) + num_more > MAX_CONVERSATION_ITEMS:
                raise _too_large(f"{most}; this one has {len(entry.items)} items")
            if entry.num_bytes + _size(new.values()) > MAX_CONTEXT_BYTES:
                raise _too_large(f"{most}; this one has {entry.num_bytes} bytes")

    def add_items(self, owner: str, id: str, items: Sequence[Item]) -> None:
        """Add items to a conversation, if it is still there. Raises NO_ROOM if their key has no room for them."""
        if (entry := self.conversation(owner, id)) is not None:
            new = dict(items)
            gone = [entry.items[item] for item in new if item in entry.items]
            self._change(entry, _size(new.values()) - _size(gone))
            entry.items.update(new)
            self._on_change(entry.key, "", entry)
            for item, data in new.items():
                self._on_change(entry.key, item, data)

    def delete_item(self, owner: str, id: str, item: str) -> None:
        if (entry := self.conversation(owner, id)) is not None and item in entry.items:
            self._change(entry, -_size((entry.items.pop(item),)))
            self._on_change(entry.key, "", entry)
            self._on_change(entry.key, item, None)

    # ---- the entries, and what they count for

    def _find(self, owner: str, id: str) -> Entry | None:
        self._drop_old()
        return self._entries.get((owner, id))

    def _drop_old(self) -> None:
        before_s = self._now() - self._limits.age_s
        while (first := next(iter(self._all.order.values()), None)) is not None and first.changed_s < before_s:
            self._remove(first)

    def _make_room(self, owner: str, more_entries: int, more_bytes: int) -> None:
        """Remove entries until there is room for more. Raises NO_ROOM, and removes none, if there can be none."""
        uses = (self._of[owner], self._all)
        if any(more_bytes > use.max_bytes for use in uses):
            most = min(use.max_bytes for use in uses)
            raise _too_large(f"{more_bytes} bytes are more than this server keeps for a key ({most})")
        if any(use.is_full(more_entries, more_bytes) for use in uses):
            raise _full("the server is full: it keeps too much of responses that run")
        for use in uses:
            while use.is_over(more_entries, more_bytes):
                self._remove(next(iter(use.order.values())))

    def _change(self, entry: Entry, more_bytes: int) -> None:
        """Count more bytes for an entry that may go, which is the last to go now. Raises NO_ROOM."""
        self._take(entry)
        try:
            self._make_room(entry.owner, 1, entry.num_bytes + more_bytes)
            entry.num_bytes += more_bytes
        finally:
            self._insert(entry)

    def _grow(self, entry: Entry, more_bytes: int) -> None:
        """Count more bytes for an entry that may not go."""
        entry.num_bytes += more_bytes
        for use in (self._of[entry.owner], self._all):
            use.num_bytes += more_bytes
            use.fixed_bytes += more_bytes

    def _put(self, entry: Entry) -> None:
        self._insert(entry)
        self._on_change(entry.key, "", entry)
        for item, data in entry.items.items() if isinstance(entry, StoredConversation) else ():
            self._on_change(entry.key, item, data)

    def _insert(self, entry: Entry) -> None:
        entry.changed_s = self._now()
        self._entries[entry.key] = entry
        for use in (self._of[entry.owner], self._all):
            use.count(entry, 1)

    def _take(self, entry: Entry) -> None:
        """Take an entry out, to change what it counts for."""
        for use in (self._of[entry.owner], self._all):
            use.count(entry, -1)
        del self._entries[entry.key]
        if not self._of[entry.owner].num_entries:
            del self._of[entry.owner]

    def _remove(self, entry: Entry) -> None:
        self._take(entry)
        self._on_change(entry.key, "", None)
