"""ExecutorPreparations: which grammars and adapters the ranks have, prepared by calls that hold requests back."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import islice
from typing import Any, Generic, TypeVar

from pagoda.base.errors import RequestError, WorkerDied
from pagoda.core.events import Reason
from pagoda.core.request import LoraRef, Request, RequestKey
from pagoda.engine.executor import Executor

logger = logging.getLogger("pagoda")

T = TypeVar("T")

MAX_IDLE_GRAMMARS = 256
"""Grammars that are kept next to those of running requests."""


class ExecutorPreparations:
    """See core.state.Preparations. Nothing else decides what the ranks keep.

    max_running: most requests that run at once.   max_adapters: that the ranks have room for; 0 without adapters.
    """

    def __init__(self, executor: Executor, max_running: int, max_adapters: int = 0) -> None:
        limit = MAX_IDLE_GRAMMARS + max_running
        self.takes_adapters = max_adapters > 0
        self._grammars = _PreparedItems[str](executor, "prepare_grammar", "drop_grammar", limit, lambda text: text)
        self._adapters = _PreparedItems[LoraRef](
            executor, "load_adapter", "unload_adapter", max_adapters, lambda lora: lora.identity, self._on_replaced
        )
        self._max_adapters, self.num_adapters_dropped = max_adapters, 0

    @property
    def num_adapters_read(self) -> int:
        return self._adapters.num_begun

    def _on_replaced(self, dropped: LoraRef, other: LoraRef) -> None:
        self.num_adapters_dropped += 1
        text = "the adapter %s was dropped from memory for %s (max_cpu_loras is %d); its next request reads it again"
        logger.info(text, dropped.name, other.name, self._max_adapters)

    def begin(self, request: Request) -> None:
        """Begin to compile the grammar of a request that is queued, if there is room."""
        if request.grammar is not None:
            self._grammars.ask(request.grammar)

    def why_not_ready(self, request: Request) -> Reason | None:
        grammar, lora, key = request.grammar, request.lora, request.key
        if grammar is not None and not self._grammars.is_ready(grammar, "the grammar", key):
            if lora is not None:
                self._adapters.forget(lora, key)  # those who have a grammar may need its place
            return Reason.GRAMMAR
        if lora is not None and not self._adapters.is_ready(lora, f"the adapter {lora.name!r}", key):
            return Reason.ADAPTER
        return None

    def take_woken(self) -> list[RequestKey]:
        return [*self._grammars.take_woken(), *self._adapters.take_woken()]

    def forget(self, request: Request) -> None:
        if request.grammar is not None:
            self._grammars.forget(request.grammar, request.key)
        if request.lora is not None:
            self._adapters.forget(request.lora, request.key)

    def pin(self, request: Request) -> None:
        if request.grammar is not None:
            self._grammars.pin(request.grammar)
        if request.lora is not None:
            self._adapters.pin(request.lora.identity)

    def unpin(self, request: Request) -> None:
        if request.grammar is not None:
            self._grammars.unpin(request.grammar)
        if request.lora is not None:
            self._adapters.unpin(request.lora.identity)

    def begin_load(self, lora: LoraRef) -> "Future[Any]":
        """Begin to load an adapter, over the limit if running requests use all that there is room for."""
        return self._adapters.load(lora)

    def end_load(self, lora: LoraRef, loaded: "Future[Any]") -> None:
        """Wait for what `begin_load` returned. Raises PagodaError that says why the adapter cannot be used."""
        try:
            loaded.result()
        except BaseException:
            self._adapters.drop(lora)
            raise
        self._adapters.fits(lora)

    def unload_adapter(self, lora: LoraRef) -> None:
        """Free an adapter's memory once no running request uses it. Ignore one that is not loaded."""
        self._adapters.drop(lora)

    def wait(self, timeout_s: float) -> None:
        """Return when something has been prepared, when nothing is being prepared, or after `timeout_s`."""
        if pending := [*self._grammars.pending(), *self._adapters.pending()]:
            wait(pending, timeout_s, FIRST_COMPLETED)


