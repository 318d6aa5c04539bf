"""What happened to a request, in words for people."""

from collections.abc import Callable

from pagoda.core.events import (
    Admitted,
    ClientEvent,
    Failed,
    FirstToken,
    Held,
    Limited,
    Loaded,
    Pinned,
    Preempted,
    Queued,
    Routed,
)
from pagoda.core.request import AdmitKind, Reason

_ENTRIES = {
    AdmitKind.NEW: "runs",
    AdmitKind.RESUMED: "runs again",
    AdmitKind.SWAPPED_IN: "runs again, with its KV from host memory",
}
_NEED_BLOCKS = (Reason.BLOCKS, Reason.WATERMARK)


def needs_blocks(event: ClientEvent) -> bool:
    """Return whether a request waits for blocks that others have."""
    return isinstance(event, Held) and event.reason in _NEED_BLOCKS


def in_timeline(event: ClientEvent, name_of: Callable[[int, int], str | None]) -> str | None:
    """Return what `in_words` does, for a list, no later entry of which says how a wait for blocks goes."""
    what = in_words(event, name_of)
    return f"{what}; it runs when others have given enough back" if what and needs_blocks(event) else what


def in_words(event: ClientEvent, name_of: Callable[[int, int], str | None]) -> str | None:
    """Return what an event says; None if it is nothing for people.

    name_of: returns what the reader calls the request of a client and a handle; None if it may not see it.
    """
    match event:
        case Queued(position=position):
            return f"queued, {position} before it" if position else "queued"
        case Routed(replica=replica, because=because):
            return f"sent to replica {replica}: {because.replace('_', ' ')}"
        case Held(reason=Reason.TURN, position=position):
            return f"waits for its turn in the queue{f', {position} before it' if position else ''}"
        case Held(reason=Reason.BLOCKS, num_blocks=needed, num_free_blocks=free) if needed > free:
            return f"waits for {_count(needed - free, 'block')}: it takes {needed}, {free} are free"
        case Held(reason=reason):
            return f"waits: {reason.value}"
        case Admitted():
            cached = f", {event.num_cached} found in the prefix cache" if event.num_cached else ""
            tokens = f"{_count(event.num_tokens, 'token')}{cached}, {event.num_new} of them in this step"
            return f"{_ENTRIES[event.kind]}: {tokens}; it has {_count(event.num_blocks, 'block')}"
        case Limited(reason=reason):
            return f"computes less than it could: {reason.value}"
        case Preempted(for_handle=None):
            return f"preempted: {_lost(event)}"
        case Preempted(for_client=client, for_handle=handle):
            known = name_of(client, handle) if client is not None and handle is not None else None
            is_own = (client, handle) == (event.client, event.handle)
            return f"preempted for {'itself' if is_own else known or 'another request'}: {_lost(event)}"
        case FirstToken():
            return "first token"
        case Loaded(num_tokens=asked, num_loaded=loaded, seconds=seconds, why=why):
            tokens = f"{loaded} of {_count(asked, 'token')}" if loaded < asked else _count(asked, "token")
            return f"{tokens} loaded from its KV tier in {seconds:.2f} s{f': {why}' if why else ''}"
        case Pinned(num_blocks=num_blocks, ttl_s=ttl_s):
            return f"keeps {_count(num_blocks, 'block')} in the prefix cache for {_count(ttl_s, 'second')}"
        case Failed(message=message):
            return f"a step failed: {message}" if message else "a step failed; it is computed again"
        case _:
            return None


def _lost(event: Preempted) -> str:
    if event.mode == "swap":
        return f"its KV moved to host memory, {_count(event.freed_blocks, 'block')} became free"
    lost, freed = _count(event.lost_tokens, "token"), _count(event.freed_blocks, "block")
    return f"{lost} must be computed again, {freed} became free"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
