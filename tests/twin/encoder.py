"""Encoder outputs by content hash: who holds them, and which go first when room is needed."""


class EncoderCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size: dict[str, int] = {}  # hash -> tokens, everything cached
        self.holders: dict[str, set[str]] = {}  # hash -> request ids
        self.unheld: list[str] = []  # hashes nobody holds, oldest first
        self.evicted: list[str] = []  # since last asked

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
            self.evicted.append(item)
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