class _PreparedItems(Generic[T]):
    """What the ranks have of one kind, or prepare: at most `limit`. Those asked for least recently are dropped first.

    prepare, drop: names of the calls.   key: of an item.   on_replaced: called when one is dropped for another.
    num_begun: how often one was prepared.
    pins: by key. What is pinned, still being prepared, or was prepared for a request that has not entered yet, is not
    dropped: requests that wait would take it from each other.
    """

    def __init__(
        self,
        executor: Executor,
        prepare: str,
        drop: str,
        limit: int,
        key: Callable[[T], Hashable],
        on_replaced: Callable[[T, T], object] = lambda dropped, other: None,
    ) -> None:
        self.num_begun = 0
        self.pins: Counter[Hashable] = Counter()
        self._executor, self._prepare, self._drop = executor, prepare, drop
        self._limit, self._key, self._on_replaced = limit, key, on_replaced
        self._known: OrderedDict[Hashable, tuple[T, Future[Any]]] = OrderedDict()
        self._waiting: dict[Hashable, dict[RequestKey, None]] = {}  # requests, since the item was last pinned
        self._without_room: dict[RequestKey, None] = {}  # requests, in the order in which they asked
        self._may_have_room = False  # something has changed since the first of them asked
        self._unfinished: dict[Hashable, Future[Any]] = {}  # by key: not done yet when `take_woken` last looked
        self._woken: list[RequestKey] = []  # requests, for `take_woken`

    def ask(self, item: T) -> "Future[Any] | None":
        """Return when the ranks have it; begin to prepare it if that has not begun. None: there is no room yet."""
        key = self._key(item)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known[1]
        if not self._make_room(item):
            return None
        return self._begin(key, item)

    def _begin(self, key: Hashable, item: T) -> "Future[Any]":
        future = self._executor.call(self._prepare, item)
        self._known[key] = (item, future)
        self.num_begun += 1
        self._unfinished[key] = future
        return future

    def is_ready(self, item: T, what: str, request: RequestKey) -> bool:
        """Return whether the ranks have it; ask for it if not. Raises RequestError, once, if that has failed.

        what: how the error calls the item.   request: what `take_woken` returns when that may have changed.
        """
        future = self.ask(item)
        if future is not None and not future.done():
            self._waiting.setdefault(self._key(item), {})[request] = None
            self._leave_line(request)
            return False
        error = future.exception() if future is not None else None
        if isinstance(error, WorkerDied):  # the next step raises it, too
            return True
        if error is not None:
            self.drop(item)  # some ranks may have it; the next request for it tries again
            logger.warning("%s cannot be used: %s", what, error)
            raise RequestError(f"{what} cannot be used: {error}") from error
        if future is None or not self.fits(item):
            self._without_room.setdefault(request)
            return False
        self._leave_line(request)
        return True

    def _leave_line(self, request: RequestKey) -> None:
        """The request needs no room, or has it: the next one without may ask."""
        if request in self._without_room:
            del self._without_room[request]
            self._may_have_room = True

    def take_woken(self) -> list[RequestKey]:
        """Return the requests whose item is prepared, and of the first without room if there may be some now."""
        for key in [key for key, future in self._unfinished.items() if future.done()]:
            del self._unfinished[key]
            self._woken += self._waiting.get(key, ())
            self._may_have_room = True
        woken, self._woken = self._woken, []
        if self._may_have_room:
            self._may_have_room = False
            woken += islice(self._without_room, 1)
        return woken

    def forget(self, item: T, request: RequestKey) -> None:
        """The request does not wait for the item."""
        key = self._key(item)
        waiting = self._waiting.get(key)
        if waiting is not None and waiting.pop(request, 0) is None and not waiting:
            del self._waiting[key]
            self._may_have_room = True
        self._leave_line(request)

    def pin(self, key: Hashable) -> None:
        self.pins[key] += 1
        waiting = self._waiting.pop(key, ())
        if key in self._unfinished:  # prepared after the last `take_woken`; its waiters are still to be woken
            self._woken += waiting

    def load(self, item: T) -> "Future[Any]":
        """Return when the ranks have it; begin to prepare it, over the limit if need be."""
        return self.ask(item) or self._begin(self._key(item), item)

    def drop(self, item: T) -> None:
        """The ranks forget it, as soon as no row uses it."""
        if self._known.pop(self._key(item), None) is not None:
            self._executor.call(self._drop, item)
            self._may_have_room = True

    def unpin(self, key: Hashable) -> None:
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]
            self._may_have_room = True

    def pending(self) -> "list[Future[Any]]":
        return [future for future in self._unfinished.values() if not future.done()]

    def fits(self, item: T) -> bool:
        """Drop what makes the ranks have more than the limit next to this item; return whether they can use it now.

        They have more when loads went on at the same time, of which none could make room by dropping another.
        """
        key = self._key(item)
        return key in self.pins or (key in self._known and self._make_room(item, self._known.keys()))

    def _make_room(self, item: T, droppable: Collection[Hashable] = ()) -> bool:
        """Drop what is not needed until an item has room, which the ranks may have; return whether it has.

        droppable: keys that may be dropped although requests wait with them: otherwise two loaded items could block
        each other.
        """
        if len(self._known) + len(self.pins) < self._limit:
            return True
        key = self._key(item)
        others = [(other, known, future) for other, (known, future) in self._known.items() if other != key]
        idle = [
            known
            for other, known, future in others
            if other not in self.pins and (other in droppable or other not in self._waiting) and future.done()
        ]
        too_many = len(self._known.keys() | self.pins.keys() | {key}) - self._limit
        for known in idle[: max(0, too_many)]:
            self.drop(known)
            self._on_replaced(known, item)
        return too_many <= len(idle)
