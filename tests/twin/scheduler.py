"""TwinScheduler: SPEC.md and BEHAVIOURS.md once more, slowly."""

from collections.abc import Iterable
from typing import Any

from pagoda.base.clock import Clock, VirtualClock
from pagoda.base.config import CacheConfig, PreemptionMode, SchedulingMode, SchedulingPolicy
from pagoda.base.errors import RequestError
from pagoda.core.kv_specs import KVGroupSpec
from pagoda.core.request import LoraRef, Request
from pagoda.core.scheduler_options import SchedulerOptions
from tests.twin.encoder import EncoderDesk
from tests.twin.memory import Memory
from tests.twin.pool import NULL, Pool
from tests.twin.state import Branch, Live, Planned, Step

Record = dict[str, Any]


class TwinScheduler:
    """Speaks plain records: see `tests.conformance.replay` for their keys. Branches are named "id" or "id/number"."""

    def __init__(
        self,
        config: SchedulerOptions,
        cache: CacheConfig,
        kv_groups: tuple[KVGroupSpec, ...],
        num_blocks: int,
        max_model_len: int,
        encoder_decoder: bool = False,
        num_host_blocks: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.clock = clock or VirtualClock()
        self.pool = Pool(num_blocks)
        self.host = Pool(num_host_blocks)
        in_flight = config.max_num_batched_tokens * config.pipeline_depth
        self.memory = Memory(
            kv_groups,
            self.pool,
            cache.block_size,
            cache.enable_prefix_caching and not encoder_decoder,
            max_model_len,
            in_flight,
        )
        self.watermark = int(cache.watermark * (num_blocks + 1))  # the null block counts as one of the pool
        self.desk = EncoderDesk(
            config.encoder_budget, config.encoder_cache_tokens, config.no_partial_media, encoder_decoder
        )
        self.encoder_decoder = encoder_decoder
        self.waiting: list[Live] = []
        self.swapped: list[Live] = []
        self.running: list[Live] = []
        self.requests: dict[str, Live] = {}
        self.in_flight: list[Step] = []
        self.arrivals = 0
        self.returns = 0
        self.step_number = 0
        self.last_prompt_step_s = 0.0
        self.thrown_out: list[str] = []  # since the last step was planned
        self.ignored: list[str] = []
        self.untold: dict[str, str] = {}  # ended while planning: branch name -> reason

    # Requests come and go -------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is in use")
        tokens = [int(token) for token in request.prompt_token_ids]
        groups = len(self.memory.groups)
        branches = [
            Branch(number, list(tokens), len(tokens), [[] for _ in range(groups)], hashed=[0] * groups)
            for number in range(request.num_seqs)
        ]
        self.arrivals += 1
        live = Live(request, (self.arrivals,), branches, forked=len(branches) == 1)
        if self.config.scheduling_policy is SchedulingPolicy.PRIORITY:
            live.place = (request.priority, request.arrival_time_s, request.request_id)
        self.requests[live.id] = live
        self._queue(self.waiting, live)

    def abort(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            if request_id in self.requests:
                self._end(self.requests[request_id])

    def reset_prefix_cache(self, preempt_running: bool) -> bool:
        if preempt_running:
            while self.running:
                live = self.running[-1]
                self._preempt(live, may_swap=False)
                live.drop_before = live.epoch
                live.stale_steps = 0
        return self.pool.forget_contents()

    def set_drafts(self, drafts: dict[str, list[int]]) -> None:
        for request_id, tokens in drafts.items():
            live = self.requests.get(request_id)
            if live is None or live.status != "running":
                continue
            branch = live.branches[0]
            if len(branch.tokens) - branch.computed == 1 and not branch.mid_prefill:
                branch.drafts = list(tokens)

    def _queue(self, line: list[Live], live: Live) -> None:
        line.append(live)
        line.sort(key=lambda other: other.place)

    def _end(self, live: Live) -> None:
        for queue in (self.waiting, self.running, self.swapped):
            if live in queue:
                queue.remove(live)
        for branch in live.branches:
            self._end_branch(branch)
        self.desk.release(live)
        live.status = "gone"
        del self.requests[live.id]

    def _end_branch(self, branch: Branch) -> None:
        branch.finished = True
        self.memory.free(branch)
        self.memory.drop_host(branch, self.host)

    # One step -------------------------------------------------------------------------------------------------

    def schedule(self) -> Record:
        self.step_number += 1
        self.memory.open_step()
        self.desk.open_step()
        self.budget = self.config.max_num_batched_tokens
        self.planned: list[Planned] = []
        self.entered: list[tuple[Live, Branch]] = []
        self.admitted: list[Record] = []
        self.has_prompt = False
        phased = self.config.scheduling_mode is SchedulingMode.PHASED  # its prompts are never cut
        self.cuts = not phased and self.config.enable_chunked_prefill
        self.cap = self.config.long_prefill_token_threshold if self.cuts and len(self.requests) > 1 else 0
        share, decoding = self.config.prefill_beside_decodes, self._decoding()
        self.prompt_budget: int | None = None
        if share and decoding and self.cuts:
            self.budget = min(self.budget, sum(1 + len(branch.drafts) for branch in decoding) + share)
            self.prompt_budget = share
        if self.config.scheduling_mode is SchedulingMode.MIXED:
            if not self._continue_running() and self._return_swapped():
                self._admit_waiting()
        else:
            thrown_out = len(self.thrown_out)
            if not self.swapped:
                self._admit_waiting()
            evicted = len(self.thrown_out) > thrown_out
            if not self.planned and not self._continue_running() and not evicted:
                self._return_swapped()
        return self._record()

    def _decoding(self) -> list[Branch]:
        """Those that run and have all their prompt behind them."""
        started = [branch for live in self.running for branch in live.alive if branch.started]
        return [branch for branch in started if not branch.mid_prefill]

    def _continue_running(self) -> bool:
        """Give the running ones what they want, in order; True if anyone was thrown out for it."""
        victims = False
        for live in list(self.running):
            for branch in list(live.alive):
                if live.status != "running" or not branch.started or branch.finished:
                    break
                victims |= self._continue_branch(live, branch)
        return victims

    def _continue_branch(self, live: Live, branch: Branch) -> bool:
        want, items, repeats = self.desk.share(live, branch.computed, self._wanted(branch, live))
        if want <= 0:
            return False
        victims = False
        self.memory.release_behind_windows(branch)
        upto = min(branch.computed + want + self.config.num_lookahead_slots, self.max_model_len)
        while self.memory.growth_need(branch, upto) > len(self.pool.free):
            if self.running == [live] or self._can_never_hold(live, upto):
                self._outgrown(live, branch)
                return victims
            victim = self._victim(self.running)
            victims = True
            self._take_out(victim)
            self._preempt(victim)
            if victim is live:
                return True
        self.memory.grow(branch, upto)
        self._place(live, branch, want)
        self.desk.encode(live, items, repeats)
        return victims

    def _wanted(self, branch: Branch, live: Live) -> int:
        known = len(branch.tokens) + branch.placeholders
        if branch.placeholders and known >= branch.num_prompt + self._max_tokens(live):
            return 0  # what is in flight ends it
        want = self._capped(live, known + len(branch.drafts) - branch.computed, len(branch.drafts))
        if branch.mid_prefill and self.prompt_budget is not None:
            want = min(want, self.prompt_budget)
        return min(want, self.budget, self.max_model_len - branch.computed - 1)

    def _capped(self, live: Live, want: int, num_drafts: int = 0) -> int:
        """Prompts are capped; drafts are not, nor are media items that must stay whole."""
        if not self.cap:
            return want
        whole = max((item.length for item in live.request.media), default=0) if self.config.no_partial_media else 0
        return min(want, max(self.cap, 1 + num_drafts, whole))

    def _victim(self, candidates: list[Live]) -> Live:
        if self.config.scheduling_policy is SchedulingPolicy.PRIORITY:
            return max(candidates, key=lambda live: live.place[:2])  # of equals, the one admitted first
        return candidates[-1]

    def _take_out(self, victim: Live) -> None:
        """Undo what this step planned for it."""
        for entry in [entry for entry in self.planned if entry.live is victim]:
            self.planned.remove(entry)
            self.budget += entry.new
            if self.prompt_budget is not None:
                self.prompt_budget += entry.of_prompts
            entry.branch.computed -= entry.new
            entry.branch.in_flight -= entry.new
        self.memory.call_off_copies(victim.branches)
        self.desk.take_back(victim)

    def _preempt(self, live: Live, may_swap: bool = True) -> None:
        self.running.remove(live)
        self.desk.release(live)
        self.thrown_out.append(live.id)
        live.epoch += 1
        live.stale_steps = sum(step.epochs.get(live.id, -1) >= live.drop_before for step in self.in_flight)
        whole = [branch for branch in live.alive if branch.started]
        swaps = self.config.preemption_mode is PreemptionMode.SWAP or (
            self.config.preemption_mode is PreemptionMode.AUTO and len(live.alive) > 1
        )
        passed = all(
            item.offset + item.length <= min((one.computed for one in whole), default=0) for item in live.request.media
        )
        everyone = live.forked and len(whole) == len(live.alive) and (passed or self.encoder_decoder)
        if may_swap and swaps and everyone and self.memory.host_need(whole) <= len(self.host.free):
            self.memory.swap_out(whole, self.host)
            live.status = "swapped"
            self._queue(self.swapped, live)
        else:
            self._drop(live)
        for branch in live.branches:
            branch.in_flight = branch.placeholders = 0
            branch.drafts = []
            branch.started = branch.mid_prefill = False

    def _drop(self, live: Live) -> None:
        for branch in live.branches:
            self.memory.free(branch)
            branch.computed = 0
        live.status = "preempted"
        if self.config.scheduling_policy is SchedulingPolicy.FCFS:
            self.returns += 1
            live.place = (-self.returns,)
        self._queue(self.waiting, live)

    def _can_never_hold(self, live: Live, upto: int) -> bool:
        nothing: list[list[int]] = [[] for _ in self.memory.groups]
        return self.memory.admission_need(live.request, upto, nothing, capped=True) > len(self.pool)

    def _outgrown(self, live: Live, branch: Branch) -> None:
        self.untold[self._name(live, branch)] = "length"
        self.ignored.append(live.id)
        if len(live.alive) == 1:
            self._end(live)
        else:
            self._end_branch(branch)

    # Coming back from host memory -------------------------------------------------------------------------------

    def _return_swapped(self) -> bool:
        """Bring back whom there is room for, in order. False if one must wait: nobody overtakes it then."""
        closed: set[LoraRef] = set()
        while self.budget > 0:
            line = [live for live in self.swapped if live.request.lora not in closed]
            if not line:
                return True
            live = line[0]
            if self._too_many_adapters(live):
                assert live.request.lora is not None
                closed.add(live.request.lora)
                continue
            if live.stale_steps or self._seats_taken() + live.seats > self.config.max_num_seqs:
                return False
            wants: list[int] = []
            for branch in live.alive:
                want = min(len(branch.tokens) - branch.computed, self.budget - sum(wants))
                want = self._capped(live, want)
                wants.append(want if self.prompt_budget is None else min(want, self.prompt_budget))
            if not any(wants) and any(branch.computed < len(branch.tokens) for branch in live.alive):
                return False
            uptos = [
                min(branch.computed + want + self.config.num_lookahead_slots, self.max_model_len)
                for branch, want in zip(live.alive, wants, strict=True)
            ]
            need = self.memory.return_need(live.alive, uptos, self.host)
            if need > len(self.pool.free) - (self.watermark if self.running else 0):
                if self.running or len(self.pool.free) < len(self.pool):
                    return False
                self._never(live)
                continue
            self.swapped.remove(live)
            self._enter(live)
            self.memory.swap_in(live.alive, self.host)
            for branch, want, upto in zip(live.alive, wants, uptos, strict=True):
                branch.started = True
                self.memory.record(live.request, branch, branch.computed)
                self.admitted.append({"id": self._name(live, branch), "kind": "resumed", "cached": branch.computed})
                if want:
                    self.memory.grow(branch, upto)
                    self._place(live, branch, want, enters=True)
        return not self.swapped

    def _never(self, live: Live) -> None:
        self.ignored.append(live.id)
        for branch in live.alive:
            self.untold[self._name(live, branch)] = "length"
        self._end(live)

    # Admission ------------------------------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        stepped_over: list[Live] = []
        while self.waiting and self.budget > 0:
            live = self.waiting[0]
            if live.stale_steps or self._too_many_adapters(live):
                stepped_over.append(self.waiting.pop(0))
                continue
            answer = self._line_stops(live) or self._admit(live)
            if answer == "never":
                self._never(live)
            elif answer != "ok" and not (answer == "no room" and self._make_way(live)):
                break
        self.waiting[:0] = stepped_over
        self.waiting.sort(key=lambda other: other.place)

    def _line_stops(self, live: Live) -> str | None:
        if self._seats_taken() + live.seats > self.config.max_num_seqs:
            return "no room" if live.seats <= self.config.max_num_seqs else None
        factor = self.config.scheduler_delay_factor
        oldest = min(other.request.arrival_time_s for other in self.waiting)
        if self.running and factor > 0 and self.clock.now() - oldest <= factor * self.last_prompt_step_s:
            return "later"
        lacking = sum(
            branch.computed < len(branch.tokens) and not self._is_decode(branch)
            for other in self.running
            for branch in other.alive
            if branch.started
        )
        return "later" if 0 < self.config.max_num_partial_prefills <= lacking else None

    @staticmethod
    def _is_decode(branch: Branch) -> bool:
        return len(branch.tokens) - branch.computed == 1 and branch.num_output > 0

    def _seats_taken(self) -> int:
        return sum(live.seats for live in self.running)

    def _too_many_adapters(self, live: Live) -> bool:
        limit = self.config.max_loras
        in_use = {other.request.lora for other in self.running if other.request.lora is not None}
        return limit > 0 and live.request.lora is not None and live.request.lora not in in_use and len(in_use) >= limit

    def _may_chunk(self, live: Live) -> bool:
        if self.config.scheduling_mode is SchedulingMode.MIXED:
            return self.config.enable_chunked_prefill
        return len(live.alive[0].tokens) > self.config.max_num_batched_tokens

    def _admit(self, live: Live) -> str:
        request, branch = live.request, live.alive[0]
        known = len(branch.tokens)
        nothing: list[list[int]] = [[] for _ in self.memory.groups]
        siblings = self._sibling_need(live)
        ahead = min(known + self.config.num_lookahead_slots, self.max_model_len)
        if self.memory.admission_need(request, ahead, nothing, capped=True) + siblings > len(self.pool):
            return "never"  # rule 55
        if live.seats > self.config.max_num_seqs:
            return "never"
        phased = self.config.scheduling_mode is SchedulingMode.PHASED
        if phased and request.num_prompt_tokens > self.config.max_num_batched_tokens:
            return "never"
        # Branches that return share the first one's prompt blocks; a hit would not hold those behind a window.
        whole = len(live.alive) > 1 and live.forked and self.memory.has_windows
        cached, hits = (0, nothing) if whole else self.memory.hit(request, branch.tokens)
        want = self._capped(live, known - cached)
        if self.prompt_budget is not None:
            want = min(want, self.prompt_budget)
        if want > self.budget and not self._may_chunk(live):
            return "later"
        want, items, repeats = self.desk.share(live, cached, min(want, self.budget))
        if want <= 0:
            self.desk.release(live)
            return "later"
        upto = min(cached + want + self.config.num_lookahead_slots, self.max_model_len)
        need = self.memory.admission_need(request, upto, hits, capped=False)
        if self.config.admit_whole_prompt:
            need = max(need, self.memory.admission_need(request, known, hits, capped=True) + siblings)
        if need > len(self.pool.free) - (self.watermark if self.running else 0):
            self.desk.release(live)
            alone = not self.running and len(self.pool.free) == len(self.pool)
            return "never" if alone else "no room"  # alone, there is nothing to wait for
        kind = "resumed" if live.status == "preempted" else "new"
        self.waiting.remove(live)
        self._enter(live)
        self.memory.adopt(request, branch, hits)
        branch.computed = cached
        branch.started = True
        self.memory.grow(branch, upto)
        self.admitted.append({"id": self._name(live, branch), "kind": kind, "cached": cached})
        self._place(live, branch, want, enters=True)
        self.has_prompt = True
        self.desk.encode(live, items, repeats)
        return "ok"

    def _sibling_need(self, live: Live) -> int:
        """Blocks of branches that return beside the first, behind the full prompt blocks they share with it."""
        return 0 if len(live.alive) == 1 or not live.forked else self.memory.sibling_need(live)

    def _enter(self, live: Live) -> None:
        live.status = "running"
        self.running.append(live)

    def _make_way(self, head: Live) -> bool:
        """Throw out the worst running one if the head of the line is more urgent (an option of the priority policy)."""
        if not self.config.evict_for_priority or self.config.scheduling_policy is not SchedulingPolicy.PRIORITY:
            return False
        if self.admitted or not self.running:
            return False  # who entered in this step may read blocks that the victim was to fill
        candidates = self.running
        worst = self._victim(candidates)
        if worst.place <= head.place:
            return False
        self._take_out(worst)
        self._preempt(worst)
        return True

    def _place(self, live: Live, branch: Branch, new: int, *, enters: bool = False) -> None:
        self.budget -= new
        of_prompts = new if self.prompt_budget is not None and (enters or branch.mid_prefill) else 0
        if self.prompt_budget is not None:
            self.prompt_budget -= of_prompts
        known = len(branch.tokens) + branch.placeholders
        drafts = branch.drafts[: max(0, branch.computed + new - known)]
        branch.drafts = []
        self.memory.record(live.request, branch, min(branch.computed + new, len(branch.tokens)))
        self.planned.append(Planned(live, branch, branch.computed, new, drafts, live.epoch, of_prompts=of_prompts))
        branch.computed += new
        branch.in_flight += new
        branch.mid_prefill = branch.computed < known

    # The record of the step, and its results --------------------------------------------------------------------

    def _record(self) -> Record:
        sampling: list[Planned] = []
        for entry in list(self.planned):
            live, branch = entry.live, entry.branch
            entry.samples = branch.computed >= len(branch.tokens) + branch.placeholders
            if entry.samples:
                sampling.append(entry)
                if not live.forked:
                    sampling += self._fork(entry)
        for live in self.running:
            self._join(live)
        if self.config.async_scheduling:
            for entry in sampling:
                entry.branch.placeholders += 1 + len(entry.drafts)
        step = Step(self.step_number, self.planned, sampling, self.has_prompt)
        if self.planned:
            self.in_flight.append(step)
        record: Record = {
            "scheduled": [[self._name(entry.live, entry.branch), entry.new] for entry in self.planned],
            "admitted": self.admitted,
            "preempted": sorted(self.thrown_out),
            "samples": [self._name(entry.live, entry.branch) for entry in sampling],
            "drafts": {entry.live.id: entry.drafts for entry in self.planned if entry.drafts},
            "encoder": self.desk.encoded,
            "copies": len(self.memory.copies),
            "swapped_out": self.memory.swapped_out,
            "ignored": sorted(set(self.ignored)),
            "handle": step,
        }
        self.thrown_out, self.ignored = [], []
        return record

    def _fork(self, entry: Planned) -> list[Planned]:
        """The prompt is complete: the other branches share its blocks, and sample from the same logits."""
        live, source = entry.live, entry.branch
        live.forked = True
        forks: list[Planned] = []
        for branch in live.alive:
            if branch is not source:
                self.memory.fork(source, branch)
                branch.started = True
                forks.append(Planned(live, branch, entry.start, 0, [], live.epoch, samples=True))
        return forks

    def _join(self, live: Live) -> None:
        """Branches that return after a recompute share the full prompt blocks of the first one, once it has them."""
        first = live.alive[0]
        known = min((len(branch.tokens) for branch in live.alive if not branch.started), default=0)
        prompt_end = live.request.num_prompt_tokens // self.memory.block_size * self.memory.block_size
        shared = min(live.request.num_prompt_tokens, known - 1) // self.memory.block_size * self.memory.block_size
        # The first one's window moves on: siblings that need less than the full prompt blocks must not wait.
        ready = shared if self.memory.has_windows else prompt_end
        if not live.forked or not first.started or first.computed < ready:
            return
        for branch in live.alive:
            if not branch.started:
                branch.started = branch.mid_prefill = True
                branch.computed = shared
                self.memory.share_prefix(first, branch, branch.computed)
                self.admitted.append({"id": self._name(live, branch), "kind": "resumed", "cached": branch.computed})

    def update(self, step: Step, sampled: dict[str, list[int]], duration_s: float = 0.0) -> Record:
        if not step.planned:
            return self._with_untold({"emitted": {}, "finished": {}})
        assert self.in_flight.pop(0) is step
        if step.has_prompt:
            self.last_prompt_step_s = duration_s
        emitted: dict[str, list[int]] = {}
        finished: dict[str, str] = {}
        for live in step.requests:
            if live.status != "gone" and step.epochs[live.id] < live.epoch and step.epochs[live.id] >= live.drop_before:
                live.stale_steps -= 1
        for entry in step.planned:
            if entry.epoch == entry.live.epoch:
                entry.branch.in_flight -= entry.new
                if entry.live.status == "running" and not self.encoder_decoder:
                    self.desk.release(entry.live, entry.branch.computed - entry.branch.placeholders)
        for entry in step.sampling:
            live, branch = entry.live, entry.branch
            if live.status == "gone" or entry.epoch < live.drop_before:
                continue
            if branch.finished:
                continue
            name = self._name(live, branch)
            tokens = sampled[name]
            rejected = len(entry.drafts) - (len(tokens) - 1)
            if entry.epoch == live.epoch:
                branch.computed -= rejected
                branch.placeholders -= min(branch.placeholders, 1 + len(entry.drafts))
            elif live.status == "swapped":
                branch.computed -= rejected
            taken, reason = self._append(live, branch, tokens)
            if self.config.async_scheduling and live.status == "running":
                self.memory.record(live.request, branch, branch.computed - branch.placeholders)
            emitted[name] = taken
            if reason is not None:
                finished[name] = reason
                if len(live.alive) == 1:
                    self._end(live)
                else:
                    self._end_branch(branch)
        return self._with_untold({"emitted": emitted, "finished": finished})

    def _with_untold(self, record: Record) -> Record:
        record["finished"] |= self.untold
        self.untold = {}
        return record

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

    @staticmethod
    def _name(live: Live, branch: Branch) -> str:
        return f"{live.id}/{branch.number}" if len(live.branches) > 1 else live.id

    def state(self) -> Record:
        def held(live: Live) -> list[int]:
            """Distinct blocks per group."""
            return [
                len({block for branch in live.alive for block in branch.tables[group] if block != NULL})
                for group in range(len(self.memory.groups))
            ]

        return {
            "free_blocks": len(self.pool.free),
            "free_host_blocks": len(self.host.free),
            "running": [live.id for live in self.running],
            "waiting": [live.id for live in self.waiting],
            "swapped": [live.id for live in self.swapped],
            "blocks": {live.id: held(live) for live in self.running},
            "computed": {live.id: live.alive[0].computed for live in self.requests.values()},
        }
