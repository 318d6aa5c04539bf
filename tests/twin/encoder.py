"""Encoder outputs by content hash: who holds them, which go first when room is short, what a chunk needs."""

from tests.twin.state import Live


class EncoderCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size: dict[str, int] = {}  # hash -> tokens, everything cached
        self.holders: dict[str, set[str]] = {}  # hash -> request ids
        self.unheld: list[str] = []  # hashes nobody holds, oldest first

    @property
    def room(self) -> int:
        return self.capacity - sum(self.size.values())

    @property
    def reclaimable(self) -> int:
        return self.room + sum(self.size[item] for item in self.unheld)

    def make_room(self, tokens: int) -> bool:
        """Throw out the oldest that nobody holds until `tokens` fit. False, and nothing done, if that cannot be."""
        if tokens > self.reclaimable:
            return False
        while tokens > self.room:
            item = self.unheld.pop(0)
            del self.size[item], self.holders[item]
        return True

    def hold(self, item: str, request_id: str) -> bool:
        """True if the item is cached; it is then held for the request."""
        if item not in self.size:
            return False
        if item in self.unheld:
            self.unheld.remove(item)
        self.holders[item].add(request_id)
        return True

    def put(self, item: str, tokens: int, request_id: str) -> None:
        assert item not in self.size
        assert tokens <= self.room
        self.size[item] = tokens
        self.holders[item] = {request_id}

    def release(self, item: str, request_id: str) -> None:
        if request_id not in self.holders.get(item, ()):
            return
        self.holders[item].discard(request_id)
        if not self.holders[item]:
            self.unheld.append(item)


class EncoderDesk:
    """What each step may encode."""

    def __init__(self, budget: int, capacity: int, whole_only: bool, encoder_decoder: bool) -> None:
        self.budget_per_step = budget
        self.whole_only = whole_only
        self.encoder_decoder = encoder_decoder
        self.cache = EncoderCache(capacity)
        self.open_step()

    def open_step(self) -> None:
        self.budget = self.budget_per_step
        self.encoded: dict[str, list[int]] = {}  # request id -> places of the items encoded in this step

    def share(self, live: Live, computed: int, want: int) -> tuple[int, list[int], list[int]]:
        """How far the chunk may go, the items to encode for it, and places that repeat one of those."""
        items: list[int] = []
        repeats: list[int] = []
        budget = self.budget
        media = live.request.media
        for place, item in enumerate(media):
            if want <= 0:
                break
            if self.encoder_decoder:
                if any(branch.computed for branch in live.branches):
                    break  # the request's first branch to compute anything filled the cross-attention table
            elif item.offset + item.length <= computed or item.offset >= computed + want:
                continue
            if self.whole_only and not self.encoder_decoder and computed + want < item.offset + item.length:
                return max(0, item.offset - computed), items, repeats
            if not self.encoder_decoder:
                if any(media[other].content_hash == item.content_hash for other in items):
                    repeats.append(place)
                    continue
                if self.cache.hold(item.content_hash, live.id):
                    live.encoder_items.add(place)
                    continue
            pending = sum(media[other].length for other in items)
            if item.length > budget or not self.cache.make_room(item.length + pending):
                return max(0, item.offset - computed), items, repeats
            items.append(place)
            budget -= item.length
        return want, items, repeats

    def encode(self, live: Live, items: list[int], repeats: list[int]) -> None:
        for place in items:
            item = live.request.media[place]
            self.budget -= item.length
            if not self.encoder_decoder:
                self.cache.put(item.content_hash, item.length, live.id)
                live.encoder_items.add(place)
        live.encoder_items.update(repeats)
        if items:
            self.encoded[live.id] = items

    def take_back(self, live: Live) -> None:
        """The request does not run in this step after all."""
        for place in self.encoded.pop(live.id, []):
            self.budget += live.request.media[place].length

    def release(self, live: Live, passed: int | None = None) -> None:
        """Let go of items the decoder has passed (all, when `passed` is None); a repeated one with its last place."""
        media = live.request.media
        for place in sorted(live.encoder_items):
            if passed is not None and media[place].offset + media[place].length > passed:
                continue
            live.encoder_items.discard(place)
            held = {media[other].content_hash for other in live.encoder_items}
            if media[place].content_hash not in held:
                self.cache.release(media[place].content_hash, live.id)
