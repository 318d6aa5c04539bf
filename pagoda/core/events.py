"""Events: what happens in the core. The owner of a fact writes it once; readers fold over the stream.

No event says that a row decoded one more token. `step` is the number of the step that is planned, or whose result is
applied, when the event is written; between steps, the last such step. `time_s` is on the engine's clock. A request is
identified by its client and handle; its id is a label, which the first and the last event of it carry.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple, dataclass_transform

from pagoda.base.clock import Clock
from pagoda.core.request import AdmitKind, Reason, Request, RequestStatus

_Kind = TypeVar("_Kind")
_Fields = TypeVarTuple("_Fields")


@dataclass_transform(frozen_default=True)
def _event(cls: type[_Kind]) -> type[_Kind]:
    """Frozen for type checkers alone: a frozen dataclass takes three times as long to make."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


@_event
class RequestEvent:
    """Something happened to one request."""

    step: int
    time_s: float
    client: int
    handle: int


@_event
class Queued(RequestEvent):
    """It was added.   position: requests before it in the queue, without those that are set aside."""

    request_id: str
    num_prompt_tokens: int
    num_seqs: int
    position: int


@_event
class Routed(RequestEvent):
    """It was sent to one of several replicas, from 1; again when that has ended. Written by the client of them all.

    because: why there, see RoutedBecause.
    """

    replica: int
    because: str


@_event
class Held(RequestEvent):
    """Why it waits, written when that is another reason than before: it was the first that could enter, and did not;
    or, with Reason.TURN, what held it before is over, or another is considered first.

    position: as in Queued, in its queue.
    num_blocks: blocks that its tokens take, those in the prefix cache included.   num_free_blocks: that were free.
    """

    reason: Reason
    position: int
    num_blocks: int
    num_free_blocks: int


@_event
class Admitted(RequestEvent):
    """It runs. Counts are of its sequences that got a row.

    num_tokens: known.   num_cached: of those, found in the prefix cache; None if that is off, or was not asked.
    num_computed: have their KV, from the prefix cache or from host memory.   num_new: computed in this step.
    num_blocks: that its first sequence holds now.   num_free_blocks: after that.
    """

    kind: AdmitKind
    num_tokens: int
    num_cached: int | None
    num_computed: int
    num_new: int
    num_blocks: int
    num_free_blocks: int


@_event
class Limited(RequestEvent):
    """A running sequence computes less in this step than it could.   reason: the last rule that shortened its chunk.

    Written when the reason is another one than the last since its row was given to it.
    """

    sequence: int
    reason: Reason


@_event
class Preempted(RequestEvent):
    """It left the running batch so that another request can continue or enter.

    for_client, for_handle: that request (itself, if it was its own victim); None after a failed step, a reset of the
    prefix cache, the end of the sequence that its others waited for, or when the scheduler starts over.
    mode: "recompute" or "swap".   lost_tokens: must be computed again.   freed_blocks: what that freed.
    """

    for_client: int | None
    for_handle: int | None
    mode: str
    lost_tokens: int
    freed_blocks: int


@_event
class Swapped(RequestEvent):
    """Its KV is copied in this step.   to_host: to host memory, else back.   num_blocks: distinct blocks."""

    to_host: bool
    num_blocks: int


@_event
class Encoded(RequestEvent):
    """A chunk with media items was placed.

    num_items: items looked up for it.   num_cached: of those, outputs that were there or are made for another item.
    """

    num_items: int
    num_cached: int


@_event
class FirstToken(RequestEvent):
    """Its first token or, of a request to pool, its vector is there."""

    num_prompt_tokens: int


@_event
class DraftsVerified:
    """Drafts of one client's sequences were verified in a step; one entry per sequence in each of the four."""

    step: int
    time_s: float
    client: int
    handles: tuple[int, ...]
    sequences: tuple[int, ...]
    num_drafted: tuple[int, ...]
    num_accepted: tuple[int, ...]


@_event
class Pinned(RequestEvent):
    """One of its sequences leaves its blocks: other free blocks lose their content before `num_blocks` of these do.

    ttl_s: for this many seconds.
    """

    sequence: int
    num_blocks: int
    ttl_s: int


@_event
class Loaded(RequestEvent):
    """It waited until a tier had copied blocks into the pool, where the prefix cache finds them.

    num_tokens: that the tier had blocks of.   num_loaded: of these, the first ones.
    seconds: that it waited.   why: what ended it before the last one, for people; "" if nothing did.
    """

    num_tokens: int
    num_loaded: int
    seconds: float
    why: str


