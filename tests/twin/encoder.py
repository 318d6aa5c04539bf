"""Encoder outputs by content hash: who holds them, which go first when room is short, what a chunk needs."""

from tests.twin.state import TwinRequest


class EncoderCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size: dict[str, int] = {}  # hash -> tokens, everything cached
        self.holders: dict[str, set[str]] = {}  # hash -> request ids
        self.unheld: list[str] = []  # hashes without holders, oldest first

    @property
    def room(self) -> int:
        return self.capacity - sum(self.size.values())

    @property
    def reclaimable(self) -> int:
        return self.room + sum(self.size[item] for item in self.unheld)

    def make_room(self, tokens: int) -> bool:
        """Evict the oldest outputs without holders until `tokens` fit. Return False, and do nothing, if they cannot."""
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


class EncoderInputs:
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

    def share(self, state: TwinRequest, computed: int, want: int) -> tuple[int, list[int], list[int]]:
        """How far the chunk may go, the items to encode for it, and places that repeat one of those."""
        items: list[int] = []
        repeats: list[int] = []
        budget = self.budget
        media = state.request.media
        for place, item in enumerate(media):
            if want <= 0:
                break
            if self.encoder_decoder:
                if any(sequence.computed for sequence in state.sequences):
                    break  # the request's first sequence to compute anything filled the cross-attention table
            elif item.offset + item.length <= computed or item.offset >= computed + want:
                continue
            if self.whole_only and not self.encoder_decoder and computed + want < item.offset + item.length:
                return max(0, item.offset - computed), items, repeats
            if not self.encoder_decoder:
                if any(media[other].content_hash == item.content_hash for other in items):
                    repeats.append(place)
                    continue
                if self.cache.hold(item.content_hash, state.id):
                    state.encoder_items.add(place)
                    continue
            pending = sum(media[other].length for other in items)
            if item.length > budget or not self.cache.make_room(item.length + pending):
                return max(0, item.offset - computed), items, repeats
            items.append(place)
            budget -= item.length
        return want, items, repeats

    def encode(self, state: TwinRequest, items: list[int], repeats: list[int]) -> None:
        for place in items:
            item = state.request.media[place]
            self.budget -= item.length
            if not self.encoder_decoder:
                self.cache.put(item.content_hash, item.length, state.id)
                state.encoder_items.add(place)
        state.encoder_items.update(repeats)
        if items:
            self.encoded[state.id] = items

    def take_back(self, state: TwinRequest) -> None:
        """The request does not run in this step after all."""
        for place in self.encoded.pop(state.id, []):
            self.budget += state.request.media[place].length

    def release(self, state: TwinRequest, passed: int | None = None) -> None:
        """Release items that the decoder has passed (None: all); a repeated one with its last place."""
        media = state.request.media
        for place in sorted(state.encoder_items):
            if passed is not None and media[place].offset + media[place].length > passed:
                continue
            state.encoder_items.discard(place)
            held = {media[other].content_hash for other in state.encoder_items}
            if media[place].content_hash not in held:
                self.cache.release(media[place].content_hash, state.id)
