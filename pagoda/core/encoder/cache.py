"""EncoderCache: which encoder outputs (of images, audio) the workers hold, by content hash and with references."""

from collections import OrderedDict

from pagoda.core.request_state import RequestState


class EncoderCache:
    """Space is counted in encoder tokens.

    An output without references stays until its space is needed; the one unreferenced longest is evicted first.
    A request references an output once, however often it repeats the item, until it has computed the last occurrence.
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
        """Free space plus what has no references."""
        return self.num_free_tokens + sum(self._unreferenced.values())

    def touch(self, request: RequestState, item: int) -> bool:
        """Reference the item's output if it is cached; False if it is not."""
        content_hash = request.spec.media[item].content_hash
        holders = self._holders.get(content_hash)
        if holders is None:
            return False
        self._unreferenced.pop(content_hash, None)
        holders.add(request.request_id)
        self._items_held.setdefault(request.request_id, set()).add(item)
        return True

    def make_room(self, num_tokens: int) -> bool:
        """Evict until `num_tokens` are free; False, and nothing done, if even that is not enough."""
        if num_tokens > self.num_reclaimable_tokens:
            return False
        while num_tokens > self.num_free_tokens:
            content_hash, length = self._unreferenced.popitem(last=False)
            del self._holders[content_hash], self._length[content_hash]
            self._evicted.append(content_hash)
            self.num_free_tokens += length
        return True

    def add(self, request: RequestState, item: int) -> None:
        """The item will be encoded in this step; the caller asked `make_room` before."""
        media = request.spec.media[item]
        if self.touch(request, item):
            return  # run again all the same (an encoder-decoder request fills its own cross blocks), in the same space
        self._length[media.content_hash] = media.length
        self._holders[media.content_hash] = {request.request_id}
        self._items_held.setdefault(request.request_id, set()).add(item)
        self.num_free_tokens -= media.length

    def drop_item(self, request: RequestState, item: int) -> None:
        """The request no longer needs the output for this item."""
        held = self._items_held.get(request.request_id)
        if held is None or item not in held:
            return
        held.discard(item)
        if not held:
            del self._items_held[request.request_id]
        content_hash = request.spec.media[item].content_hash
        if any(request.spec.media[other].content_hash == content_hash for other in held):
            return
        holders = self._holders.get(content_hash)
        if holders is None:
            return
        holders.discard(request.request_id)
        if not holders:
            self._unreferenced[content_hash] = self._length[content_hash]

    def drop_passed(self, request: RequestState, num_computed: int) -> None:
        """Drop items that end at or before `num_computed`: their KV is in the cache now."""
        for item in sorted(self._items_held.get(request.request_id, ())):
            media = request.spec.media[item]
            if media.offset + media.length <= num_computed:
                self.drop_item(request, item)

    def drop_all(self, request: RequestState) -> None:
        for item in sorted(self._items_held.get(request.request_id, ())):
            self.drop_item(request, item)

    def remove(self, content_hash: str) -> None:
        """An output that was planned in this step will not be computed after all."""
        self.num_free_tokens += self._length.pop(content_hash)
        del self._holders[content_hash]
        self._unreferenced.pop(content_hash, None)

    def holders_of(self, content_hash: str) -> frozenset[str]:
        """Return ids of the requests that reference the output."""
        return frozenset(self._holders.get(content_hash, ()))

    def evict(self, content_hash: str) -> None:
        """Drop an output that nothing references, if it is cached."""
        if content_hash in self._unreferenced:
            self.remove(content_hash)
            self._evicted.append(content_hash)

    def take_evicted(self) -> tuple[str, ...]:
        """Return hashes that workers must drop before this step's encoder runs; each once.

        One that was evicted for another item of the same chunk may run again in this step.
        """
        evicted = tuple(dict.fromkeys(self._evicted))
        self._evicted.clear()
        return evicted

    def release_planned_run(self, request: RequestState, content_hash: str) -> str | None:
        """The request will not run the encoder for this output. Return its next holder's id, or None if it has none."""
        held = self._items_held.get(request.request_id, set())
        for item in [item for item in held if request.spec.media[item].content_hash == content_hash]:
            self.drop_item(request, item)
        holders = self._holders.get(content_hash)
        if holders:
            return min(holders)
        if holders is not None:
            self.remove(content_hash)
        return None
