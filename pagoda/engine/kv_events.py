"""KVEventPublisher: what changes in the prefix cache, for routers outside, in the form of vLLM 0.33.

A message has three frames: the topic, a number (8 bytes, big-endian, from 0 in each engine process) and a batch: the
array [seconds since 1970, events, number of the replica]; an event is a map. A reader that has missed numbers sends
the replay socket two frames, an empty one and the first number that it wants (from a DEALER: a REQ takes one answer).
It gets each batch from there on in a message of its own, an empty frame before the three, the last with the number
-1. A reader that sees smaller numbers than before reads of a new process, whose first event is AllBlocksCleared.

Hashes are the last 64 bits of ours. They differ in each process (their seed is secret), so readers match by token ids.
With `kv_tier`, they last as long as its folder. Of blocks that a tier stores or loses, only the hashes are told, as by
vLLM's offloading: readers know their tokens from when they were stored in the pool.
"""

import contextlib
import hashlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from pagoda.base.errors import ConfigError
from pagoda.base.kv_events_config import KVEventsConfig, endpoint_of
from pagoda.core.events import CacheEvent, Event, Removed, Stored, TierChanged
from pagoda.core.kv import KVGroupKind, KVGroupSpec

logger = logging.getLogger("pagoda")

LAST = (-1).to_bytes(8, "big", signed=True)
"""The number of the message that ends a replay."""

_MOST_PER_BATCH = 1_000
MOST_KEPT_BYTES = 256 << 20
"""Of the batches that can be asked for: prompts may be long."""
_LOOK_AT_REPLAYS_S = 0.1
_POOL, _TIERS = "GPU", {"host": "CPU", "disk": "STORAGE"}
"""The words of vLLM. Also a CPU's pool is the GPU's there: readers route by no other blocks."""
_KINDS = {
    KVGroupKind.FULL: "full_attention",
    KVGroupKind.WINDOW: "sliding_window",
    KVGroupKind.STATE: "mamba",
}


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks that a request can begin with from now on; each continues the one before, the first `parent_block_hash`.

    token_ids: of all blocks, `block_size` each.   lora_id: never used, as in new vLLM.
    extra_keys: per block, what else must agree: the adapter, media items with their place, digests of the salt (whoever
    knows a salt can ask for what was cached with it) and of embeddings.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks that no request can begin with any more."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing is cached, or readers have missed too much: what follows is all that they know."""