@_event
class Failed(RequestEvent):
    """A row of one of its sequences failed, or read what a failed row should have written.

    message: why; None if the request is computed again.
    """

    message: str | None


@_event
class Ended(RequestEvent):
    """One of its sequences ended.

    stop_reason: the stop token id that ended it, None for eos.   message: for users, of IGNORED and ERROR, and of
    a LENGTH_CAPPED sequence that the KV cache could not hold; what that has emitted is its result.
    is_last: the request has ended, too.
    """

    request_id: str
    sequence: int
    status: RequestStatus
    stop_reason: int | None = None
    message: str | None = None
    is_last: bool = True


@_event
class Stored:
    """Blocks of KV group `group` can be found by these hashes from now on; each is the prefix of the next.

    parent: the hash before the first, None for a first block.
    request: whose blocks they are.   first_token: position of the first of their tokens.   token_ids: those, int32.
    """

    step: int
    time_s: float
    group: int
    hashes: tuple[bytes, ...]
    parent: bytes | None
    request: Request
    first_token: int
    token_ids: bytes


@_event
class Removed:
    """No block of KV group `group` is found by these hashes any more."""

    step: int
    time_s: float
    group: int
    hashes: tuple[bytes, ...]


@_event
class TierChanged:
    """Blocks with these hashes are found in a tier beyond the pool from now on, or no longer.   tier: its name."""

    step: int
    time_s: float
    tier: str
    stored: tuple[bytes, ...]
    lost: tuple[bytes, ...]


CacheEvent = Stored | Removed | TierChanged
ClientEvent = (
    Queued
    | Routed
    | Held
    | Admitted
    | Limited
    | Preempted
    | Swapped
    | Encoded
    | FirstToken
    | DraftsVerified
    | Pinned
    | Loaded
    | Failed
    | Ended
)
"""What is sent to the client whose request it is about."""
Event = ClientEvent | CacheEvent
Fold = Callable[[Event], None]


class Events:
    """What happened to the requests of one client, in order. (A type of its own, so that it has a wire form.)"""

    __slots__ = ("_events",)

    def __init__(self, events: Iterable[ClientEvent] = ()) -> None:
        self._events = tuple(events)

    def __iter__(self) -> Iterator[ClientEvent]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)


class EventStream:
    """What happens, in order. Each event goes to every fold at once, and to its client with its next outputs.

    step: what events carry, see above; set by the scheduler.
    cache_folds: readers of the cache's events, too; without any, these are not made.
    """

    def __init__(self, clock: Clock) -> None:
        self.step = 0
        self._clock = clock
        self._folds: list[Fold] = []
        self.cache_folds: list[Fold] = []
        self._pending: list[ClientEvent] = []

    def subscribe(self, fold: Fold, *, cache: bool = False) -> Callable[[], None]:
        """See SchedulerInterface.subscribe."""
        lists = (self._folds, self.cache_folds) if cache else (self._folds,)

        def end() -> None:
            for folds in lists:
                folds.remove(fold)

        for folds in lists:
            folds.append(fold)
        return end

    def write(
        self, kind: Callable[[int, float, int, int, *_Fields], ClientEvent], request: Request, *fields: *_Fields
    ) -> None:
        """Append what happened to a request. Only the owner of the fact calls this.   fields: after its first four."""
        self.append(kind(self.step, self._clock.now(), request.client_index, request.handle, *fields))

    def now(self) -> tuple[int, float]:
        """Return what an event that is of no request begins with."""
        return self.step, self._clock.now()

    def append(self, event: ClientEvent) -> None:
        """Append what happened to several requests of a client, as their owner."""
        self._pending.append(event)
        for fold in self._folds:
            fold(event)

    def write_cache(self, event: CacheEvent) -> None:
        """Append what happened to the cache. Only called if there are `cache_folds`."""
        for fold in self.cache_folds:
            fold(event)

    def take(self) -> dict[int, Events]:
        """Return what no client got yet, by client."""
        if not self._pending:
            return {}
        by_client: dict[int, list[ClientEvent]] = {}
        for event in self._pending:
            by_client.setdefault(event.client, []).append(event)
        self._pending.clear()
        return {client: Events(events) for client, events in by_client.items()}
