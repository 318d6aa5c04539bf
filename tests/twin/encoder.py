"""Encoder outputs by content hash: who holds them, which go first when room is short, what a chunk needs."""

from dataclasses import dataclass

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

    def drop(self, item: str) -> None:
        """Forget an output without holders, if it is there."""
        if item in self.unheld:
            self.unheld.remove(item)
            del self.size[item], self.holders[item]

    def release(self, item: str, request_id: str) -> None:
        if request_id not in self.holders.get(item, ()):
            return
        self.holders[item].discard(request_id)
        if not self.holders[item]:
            self.unheld.append(item)


@dataclass(frozen=True)
class Share:
    """What a chunk may compute. items: places to encode for it.   repeats: places that repeat one of those.

    found: how many items begin in it that are cached.
    """

    want: int
    items: list[int]
    repeats: list[int]
    found: int


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

    def share(self, state: TwinRequest, computed: int, want: int) -> Share:
        """What a chunk of `want` tokens may compute, and what must be encoded for it."""
        items: list[int] = []
        repeats: list[int] = []
        found = 0
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
                return Share(max(0, item.offset - computed), items, repeats, found)
            if not self.encoder_decoder:
                if any(media[other].content_hash == item.content_hash for other in items):
                    repeats.append(place)
                    continue
                if self.cache.hold(item.content_hash, state.id):
                    state.encoder_items.add(place)
                    found += item.offset >= computed
                    continue
            pending = sum(media[other].length for other in items)
            if item.length > budget or not self.cache.make_room(item.length + pending):
                return Share(max(0, item.offset - computed), items, repeats, found)
            items.append(place)
            budget -= item.length
        return Share(want, items, repeats, found)

    def encode(self, state: TwinRequest, share: Share) -> tuple[int, int]:
        """Encode what the chunk needs. Return how many items it looked up, and how many of them cost nothing."""
        num_cached = share.found + len(share.repeats)
        for place in share.items:
            item = state.request.media[place]
            self.budget -= item.length
            # An encoder-decoder request fills its own cross-attention blocks, also from an output that is there.
            if self.cache.hold(item.content_hash, state.id):
                num_cached += 1
            else:
                self.cache.put(item.content_hash, item.length, state.id)
        state.encoder_items.update(share.items, share.repeats)
        if share.items:
            self.encoded[state.id] = list(share.items)
        return len(share.items) + len(share.repeats) + share.found, num_cached

    def take_back(self, state: TwinRequest, requests: dict[str, TwinRequest]) -> None:
        """The request does not run in this step after all: another one that holds an item runs it, if there is one."""
        media = state.request.media
        for place in self.encoded.pop(state.id, []):
            item = media[place].content_hash
            state.encoder_items = {other for other in state.encoder_items if media[other].content_hash != item}
            self.cache.release(item, state.id)
            if heirs := self.cache.holders[item]:
                heir = min((requests[name] for name in heirs), key=lambda one: one.request.key)
                places = [number for number, other in enumerate(heir.request.media) if other.content_hash == item]
                self.encoded.setdefault(heir.id, []).append(places[0])
            else:
                self.budget += media[place].length
                self.cache.drop(item)

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