_Told = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one message has.   ts: seconds since 1970."""

    ts: float
    events: list[_Told]
    data_parallel_rank: int | None = None


class KVEventPublisher:
    """Publishes events of the prefix cache from a thread of its own; the engine never waits for a reader."""

    def __init__(
        self, config: KVEventsConfig, groups: Sequence[KVGroupSpec], block_size: int, replica: int = 0
    ) -> None:
        """replica: its number, from 0. Raises ConfigError for an address that cannot be used."""
        self._groups = groups
        self._block_size = block_size
        self._replica = replica
        self._topic = config.topic.encode()
        self._max_waiting = config.max_queue_size
        self._waiting: queue.SimpleQueue[CacheEvent | None] = queue.SimpleQueue()
        # Batches hold whole prompts: without an endpoint for replays, none is kept.
        self._max_kept = config.buffer_steps if config.replay_endpoint else 0
        self._sent: deque[tuple[bytes, bytes]] = deque()
        self._num_sent = self._kept_bytes = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._events = self._open(zmq.PUB, config.endpoint, config.hwm)
            asked = config.replay_endpoint
            self._replays = None if asked is None else self._open(zmq.ROUTER, asked, 2 * (config.buffer_steps + 1))
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def note(self, event: Event) -> None:
        """Publish an event of the cache; ignore others. A fold."""
        if isinstance(event, CacheEvent):
            self._waiting.put(event)

    def close(self) -> None:
        """Publish what waits, and end the thread. Idempotent."""
        self._waiting.put(None)
        self._thread.join()

    def _open(self, kind: int, endpoint: str, max_waiting: int) -> "zmq.Socket[bytes]":
        endpoint = endpoint_of(endpoint, self._replica)
        socket = self._context.socket(kind)
        socket.set_hwm(max_waiting)
        socket.linger = 1_000
        is_here = endpoint.startswith(("ipc://", "inproc://", "tcp://*:", "tcp://127.")) or "::" in endpoint
        try:
            socket.ipv6 = "[" in endpoint
            (socket.bind if is_here or kind == zmq.ROUTER else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            name = "endpoint" if kind == zmq.PUB else "replay_endpoint"
            raise ConfigError(f"kv_events_config.{name}: {endpoint} cannot be used ({error}); take another") from None
        return socket

    def _run(self) -> None:
        try:
            self._publish([AllBlocksCleared()])  # what a reader knows of an earlier process is gone
            is_open = True
            while is_open:
                taken, is_open = self._take()
                if self._waiting.qsize() > self._max_waiting:
                    taken, is_open = self._forget()
                if taken:
                    self._publish(taken)
                if self._replays is not None and self._replays.poll(0):
                    self._replay(self._replays)
        except Exception:
            logger.exception("events of the prefix cache are no longer published")
        finally:
            self._context.destroy(linger=1_000)

    def _take(self) -> tuple[list[_Told], bool]:
        """Return some of what waits, once there is something or replays are due, and whether it goes on."""
        taken: list[_Told] = []
        with contextlib.suppress(queue.Empty):
            event = self._waiting.get(timeout=None if self._replays is None else _LOOK_AT_REPLAYS_S)
            while event is not None:
                taken += self._told(event)
                if len(taken) >= _MOST_PER_BATCH:
                    break
                event = self._waiting.get_nowait()
            else:
                return taken, False
        return taken, True

    def _forget(self) -> tuple[list[_Told], bool]:
        """Drop what waits. A reader that got only a part of it would believe that removed blocks are cached."""
        logger.warning("more than %d events of the prefix cache waited to be published: dropped", self._max_waiting)
        is_open = True
        for _ in range(self._waiting.qsize()):
            is_open = self._waiting.get() is not None
        return [AllBlocksCleared()], is_open

    def _told(self, event: CacheEvent) -> list[_Told]:
        if isinstance(event, TierChanged):
            medium = _TIERS[event.tier]
            stored, lost = ([_number(one) for one in hashes] for hashes in (event.stored, event.lost))
            told: list[_Told] = []
            if stored:
                of_tier = BlockStored(
                    stored,
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=0,
                    lora_id=None,
                    medium=medium,
                    lora_name=None,
                    group_idx=0,
                    kv_cache_spec_kind=_KINDS[self._groups[0].kind],
                )
                told.append(of_tier)
            return [*told, BlockRemoved(lost, medium, 0)] if lost else told
        spec, hashes = self._groups[event.group], [_number(one) for one in event.hashes]
        if isinstance(event, Removed):
            return [BlockRemoved(hashes, _POOL, event.group)]
        size, lora = self._block_size, event.request.lora
        stored_now = BlockStored(
            hashes,
            parent_block_hash=None if event.parent is None else _number(event.parent),
            token_ids=np.frombuffer(event.token_ids, np.int32).tolist(),
            block_size=size,
            lora_id=None,
            medium=_POOL,
            lora_name=None if lora is None else lora.name,
            extra_keys=_extra_keys(event, size),
            group_idx=event.group,
            kv_cache_spec_kind=_KINDS[spec.kind],
            kv_cache_spec_sliding_window=spec.window if spec.kind is KVGroupKind.WINDOW else None,
        )
        return [stored_now]

    def _publish(self, told: list[_Told]) -> None:
        number = self._num_sent.to_bytes(8, "big")
        payload = msgspec.msgpack.encode(EventBatch(time.time(), told, self._replica))
        self._events.send_multipart((self._topic, number, payload))
        self._sent.append((number, payload))
        self._num_sent += 1
        self._kept_bytes += len(payload)
        while len(self._sent) > self._max_kept or self._kept_bytes > MOST_KEPT_BYTES:
            self._kept_bytes -= len(self._sent.popleft()[1])

    def _replay(self, socket: "zmq.Socket[bytes]") -> None:
        """Answer one reader. What is no such question has no answer."""
        who, *question = socket.recv_multipart()
        if len(question) != 2 or len(question[1]) != len(LAST):
            return
        for number, payload in self._sent:
            if number >= question[1]:  # big-endian: in the order of the numbers
                socket.send_multipart((who, b"", self._topic, number, payload))
        socket.send_multipart((who, b"", b"", LAST, b""))


def _number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def _extra_keys(event: Stored, block_size: int) -> list[list[Any] | None] | None:
    """Return what each block has beside its tokens; None if no block has anything."""
    request = event.request
    for_all: list[Any] = [] if request.lora is None else [request.lora.name]
    for_first: list[Any] = [] if request.cache_salt is None else [_digest(request.cache_salt.encode())]
    keys: list[list[Any]] = []
    for i in range(len(event.hashes)):
        begin = event.first_token + i * block_size
        end = begin + block_size
        media = [(item.content_hash, item.offset - begin) for item in request.media if item.overlaps(begin, end)]
        embeds = None if request.prompt_embeds is None else request.prompt_embeds.within(begin, end)
        given = [_digest(embeds.positions.tobytes() + embeds.values.tobytes())] if embeds else []
        keys.append([*for_all, *media, *(for_first if begin == 0 else []), *given])
    return [key or None for key in keys] if any(keys) else None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
