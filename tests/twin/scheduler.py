"""TwinScheduler: SPEC.md and BEHAVIOURS.md once more, slowly."""

from collections.abc import Iterable
from typing import Any

from pagoda.base.config import CacheConfig, SchedulerConfig, SchedulingMode, SchedulingPolicy
from pagoda.base.errors import RequestError
from pagoda.core.kv_specs import KVGroupSpec
from pagoda.core.request import Request
from tests.twin.encoder import EncoderCache
from tests.twin.memory import Memory, blocks_for
from tests.twin.pool import NULL, Pool
from tests.twin.state import Branch, Live, Planned, Step

Record = dict[str, Any]


class TwinScheduler:
    """Speaks plain records: see `tests.conformance.replay` for their keys."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        kv_groups: tuple[KVGroupSpec, ...],
        num_blocks: int,
        max_model_len: int,
        encoder_decoder: bool = False,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.pool = Pool(num_blocks)
        depth = config.pipeline_depth
        self.memory = Memory(
            kv_groups,
            self.pool,
            cache.block_size,
            cache.enable_prefix_caching,
            max_model_len,
            config.max_num_batched_tokens * depth,
        )
        self.watermark = int(cache.watermark * (num_blocks + 1))  # the null block counts as one of the pool
        self.encoder = EncoderCache(config.encoder_cache_tokens)
        self.encoder_decoder = encoder_decoder
        self.waiting: list[Live] = []
        self.running: list[Live] = []
        self.in_flight: list[Step] = []
        self.requests: dict[str, Live] = {}
        self.arrivals = 0
        self.step_number = 0
        self.thrown_out: list[str] = []  # since the last step was planned
        self.ignored: list[tuple[str, str]] = []
        self.capped: list[str] = []  # ended for want of capacity, told with the next step's results

    # Requests come and go -------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is in use")
        tables: list[list[int]] = [[] for _ in self.memory.groups]
        tokens = [int(token) for token in request.prompt_token_ids]
        branch = Branch(0, tokens, len(tokens), tables, hashed=[0] * len(tables))
        self.arrivals += 1
        live = Live(request, self.arrivals, [branch])
        self.requests[live.id] = live
        self._queue(live, front=False)

    def abort(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            if request_id in self.requests:
                self._end(self.requests[request_id])

    def reset_prefix_cache(self, preempt_running: bool) -> bool:
        if preempt_running:
            while self.running:
                live = self.running[-1]
                self._preempt(live)
                live.drop_before = live.epoch
                live.stale_steps = 0
        return self.pool.forget_contents()

    def set_drafts(self, drafts: dict[str, list[int]]) -> None:
        for request_id, tokens in drafts.items():
            live = self.requests.get(request_id)
            if live is None or live.status != "running":
                continue
            branch = live.branches[0]
            if branch.computed >= len(branch.tokens) - 1 + branch.placeholders:
                branch.drafts = list(tokens)[: self.config.num_speculative_tokens]

    def _queue(self, live: Live, front: bool) -> None:
        if self.config.scheduling_policy is SchedulingPolicy.PRIORITY:
            self.waiting.append(live)
            self.waiting.sort(key=lambda other: other.urgency)
        elif front:
            self.waiting.insert(0, live)
        else:
            self.waiting.append(live)

    def _end(self, live: Live) -> None:
        for queue in (self.waiting, self.running):
            if live in queue:
                queue.remove(live)
        self.memory.free_all(live)
        self._release_encoder(live)
        live.status = "gone"
        del self.requests[live.id]

    # One step -------------------------------------------------------------------------------------------------

    def schedule(self) -> Record:
        assert self.config.scheduling_mode is SchedulingMode.MIXED
        self.step_number += 1
        self.memory.copies = []
        self.budget = self.config.max_num_batched_tokens
        self.encoder_budget = self.config.encoder_budget
        self.planned: list[Planned] = []
        self.encoded: dict[str, list[int]] = {}
        self.admitted: list[Record] = []
        alone = len(self.running) + len(self.waiting) == 1
        self.cap = 0 if alone else self.config.long_prefill_token_threshold
        victims = self._continue_running()
        if not victims:
            self._admit_waiting()
        return self._record()

    def _continue_running(self) -> bool:
        """Give the running ones what they want, in order; True if anyone was thrown out for it."""
        victims = False
        place = 0
        while place < len(self.running) and self.budget > 0:
            live = self.running[place]
            branch = live.branches[0]
            want = self._wanted(branch, live)
            want, items, repeats = self._encoder_share(live, branch.computed, want)
            if want <= 0:
                place += 1
                continue
            self.memory.release_behind_windows(branch)
            upto = min(branch.computed + want + self.config.num_lookahead_slots, self.max_model_len)
            while self.memory.growth_need(branch, upto) > len(self.pool.free):
                if self.running == [live]:
                    self._outgrown(live)
                    victims = True
                    break
                victim = self._victim()
                victims = True
                if self.running.index(victim) < place:
                    place -= 1
                self._take_out(victim)
                self._preempt(victim)
                if victim is live:
                    break
            if live.status != "running":
                continue
            self.memory.grow(branch, upto)
            self._place(live, branch, want)
            self._encode(live, items, repeats)
            place += 1
        return victims

    def _wanted(self, branch: Branch, live: Live) -> int:
        limit = branch.num_prompt + self._max_tokens(live)
        if branch.placeholders and branch.computed + 2 - branch.placeholders >= limit:
            return 0  # what is in flight reaches the limit whatever comes
        want = len(branch.tokens) + len(branch.drafts) + branch.placeholders - branch.computed
        if 0 < self.cap < want:
            want = self.cap
        return min(want, self.budget, self.max_model_len - branch.computed - 1)

    def _victim(self) -> Live:
        if self.config.scheduling_policy is SchedulingPolicy.PRIORITY:
            return max(self.running, key=lambda live: live.urgency[:2])  # of equals, the one admitted first
        return self.running[-1]

    def _take_out(self, victim: Live) -> None:
        """Undo what this step planned for it."""
        for entry in [entry for entry in self.planned if entry.live is victim]:
            self.planned.remove(entry)
            self.budget += entry.new
            entry.branch.computed -= entry.new
            entry.branch.in_flight -= entry.new
        for item in self.encoded.pop(victim.id, []):
            self.encoder_budget += victim.request.media[item].length

    def _preempt(self, live: Live) -> None:
        self.running.remove(live)
        self.memory.free_all(live)
        self._release_encoder(live)
        live.status = "preempted"
        live.epoch += 1
        live.stale_steps = sum(1 for step in self._in_flight_of(live))
        for branch in live.branches:
            branch.computed = branch.in_flight = branch.placeholders = 0
            branch.drafts = []
        self.thrown_out.append(live.id)
        self._queue(live, front=True)

    def _in_flight_of(self, live: Live) -> list[Planned]:
        return [
            entry
            for step in self.in_flight
            for entry in step.planned
            if entry.live is live and entry.epoch >= live.drop_before
        ]

    def _outgrown(self, live: Live) -> None:
        self._take_out(live)
        self.capped.append(live.id)
        self._end(live)

    # Admission ------------------------------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        stepped_over: list[Live] = []
        while self.waiting and self.budget > 0 and len(self.running) < self.config.max_num_seqs:
            live = self.waiting[0]
            if live.stale_steps or self._too_many_adapters(live):
                stepped_over.append(self.waiting.pop(0))
                continue
            answer = self._admit(live)
            if answer == "never":
                self.ignored.append((live.id, "can never fit"))
                self._end(live)
            elif answer == "later":
                break
        self.waiting[:0] = stepped_over

    def _too_many_adapters(self, live: Live) -> bool:
        limit = self.config.max_loras
        in_use = {other.request.lora for other in self.running if other.request.lora is not None}
        return limit > 0 and live.request.lora is not None and live.request.lora not in in_use and len(in_use) >= limit

    def _admit(self, live: Live) -> str:
        request, branch = live.request, live.branches[0]
        cached, hits = self.memory.hit(request, branch.tokens)
        known = len(branch.tokens)
        want = known - cached
        if 0 < self.cap < want:
            want = self.cap
        if not self.config.enable_chunked_prefill and want > self.budget:
            return "later"
        want = min(want, self.budget)
        nothing: list[list[int]] = [[] for _ in hits]
        if self.memory.admission_need(request, min(known, self.max_model_len), nothing, capped=True) > len(self.pool):
            return "never"
        want, items, repeats = self._encoder_share(live, cached, want)
        if want <= 0:
            self._release_encoder(live)
            return "later"
        spare = len(self.pool.free) - (self.watermark if self.running else 0)
        upto = min(cached + want + self.config.num_lookahead_slots, self.max_model_len)
        needs = [self.memory.admission_need(request, upto, hits, capped=False)]
        if self.config.admit_whole_prompt:
            needs.append(self.memory.admission_need(request, min(known, self.max_model_len), hits, capped=True))
        if max(needs) > spare:
            self._release_encoder(live)
            return "later"
        self.waiting.remove(live)
        self.running.append(live)
        self.memory.adopt(request, branch, hits)
        branch.computed = cached
        self.memory.grow(branch, upto)
        kind = "resumed" if live.status == "preempted" else "new"
        self.admitted.append({"id": live.id, "kind": kind, "cached": cached})
        live.status = "running"
        self._place(live, branch, want)
        self._encode(live, items, repeats)
        return "ok"

    def _place(self, live: Live, branch: Branch, new: int) -> None:
        self.budget -= new
        start = branch.computed
        known = len(branch.tokens) + branch.placeholders
        drafts = branch.drafts[: max(0, start + new - known)]
        branch.drafts = []
        samples = start + new >= known
        self.memory.record(live.request, branch, min(start + new, len(branch.tokens)))
        branch.computed += new
        branch.in_flight += new
        self.planned.append(Planned(live, branch, start, new, samples, drafts, live.epoch))

    # Encoder --------------------------------------------------------------------------------------------------

    def _encoder_share(self, live: Live, computed: int, want: int) -> tuple[int, list[int], list[int]]:
        """How far the chunk may go, the items to encode in it, and places that repeat one of those."""
        items: list[int] = []
        repeats: list[int] = []
        budget = self.encoder_budget
        for place, item in enumerate(live.request.media):
            if want <= 0:
                return want, items, repeats
            if self.encoder_decoder:
                if computed > 0:
                    continue
            elif item.offset + item.length <= computed or item.offset >= computed + want:
                continue
            elif (
                self.config.no_partial_media and computed < item.offset and computed + want < item.offset + item.length
            ):
                return item.offset - computed, items, repeats
            elif any(live.request.media[other].content_hash == item.content_hash for other in items):
                repeats.append(place)
                continue
            elif self.encoder.hold(item.content_hash, live.id):
                live.encoder_items.add(place)
                continue
            pending = sum(live.request.media[other].length for other in items)
            if item.length > budget or not self.encoder.make_room(item.length + pending):
                return max(0, item.offset - computed), items, repeats
            items.append(place)
            budget -= item.length
        return want, items, repeats

    def _encode(self, live: Live, items: list[int], repeats: list[int]) -> None:
        for place in items:
            item = live.request.media[place]
            self.encoder_budget -= item.length
            if not self.encoder_decoder:
                self.encoder.put(item.content_hash, item.length, live.id)
                live.encoder_items.add(place)
        live.encoder_items.update(repeats)
        if items:
            self.encoded[live.id] = items

    def _release_encoder(self, live: Live, passed: int | None = None) -> None:
        """Let go of items the decoder has passed (all, when `passed` is None); a repeated one with its last place."""
        media = live.request.media
        for place in sorted(live.encoder_items):
            if passed is not None and media[place].offset + media[place].length > passed:
                continue
            live.encoder_items.discard(place)
            held = {media[other].content_hash for other in live.encoder_items}
            if media[place].content_hash not in held:
                self.encoder.release(media[place].content_hash, live.id)

    # Results --------------------------------------------------------------------------------------------------

    def _record(self) -> Record:
        step = Step(self.step_number, self.planned, False)
        for entry in self.planned:
            if self.config.async_scheduling and entry.samples:
                entry.branch.placeholders += 1 + len(entry.drafts)
        if self.planned:
            self.in_flight.append(step)
        record: Record = {
            "scheduled": [[entry.live.id, entry.new] for entry in self.planned],
            "admitted": self.admitted,
            "preempted": sorted(self.thrown_out),
            "samples": [entry.live.id for entry in self.planned if entry.samples],
            "drafts": {entry.live.id: entry.drafts for entry in self.planned if entry.drafts},
            "encoder": self.encoded,
            "copies": len(self.memory.copies),
            "ignored": sorted(request_id for request_id, _ in self.ignored),
            "handle": step,
        }
        self.thrown_out, self.ignored = [], []
        return record

    def update(self, step: Step, sampled: dict[str, list[int]]) -> Record:
        assert self.in_flight.pop(0) is step
        emitted: dict[str, list[int]] = {}
        finished: dict[str, str] = dict.fromkeys(self.capped, "length")
        self.capped = []
        for entry in step.planned:
            live, branch = entry.live, entry.branch
            if live.status == "gone" or entry.epoch < live.drop_before:
                continue
            stale = entry.epoch < live.epoch
            tokens = sampled.get(live.id, [])
            if stale:
                live.stale_steps -= 1
            else:
                branch.in_flight -= entry.new
                if tokens:
                    rejected = len(entry.drafts) - (len(tokens) - 1)
                    branch.computed -= rejected
                    if branch.placeholders:
                        branch.placeholders -= rejected
            if not self.encoder_decoder:
                self._release_encoder(live, branch.computed - branch.placeholders)
            taken, reason = self._append(live, branch, tokens)
            if branch.placeholders and not stale:
                branch.placeholders -= len(taken)
            if self.config.async_scheduling and live.status == "running":
                self.memory.record(live.request, branch, branch.computed - branch.placeholders)
            if taken:
                emitted[live.id] = taken
            if reason is not None:
                finished[live.id] = reason
                self._end(live)
        return {"emitted": emitted, "finished": finished}

    def _append(self, live: Live, branch: Branch, tokens: list[int]) -> tuple[list[int], str | None]:
        """The tokens that count, and why the output ends with the last of them."""
        sampling = live.request.sampling
        assert sampling is not None
        taken: list[int] = []
        for token in tokens:
            branch.tokens.append(token)
            taken.append(token)
            may_stop = branch.num_output >= sampling.min_tokens
            eos = token in live.request.eos_token_ids and not sampling.ignore_eos
            if may_stop and (eos or token in sampling.stop_token_ids):
                return taken, "stop"
            if branch.num_output >= self._max_tokens(live) or len(branch.tokens) >= self.max_model_len:
                return taken, "length"
        return taken, None

    def _max_tokens(self, live: Live) -> int:
        sampling = live.request.sampling
        if sampling is None or sampling.max_tokens is None:
            return self.max_model_len
        return sampling.max_tokens

    def state(self) -> Record:
        def held(live: Live) -> list[int]:
            return [sum(block != NULL for block in table) for table in live.branches[0].tables]

        return {
            "free_blocks": len(self.pool.free),
            "running": [live.id for live in self.running],
            "waiting": [live.id for live in self.waiting],
            "blocks": {live.id: held(live) for live in self.running},
            "computed": {live.id: live.branches[0].computed for live in self.requests.values()},
        }
