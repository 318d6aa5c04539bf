"""EncoderInputs: which media must be encoded in a step, and where a chunk must end because one cannot be."""

from collections import OrderedDict
from collections.abc import Collection, Iterable

import numpy as np

from pagoda.core.events import Encoded, EventStream
from pagoda.core.request import MediaItem, Reason, Request, RequestState, Sequence
from pagoda.core.request_table import RequestTable
from pagoda.core.scheduler_output import EncoderRun, SchedulerOutput
from pagoda.core.step_plan import Chunk, StepPlan


class EncoderCache:
    """Space is counted in encoder tokens.

    An output without references stays until its space is needed; the one unreferenced longest is evicted first.
    A request references an output once, however often it repeats the item, until it has computed the last occurrence.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.num_free_tokens = capacity_tokens
        self._length: dict[str, int] = {}
        self._holders: dict[str, set[RequestState]] = {}
        self._unreferenced: OrderedDict[str, int] = OrderedDict()
        self._items_held: dict[RequestState, set[int]] = {}
        self._evicted: list[str] = []
        self._new: set[str] = set()  # added since `take_new`

    @property
    def num_reclaimable_tokens(self) -> int:
        """Free space plus what has no references."""
        return self.num_free_tokens + sum(self._unreferenced.values())

    def __contains__(self, content_hash: str) -> bool:
        return content_hash in self._length

    def touch(self, request: RequestState, item: int) -> bool:
        """Reference the item's output if it is cached; False if it is not."""
        content_hash = request.spec.media[item].content_hash
        holders = self._holders.get(content_hash)
        if holders is None:
            return False
        self._unreferenced.pop(content_hash, None)
        holders.add(request)
        self._items_held.setdefault(request, set()).add(item)
        return True

    def make_room(self, num_tokens: int) -> bool:
        """Evict until `num_tokens` are free; False, and nothing done, if even that is not enough."""
        if num_tokens > self.num_reclaimable_tokens:
            return False
        while num_tokens > self.num_free_tokens:
            self.evict(next(iter(self._unreferenced)))
        return True

    def add(self, request: RequestState, item: int) -> bool:
        """The item will be encoded in this step; the caller asked `make_room` before. Return whether it is new."""
        media = request.spec.media[item]
        if self.touch(request, item):
            # Needed again all the same (an encoder-decoder request fills its own cross blocks), in the same space.
            return False
        self._new.add(media.content_hash)
        self._length[media.content_hash] = media.length
        self._holders[media.content_hash] = {request}
        self._items_held.setdefault(request, set()).add(item)
        self.num_free_tokens -= media.length
        return True

    def drop_item(self, request: RequestState, item: int) -> None:
        """The request no longer needs the output for this item."""
        held = self._items_held.get(request)
        if held is None or item not in held:
            return
        held.discard(item)
        if not held:
            del self._items_held[request]
        content_hash = request.spec.media[item].content_hash
        if any(request.spec.media[other].content_hash == content_hash for other in held):
            return
        self._holders[content_hash].discard(request)
        if not self._holders[content_hash]:
            self._unreferenced[content_hash] = self._length[content_hash]

    def drop_passed(self, request: RequestState, num_computed: int) -> None:
        """Drop items that end at or before `num_computed`: their KV is in the cache now."""
        for item in sorted(self._items_held.get(request, ())):
            media = request.spec.media[item]
            if media.end <= num_computed:
                self.drop_item(request, item)

    def drop_all(self, request: RequestState) -> None:
        """Its chunk is not placed, or it left the running batch."""
        for item in sorted(self._items_held.get(request, ())):
            self.drop_item(request, item)

    def evict_unreferenced(self) -> None:
        """Drop all outputs that nothing references."""
        for content_hash in list(self._unreferenced):
            self.evict(content_hash)

    def holders_of(self, runs: Iterable[EncoderRun]) -> set[RequestState]:
        """Return the requests that reference the outputs of these runs."""
        return {request for run in runs for request in self._holders.get(run.content_hash, ())}

    def evict(self, content_hash: str) -> None:
        """Drop an output that nothing references, if it is cached, or was to be computed in this step."""
        if content_hash in self._unreferenced:
            self.num_free_tokens += self._unreferenced.pop(content_hash)
            del self._holders[content_hash], self._length[content_hash]
            self._new.discard(content_hash)
            self._evicted.append(content_hash)

    def take_evicted(self) -> tuple[str, ...]:
        """Return hashes that workers must drop before this step's encoder runs; each once.

        One that was evicted for another item of the same chunk may run again in this step.
        """
        if not self._evicted:
            return ()
        evicted, self._evicted = self._evicted, []
        return tuple(dict.fromkeys(evicted))

    def take_new(self) -> set[str]:
        """Return hashes of outputs that workers do not have yet; each once."""
        new, self._new = self._new, set()
        return new

    def release_planned_run(self, request: RequestState, content_hash: str) -> RequestState | None:
        """The request will not run the encoder for this output. Return its next holder, or None if it has none."""
        held = self._items_held.get(request, set())
        for item in [item for item in held if request.spec.media[item].content_hash == content_hash]:
            self.drop_item(request, item)
        if holders := self._holders.get(content_hash):
            return min(holders, key=lambda holder: holder.key)
        self.evict(content_hash)  # of an encoder-decoder request, workers may hold it from an earlier run
        return None


