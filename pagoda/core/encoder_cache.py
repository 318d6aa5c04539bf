"""EncoderCache: which encoder outputs (of images, audio) the workers hold, by content hash and with references."""

from collections import OrderedDict

from pagoda.core.request_table import LiveRequest


class EncoderCache:
    """Space is counted in encoder tokens.

    An output that nobody references stays until its space is needed; the one unreferenced longest goes first.
    A request references an output once, however often it repeats the item, until its last place is passed.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.num_free_tokens = capacity_tokens
        self._length: dict[str, int] = {}
        self._holders: dict[str, set[str]] = {}
        self._unreferenced: OrderedDict[str, int] = OrderedDict()
        self._items_held: dict[str, set[int]] = {}
        self._evicted: list[str] = []

    @property
    def num_reclaimable_tokens(self) -> int:
        """Free space plus what nobody references."""
        return self.num_free_tokens + sum(self._unreferenced.values())

    def hold_cached(self, live: LiveRequest, item: int) -> bool:
        """Reference the item's output if it is cached; False if it is not."""
        content_hash = live.request.media[item].content_hash
        holders = self._holders.get(content_hash)
        if holders is None:
            return False
        self._unreferenced.pop(content_hash, None)
        holders.add(live.request_id)
        self._items_held.setdefault(live.request_id, set()).add(item)
        return True

    def make_room(self, num_tokens: int) -> bool:
        """Evict until `num_tokens` are free; False, and nothing done, where even that would not do."""
        if num_tokens > self.num_reclaimable_tokens:
            return False
        while num_tokens > self.num_free_tokens:
            content_hash, length = self._unreferenced.popitem(last=False)
            del self._holders[content_hash], self._length[content_hash]
            self._evicted.append(content_hash)
            self.num_free_tokens += length
        return True

    def add(self, live: LiveRequest, item: int) -> None:
        """The item will be encoded in this step; `make_room` was asked before."""
        media = live.request.media[item]
        if self.hold_cached(live, item):
            return  # run again all the same (an encoder-decoder request fills its own cross blocks), in the same space
        self._length[media.content_hash] = media.length
        self._holders[media.content_hash] = {live.request_id}
        self._items_held.setdefault(live.request_id, set()).add(item)
        self.num_free_tokens -= media.length

    def drop_item(self, live: LiveRequest, item: int) -> None:
        """`live` needs the output no more at this place."""
        held = self._items_held.get(live.request_id)
        if held is None or item not in held:
            return
        held.discard(item)
        if not held:
            del self._items_held[live.request_id]
        content_hash = live.request.media[item].content_hash
        if any(live.request.media[other].content_hash == content_hash for other in held):
            return
        holders = self._holders.get(content_hash)
        if holders is None:
            return
        holders.discard(live.request_id)
        if not holders:
            self._unreferenced[content_hash] = self._length[content_hash]

    def drop_passed(self, live: LiveRequest, num_computed: int) -> None:
        """Drop what lies wholly before `num_computed`: its KV is in the cache now."""
        for item in sorted(self._items_held.get(live.request_id, ())):
            media = live.request.media[item]
            if media.offset + media.length <= num_computed:
                self.drop_item(live, item)

    def drop_all(self, live: LiveRequest) -> None:
        for item in sorted(self._items_held.get(live.request_id, ())):
            self.drop_item(live, item)

    def forget(self, content_hash: str) -> None:
        """An output that was planned in this step will not be made after all."""
        self.num_free_tokens += self._length.pop(content_hash)
        del self._holders[content_hash]
        self._unreferenced.pop(content_hash, None)

    def take_evicted(self) -> tuple[str, ...]:
        """Hashes the workers shall drop; each is told once, and not if it was encoded again meanwhile."""
        if not self._evicted:
            return ()
        evicted = tuple(content_hash for content_hash in self._evicted if content_hash not in self._holders)
        self._evicted.clear()
        return evicted

    def disinherit(self, live: LiveRequest, content_hash: str) -> str | None:
        """`live` will not run the encoder for this output: another request that waits for it, or None (forgotten)."""
        held = self._items_held.get(live.request_id, set())
        for item in [item for item in held if live.request.media[item].content_hash == content_hash]:
            self.drop_item(live, item)
        holders = self._holders.get(content_hash)
        if holders:
            return min(holders)
        if holders is not None:
            self.forget(content_hash)
        return None