class EncoderInputs:
    """The encoder's cache and budget, and the rows whose requests have media.

    cache: of outputs.
    encoder_decoder: encoder inputs are run in a request's first step and read through cross-attention tables.
    whole_items: an item is never split over chunks.
    """

    def __init__(
        self,
        table: RequestTable,
        events: EventStream,
        cache_tokens: int,
        budget_tokens: int,
        *,
        encoder_decoder: bool,
        whole_items: bool,
    ) -> None:
        self.encoder_decoder = encoder_decoder
        self.largest_item = min(budget_tokens, cache_tokens)
        self.cache = EncoderCache(cache_tokens)
        self._table = table
        self._events = events
        self.whole_items = whole_items
        self._rows: dict[int, RequestState] = {}

    # Chunks of rows

    def where_media(self, rows: np.ndarray) -> list[int]:
        """Return where in `rows` the rows are that still need the encoder."""
        return np.flatnonzero(np.isin(rows, list(self._rows))).tolist() if self._rows else []

    def plan_chunk(self, plan: StepPlan, request: RequestState, row: int, start: int, num_new: int) -> Chunk:
        """Return a chunk of `num_new` tokens, cut before the first item that finds no budget or no space.

        Cached items are referenced at once. row: -1 for a request that would enter.
        """
        if not request.spec.media or (row >= 0 and row not in self._rows):
            return Chunk(num_new)
        chunk = Chunk(num_new, Reason.ENCODER)
        budget, planned = plan.encoder_budget, 0
        hashes: set[str] = set()
        for item, at in enumerate(request.spec.media):
            if self.encoder_decoder:
                if start > 0:
                    break  # the cross-attention table was filled in the first step
            elif at.offset >= start + num_new:
                break
            elif at.end <= start:
                continue
            if not self.encoder_decoder:
                if self.whole_items and start + num_new < at.end:
                    chunk.num_new = max(0, at.offset - start)
                    break
                if at.content_hash in hashes:
                    chunk.repeated.append(item)
                    continue
                if self.cache.touch(request, item):
                    chunk.num_found += at.offset >= start
                    continue
            if at.length > budget or not self.cache.make_room(planned + at.length):
                chunk.num_new = max(0, at.offset - start)
                break
            planned += at.length
            budget -= at.length
            hashes.add(at.content_hash)
            chunk.to_encode.append(item)
        return chunk

    def place(self, plan: StepPlan, request: RequestState, row: int, chunk: Chunk) -> None:
        """The chunk is placed: its items run in this step."""
        num_cached = chunk.num_found + len(chunk.repeated)
        for item in chunk.to_encode:
            media = request.spec.media[item]
            num_cached += not self.cache.add(request, item)
            plan.encoder_runs.setdefault(row, []).append(EncoderRun(row, item, media.content_hash))
            plan.encoder_budget -= media.length
        for item in chunk.repeated:
            self.cache.touch(request, item)
        if num_items := len(chunk.to_encode) + len(chunk.repeated) + chunk.num_found:
            self._events.write(Encoded, request.spec, num_items, num_cached)

    # Rows come, compute and go

    def add_row(self, request: RequestState, row: int) -> None:
        """The row computes prompt tokens. A sibling finds the shared cross-attention blocks filled."""
        if request.spec.media and not (self.encoder_decoder and len(request.rows) > 1):
            self._rows[row] = request

    def complete(self, rows: np.ndarray) -> None:
        """A step of `rows` is complete: outputs whose items are computed are no longer needed.

        Siblings that compute their prompt again need an output until the last of them has passed its item.
        """
        if not self._rows:
            return
        for row in [row for row in self._rows if (rows == row).any()]:
            request = self._rows[row]
            done = self._num_done(row)
            if self.encoder_decoder:
                self.cache.drop_all(request)
            else:
                siblings = (other for other, of in self._rows.items() if of is request)
                self.cache.drop_passed(request, min(self._num_done(other) for other in siblings))
            if self.encoder_decoder or done >= max(item.end for item in request.spec.media):
                del self._rows[row]  # it needs no encoder any more: like all others, it is planned by numpy

    def _num_done(self, row: int) -> int:
        return int(self._table.num_computed[row] - self._table.num_in_flight[row])

    def has_media_ahead(self, row: int) -> bool:
        """Whether the row still needs encoder outputs, which it loses when it leaves the running batch."""
        request = self._rows.get(row)
        if request is None or self.encoder_decoder:
            return False
        return any(item.end > self._table.num_computed[row] for item in request.spec.media)

    def unplan_runs(self, plan: StepPlan, sequence: Sequence) -> None:
        """The row does not run in this step: its encoder runs go to the next request that waits for them, if any."""
        for run in plan.encoder_runs.pop(sequence.row, ()):
            holder = self.cache.release_planned_run(sequence.request, run.content_hash)
            if holder is None:
                plan.encoder_budget += sequence.request.spec.media[run.item].length
                continue
            row, items = holder.rows[0], holder.spec.media
            item = next(number for number, media in enumerate(items) if media.content_hash == run.content_hash)
            plan.encoder_runs.setdefault(row, []).append(EncoderRun(row, item, run.content_hash))

    def readers_of(self, runs: Collection[EncoderRun], steps: Iterable[SchedulerOutput]) -> dict[int, set[int]]:
        """Return, by step, rows whose chunks read outputs of these runs, also rows that their sequences have left."""
        if not runs:
            return {}
        hashes = {run.content_hash for run in runs}
        readers: dict[int, set[int]] = {}
        for step in steps:
            ends = step.start + step.num_new
            filled = {run.row for run in step.encoder_runs if run.content_hash in hashes}
            for row, start, end in zip(step.rows.tolist(), step.start.tolist(), ends.tolist(), strict=True):
                sequence = self._table.sequence_of[row]
                if sequence is None:
                    continue
                if self.encoder_decoder:
                    reads = row in filled
                else:
                    items = [item for item in sequence.request.spec.media if item.content_hash in hashes]
                    reads = any(item.overlaps(start, end) for item in items)
                if reads:
                    readers.setdefault(step.step, set()).add(row)
        return readers

    def num_not_cached(self, request: Request, start: int, end: int) -> int:
        """Return the tokens of media items that the positions `start` .. `end` - 1 need and whose outputs are gone."""
        needed = {
            item.content_hash: item.length
            for item in request.media
            if self.encoder_decoder or item.overlaps(start, end)
        }
        return sum(length for content_hash, length in needed.items() if content_hash not in self.cache)

    def remove_row(self, row: int) -> None:
        self._rows.pop(row, None)

    def take_inputs(self, runs: Iterable[EncoderRun]) -> tuple[MediaItem, ...]:
        """Return the items of a step's runs whose outputs workers lack."""
        new = self.cache.take_new()
        if not new:
            return ()
        inputs: list[MediaItem] = []
        for run in runs:
            if run.content_hash in new:
                new.discard(run.content_hash)
                inputs.append(self._table.owner(run.row).request.spec.media[run.item])
        return tuple(inputs)
