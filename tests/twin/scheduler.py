"""TwinScheduler: docs/reference/scheduler-contract.md once more, slowly."""

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import numpy as np

from pagoda.base.clock import Clock, VirtualClock
from pagoda.base.config import CacheConfig, PreemptionMode, SchedulingMode, SchedulingPolicy
from pagoda.base.errors import RequestError
from pagoda.core.cost_model import CostModel, RowWork
from pagoda.core.events import (
    Admitted,
    ClientEvent,
    DraftsVerified,
    Encoded,
    Ended,
    Failed,
    FirstToken,
    Held,
    Limited,
    Pinned,
    Preempted,
    Queued,
    Swapped,
)
from pagoda.core.kv import KVGroupKind, KVGroupSpec, KVSizing
from pagoda.core.request import AdmitKind, Reason, Request, RequestKey, RequestStatus
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from tests.twin.beams import TwinSearch
from tests.twin.encoder import EncoderInputs, Share
from tests.twin.memory import Hit, Memory, Need, adapter_of, exceeds, total
from tests.twin.pool import NULL, Pool
from tests.twin.state import Planned, Step, TwinRequest, TwinSequence

Record = dict[str, Any]
NO_ROOM = (Reason.NUM_SEQS, Reason.BLOCKS, Reason.WATERMARK)
WHY_ENDED = "for a reason"  # in place of messages for people


class TwinScheduler:
    """Takes and returns plain records (keys: `tests.conformance.replay`). Sequences are named "id" or "id/number".

    logprobs_of: what the model says of every token after some, for beam searches.
    events: what happened, as pagoda.core.events says it.
    """

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
        why_not_ready: Callable[[Request], Reason | None] = lambda _: None,
        logprobs_of: Callable[[list[int]], list[float]] = lambda _: [],
    ) -> None:
        self.config = config
        self.why_not_ready = why_not_ready
        self.logprobs_of = logprobs_of
        self.max_model_len = max_model_len
        self.clock = clock or VirtualClock()
        sizing = KVSizing.of(kv_groups, cache.block_size, max_model_len, config)
        self.pool = Pool(sizing.pool_sizes(num_blocks))
        self.second = 0
        self.host = Pool(sizing.pool_sizes(num_host_blocks))
        in_flight = config.max_num_batched_tokens * config.pipeline_depth
        self.memory = Memory(
            kv_groups,
            self.pool,
            cache.block_size,
            cache.enable_prefix_caching and not encoder_decoder,
            max_model_len,
            in_flight,
            config.pipeline_depth,
        )
        # The null block counts as one of the pool.
        self.watermark = [int(cache.watermark * (size + 1)) for size in self.pool.sizes]
        self.encoder = EncoderInputs(
            config.encoder_budget, config.encoder_cache_tokens, config.no_partial_media, encoder_decoder
        )
        self.encoder_decoder = encoder_decoder
        self.costs = CostModel(kv_groups)
        self.waiting: list[TwinRequest] = []
        self.swapped: list[TwinRequest] = []
        self.running: list[TwinRequest] = []
        self.requests: dict[str, TwinRequest] = {}
        self.in_flight: list[Step] = []
        self.arrivals = 0
        self.returns = 0
        self.admissions = 0
        self.step_number = 0
        self.last_prompt_step_s = 0.0
        self.preempted: list[str] = []  # since the last step was planned
        self.ignored: list[str] = []
        self.deferred: dict[str, str] = {}  # ended while planning: sequence name -> reason
        self.events: list[ClientEvent] = []
        self.event_step = 0

    def _at(self, state: TwinRequest) -> tuple[int, float, int, int]:
        """What an event of the request begins with."""
        return self.event_step, self.clock.now(), state.request.client_index, state.request.handle

    # Requests come and go -------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is in use")
        tokens = [int(token) for token in request.prompt_token_ids]
        groups = len(self.memory.groups)
        sequences = [
            TwinSequence(number, list(tokens), len(tokens), [[] for _ in range(groups)], hashed=[0] * groups)
            for number in range(request.num_seqs)
        ]
        self.arrivals += 1
        state = TwinRequest(request, (self.arrivals,), sequences, forked=len(sequences) == 1)
        if self.config.scheduling_policy is SchedulingPolicy.PRIORITY:
            state.place = (request.priority, request.arrival_time_s, request.request_id)
        self.requests[state.id] = state
        self._push(self.waiting, state)
        before = self._position(self.waiting, state)
        self.events.append(Queued(*self._at(state), state.id, len(tokens), request.num_seqs, before))

    def abort(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            if request_id in self.requests:
                self._end(self.requests[request_id], RequestStatus.FINISHED_ABORTED)

    def finish_sequence(self, request_id: str, number: int) -> None:
        """A stop string was found in its text."""
        state = self.requests.get(request_id)
        if state is not None and not state.sequences[number].finished:
            self._end_one(state, state.sequences[number], RequestStatus.FINISHED_STOPPED)

    def reset_prefix_cache(self, preempt_running: bool) -> bool:
        if preempt_running:
            while self.running:
                state = self.running[-1]
                self._preempt(state, None, may_swap=False)
                self._drop_late_results(state)
        return self.pool.forget_contents()

    def set_drafts(self, drafts: dict[str, list[int]], number: int = 0) -> None:
        """Offer drafts, by request.   number: of its sequence."""
        for request_id, tokens in drafts.items():
            state = self.requests.get(request_id)
            if state is None or state.status != "running":
                continue
            sequence = state.sequences[number]
            if sequence not in state.started:
                continue
            is_beam = state.request.is_beam_search
            lacks = len(sequence.tokens) - sequence.computed
            if self.memory.has_states:  # right drafts before a wrong one are computed again
                lacks, tokens = min(lacks, 1), tokens[: self.memory.block_size]
            if lacks == 1 and not sequence.mid_prefill and not is_beam:
                sequence.drafts = list(tokens)

    def _push(self, queue: list[TwinRequest], state: TwinRequest) -> None:
        queue.append(state)
        queue.sort(key=lambda other: other.place)

    @staticmethod
    def _position(queue: list[TwinRequest], state: TwinRequest) -> int:
        """How many requests come before it, without those that are set aside."""
        return sum(not other.is_aside for other in queue[: queue.index(state)])

    def _hold(self, queue: list[TwinRequest], state: TwinRequest, reason: Reason) -> None:
        state.is_considered = True
        self._note_reason(queue, state, reason)

    def _note_reason(self, queue: list[TwinRequest], state: TwinRequest, reason: Reason) -> None:
        if state.held_for is not reason:
            state.held_for = reason
            counts = self._position(queue, state), sum(self._most_blocks(state)), len(self.pool.free)
            self.events.append(Held(*self._at(state), reason, *counts))

    @staticmethod
    def _drop_late_results(state: TwinRequest) -> None:
        state.drop_before, state.stale_steps, state.is_aside = state.epoch, 0, False

    def _end(self, state: TwinRequest, status: RequestStatus, message: str | None = None) -> None:
        for sequence in state.alive:
            self._end_sequence(state, sequence, status, message=message)

    def _end_one(
        self, state: TwinRequest, sequence: TwinSequence, status: RequestStatus, message: str | None = None
    ) -> None:
        """If others wait for what it computes, they start again without it. Beams end together."""
        if state.request.is_beam_search:
            self._end(state, status, message)
            return
        if state.status == "running" and state.started == [sequence] and len(state.alive) > 1:
            self._preempt(state, None, may_swap=False)
        self._end_sequence(state, sequence, status, message=message)

    def _end_sequence(
        self,
        state: TwinRequest,
        sequence: TwinSequence,
        status: RequestStatus,
        stop_token: int | None = None,
        message: str | None = None,
    ) -> None:
        sequence.finished = True
        self._pin(state, sequence)
        self.memory.free(sequence)
        self.memory.drop_host(sequence, self.host)
        self.memory.call_off_copies([sequence])
        if not state.alive:
            for queue in (self.waiting, self.running, self.swapped):
                if state in queue:
                    queue.remove(state)
            self.encoder.release(state)
            state.status = "gone"
            del self.requests[state.id]
        end = sequence.number, status, stop_token, message, not state.alive
        self.events.append(Ended(*self._at(state), state.id, *end))

    def _pin(self, state: TwinRequest, sequence: TwinSequence) -> None:
        """It is about to leave its blocks, if it has any."""
        pin = state.request.pin
        if pin is not None and sequence.started and self.memory.caching and self.memory.groups:
            numbers, until = self.memory.in_order(sequence), self.second + pin.ttl_s
            num_pinned = self.pool.pin(numbers, pin.owner, until, partly=not self.memory.has_windows)
            if num_pinned:
                self.events.append(Pinned(*self._at(state), sequence.number, num_pinned, pin.ttl_s))

    # One step -------------------------------------------------------------------------------------------------

    def wake(self, keys: Collection[RequestKey]) -> None:
        """What these requests wait for may be ready."""
        for state in self.requests.values():
            state.is_aside &= state.request.key not in keys

    def schedule(self) -> Record:
        self.step_number += 1
        self.event_step = self.step_number
        self.second = int(self.clock.now())
        self.pool.end_pins(self.second)
        self.memory.open_step()
        self.encoder.open_step()
        self.budget = self.config.max_num_batched_tokens
        self.planned: list[Planned] = []
        self.entered: list[tuple[TwinRequest, TwinSequence]] = []
        self.admitted: list[Record] = []
        self.has_prompt = False
        phased = self.config.scheduling_mode is SchedulingMode.PHASED  # its prompts are never cut
        self.closed_to_adapters = False
        self.cuts = not phased and self.config.enable_chunked_prefill
        self.cap = self.config.long_prefill_token_threshold if self.cuts and len(self.requests) > 1 else 0
        started = [sequence for state in self.running for sequence in state.alive if sequence.started]
        stages = self.config.num_stages
        self.most_decodes = len(started) if stages == 1 else -(-len(started) // stages)
        share, decoding = self.config.prefill_beside_decodes, self._decoding()
        self.prompt_budget: int | None = None
        if share and decoding and self.cuts:
            wanted = sum(1 + len(sequence.drafts) for sequence in decoding)
            if self.memory.has_states:  # right drafts before a wrong one are computed again
                lacks = [len(one.tokens) + one.placeholders - one.computed for one in decoding]
                wanted += sum(max(count - 1, 0) for count in lacks)
            self.budget = min(self.budget, wanted + share)
            self.prompt_budget = share
        if self.config.scheduling_mode is SchedulingMode.MIXED:
            if not self._run_running() and self._resume_swapped():
                self._admit_waiting()
        else:
            preempted = len(self.preempted)
            if not self.swapped:
                self._admit_waiting()
            evicted = len(self.preempted) > preempted
            if not self.planned and not self._run_running() and not evicted:
                self._resume_swapped()
        self._end_reasons()
        return self._record()

    def _end_reasons(self) -> None:
        """What had a reason to wait, and was not considered in this step, waits for its turn."""
        for queue in (self.swapped, self.waiting):
            for state in queue:
                lacks_adapter = state.held_for is Reason.LORA and self._is_without_room(state)
                if state.held_for is not None and not (state.is_aside or state.is_considered or lacks_adapter):
                    self._note_reason(queue, state, Reason.TURN)
                state.is_considered = False

    def _decoding(self) -> list[TwinSequence]:
        """Sequences that run and have computed their prompt."""
        started = [sequence for state in self.running for sequence in state.alive if sequence.started]
        return [sequence for sequence in started if not sequence.mid_prefill]

    def _run_running(self) -> bool:
        """Give running requests what they lack, in order. Return whether one was preempted for it."""
        victims = False
        for state in list(self.running):
            for sequence in list(state.alive):
                if state.status != "running" or not sequence.started or sequence.finished:
                    break
                victims |= self._run_sequence(state, sequence)
        return victims

    def _run_sequence(self, state: TwinRequest, sequence: TwinSequence) -> bool:
        wanted, limit = self._wanted(sequence, state)
        share = self.encoder.share(state, sequence.computed, wanted)
        want = share.want
        self._note_limited(state, sequence, Reason.ENCODER if want < wanted else limit)
        if want <= 0:
            return False
        victims = False
        self.memory.release_behind_windows(sequence)
        upto = sequence.computed + want
        known = len(sequence.tokens) + sequence.placeholders
        while exceeds(self.memory.growth_need(sequence, upto, known), self.pool.num_free()):
            if upto > known and (self.running == [state] or self.memory.has_states):  # it drops its drafts
                sequence.drafts, want = [], known - sequence.computed
                upto = known
                continue
            if self.running == [state] or self._can_never_hold(state, upto):
                if sequence.placeholders:
                    return victims  # its token in flight still counts: it ends when that is back
                self._outgrown(state, sequence)
                return victims
            victim = self._victim(self.running)
            victims = True
            self._take_out(victim)
            self._preempt(victim, state)
            if victim is state:
                return True
        self.memory.grow(sequence, upto, known)
        self._place(state, sequence, want)
        self._encode(state, share)
        return victims

    def _encode(self, state: TwinRequest, share: Share) -> None:
        num_items, num_cached = self.encoder.encode(state, share)
        if num_items:
            self.events.append(Encoded(*self._at(state), num_items, num_cached))

    def _note_limited(self, state: TwinRequest, sequence: TwinSequence, limit: Reason | None) -> None:
        if limit is not None and limit is not sequence.limit:
            sequence.limit = limit
            self.events.append(Limited(*self._at(state), sequence.number, limit))

    def _wanted(self, sequence: TwinSequence, state: TwinRequest) -> tuple[int, Reason | None]:
        """Tokens that it may compute, and the last rule that shortened that."""
        known = len(sequence.tokens) + sequence.placeholders
        if sequence.placeholders and known >= sequence.num_prompt + self._max_tokens(state):
            return 0, None  # what is in flight ends it
        # The token at the model's last position is computed only if it is the prompt's.
        last = max(len(sequence.tokens), self.max_model_len - 1)
        want = max(min(known + len(sequence.drafts), last) - sequence.computed, 0)
        rules = [(Reason.ROW_CAP, self._capped(state, sequence.computed, want, len(sequence.drafts)))]
        if not sequence.mid_prefill and self._num_decodes() >= self.most_decodes:
            rules.append((Reason.STAGES, 0))
        if sequence.mid_prefill and self.prompt_budget is not None:
            rules.append((Reason.PREFILL_SHARE, self.prompt_budget))
        left = self.budget - self._kept_after(sequence, only_siblings=sequence.mid_prefill)
        rules.append((Reason.BUDGET, min(self.budget, max(left, 0 if sequence.mid_prefill else 1))))
        limit = None
        for reason, most in rules:
            if most < want:
                want, limit = most, reason
        return want, limit

    def _kept_after(self, taker: TwinSequence, *, only_siblings: bool) -> int:
        """Tokens that a prompt, or drafts, leave: one for each decoding sequence after it (that runs with siblings)."""
        order = [(state, [one for one in state.alive if one.started]) for state in self.running]
        running = [(state, sequence, len(started) > 1) for state, started in order for sequence in started]
        after = running[[sequence for _, sequence, _ in running].index(taker) + 1 :]
        decoding = [
            has_siblings or not only_siblings
            for state, sequence, has_siblings in after
            if not sequence.mid_prefill and self._lacks_tokens(state, sequence)
        ]
        is_itself = not taker.mid_prefill
        return sum(decoding[: self.most_decodes - self._num_decodes() - is_itself])

    def _num_decodes(self) -> int:
        """Rows that decode in this step, as planned so far."""
        return sum(entry.decodes for entry in self.planned)

    def _lacks_tokens(self, state: TwinRequest, sequence: TwinSequence) -> bool:
        known = len(sequence.tokens) + sequence.placeholders
        if sequence.placeholders and known >= sequence.num_prompt + self._max_tokens(state):
            return False  # what is in flight ends it
        last = max(len(sequence.tokens), self.max_model_len - 1)
        return min(known + len(sequence.drafts), last) > sequence.computed

    def _capped(self, state: TwinRequest, computed: int, want: int, num_drafts: int = 0) -> int:
        """Prompts are capped; sequences with drafts are not, nor are media items that must stay whole."""
        if not self.cap or num_drafts:
            return want
        media = state.request.media if self.config.no_partial_media and not self.encoder_decoder else ()
        whole = max((item.length for item in media if item.offset + item.length > computed), default=0)
        return min(want, max(self.cap, whole))

    def _victim(self, candidates: list[TwinRequest]) -> TwinRequest:
        if self.config.scheduling_policy is SchedulingPolicy.PRIORITY:
            return max(candidates, key=lambda state: state.place[:2])  # of equals, the one admitted first
        return candidates[-1]

    def _take_out(self, victim: TwinRequest) -> None:
        """Undo what this step planned for it."""
        for entry in [entry for entry in self.planned if entry.state is victim]:
            self.planned.remove(entry)
            self.budget += entry.new
            if self.prompt_budget is not None:
                self.prompt_budget += entry.of_prompts
            entry.sequence.computed -= entry.new
            entry.sequence.in_flight -= entry.new
            self.pool.forget_blocks(entry.recorded)
        self.memory.call_off_copies(victim.sequences)
        self.encoder.take_back(victim, self.requests)

    def _preempt(self, state: TwinRequest, cause: TwinRequest | None, *, may_swap: bool = True) -> None:
        """cause: the request that it makes room for."""
        self.running.remove(state)
        free_before = len(self.pool.free)
        self.encoder.release(state)
        self.preempted.append(state.id)
        state.epoch += 1
        state.stale_steps = sum(step.epochs.get(state.id, -1) >= state.drop_before for step in self.in_flight)
        whole = [sequence for sequence in state.alive if sequence.started]
        swaps = self.config.preemption_mode is PreemptionMode.SWAP or (
            self.config.preemption_mode is PreemptionMode.AUTO and len(state.alive) > 1
        )
        passed = all(
            item.offset + item.length <= min((one.computed for one in whole), default=0) for item in state.request.media
        )
        forked = state.forked or len(state.alive) == 1  # nothing is left to fork from one that is alone
        everyone = forked and len(whole) == len(state.alive) and (passed or self.encoder_decoder)
        fits = may_swap and everyone and not exceeds(self.memory.host_need(whole), self.host.num_free())
        if state.request.is_beam_search:  # it goes back one token: before the first choice, or with states, it cannot
            fits = fits and state.search is not None and not self.memory.has_states
        if fits and self.config.preemption_mode is PreemptionMode.COST:
            swaps = self._swap_is_cheaper(state, whole)
        num_lost = 0 if fits and swaps else self._lost(state, whole or state.alive).num_tokens
        if fits and swaps:
            for sequence in whole:
                self._pin(state, sequence)
            num_blocks = self.memory.swap_out(whole, self.host)
            self.events.append(Swapped(*self._at(state), True, num_blocks))
            state.status = "swapped"
            self._push(self.swapped, state)
        else:
            self._drop(state)
        for sequence in state.sequences:
            sequence.in_flight = sequence.placeholders = 0
            sequence.drafts = []
            sequence.started = sequence.mid_prefill = False
            sequence.limit = None
        self._note_preempted(state, cause, num_lost, len(self.pool.free) - free_before)

    def _note_preempted(self, state: TwinRequest, cause: TwinRequest | None, num_lost: int, num_freed: int) -> None:
        who = (None, None) if cause is None else cause.request.key
        mode = "swap" if state.status == "swapped" else "recompute"
        self.events.append(Preempted(*self._at(state), *who, mode, num_lost, num_freed))

    def _swap_is_cheaper(self, state: TwinRequest, whole: list[TwinSequence]) -> bool:
        """A block is copied twice. What others hold of its prefix is found again; media items may be encoded again."""
        kept = self.memory.kept_without(whole) if state.request.reads_prefix_cache else 0
        end = whole[0].computed
        items = {
            item.content_hash: item.length
            for item in state.request.media
            if self.encoder_decoder or (item.offset < end and kept < item.offset + item.length)
        }
        lost = self._lost(state, whole)
        again = RowWork(
            np.array([kept, *lost.start[1:]], np.int32),
            np.array([end - kept, *lost.num_new[1:]], np.int32),
            sum(length for content, length in items.items() if content not in self.encoder.cache.size),
        )
        return self.costs.swap_is_cheaper(again, sum(self.memory.host_need(whole)))

    def _lost(self, state: TwinRequest, whole: list[TwinSequence]) -> RowWork:
        """What must be computed again without their KV: by the first sequence, what all share, too."""
        full_blocks = min([state.request.num_prompt_tokens, *(sequence.computed for sequence in whole)])
        shared = full_blocks // self.memory.block_size * self.memory.block_size
        start = [0] + [shared] * (len(whole) - 1)
        new = [sequence.computed - first for sequence, first in zip(whole, start, strict=True)]
        return RowWork(np.array(start, np.int32), np.array(new, np.int32))

    def measure(self, step: Step, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Take the times of a step: what it computed is what the twin planned."""
        if output.swap_out.size or output.swap_in.size:
            self.costs.observe_copies(len(output.swap_out) + len(output.swap_in), result.swap_s)
        if step.planned:
            num_encoded = sum(item.length for item in output.encoder_inputs)
            start, new = np.array([[entry.start, entry.new] for entry in step.planned], np.int32).T
            self.costs.observe_step(RowWork(start, new, num_encoded), result.duration_s - result.swap_s)

    def _drop(self, state: TwinRequest) -> None:
        for sequence in state.sequences:
            self._pin(state, sequence)
            self.memory.free(sequence)
            sequence.computed = 0
            if state.request.is_beam_search:  # the search begins again
                if state.stale_steps:  # which may show that its numbers are wrong
                    self._forget_output(state.request, sequence)
                del sequence.tokens[sequence.num_prompt :]
        if state.request.is_beam_search:
            state.search, state.forked = None, len(state.sequences) == 1
        state.status, state.held_for = "preempted", None
        if self.config.scheduling_policy is SchedulingPolicy.FCFS:
            self.returns += 1
            state.place = (-self.returns,)
        self._push(self.waiting, state)

    def _can_never_hold(self, state: TwinRequest, upto: int) -> bool:
        return exceeds(self.memory.most_need(state.request, upto), list(self.pool.sizes))

    def _outgrown(self, state: TwinRequest, sequence: TwinSequence) -> None:
        together = [sequence]
        if state.request.is_beam_search:
            self._take_out(state)
            together = state.alive
        for one in together:
            self.deferred[self._name(state, one)] = "length"
        self.ignored.append(state.id)
        self._end_one(state, sequence, RequestStatus.FINISHED_LENGTH_CAPPED, WHY_ENDED)

    # Coming back from host memory -------------------------------------------------------------------------------

    def _resume_swapped(self) -> bool:
        """Bring back requests in order while there is room. Return False if one must wait: none may pass it."""
        closed: set[Hashable] = set()
        while True:
            queue = [one for one in self.swapped if not one.is_aside and adapter_of(one.request) not in closed]
            if not queue:
                return True
            state = queue[0]
            if self.budget <= 0:
                self._hold(self.swapped, state, Reason.BUDGET)
                return False
            if self._has_too_many_adapters(state):
                closed.add(adapter_of(state.request))
                self._hold(self.swapped, state, Reason.LORA)
                self._count_skip(state)
                continue
            if not state.stale_steps and self._lacks_something(self.swapped, state):
                continue
            reason = self._why_not_back(state)
            if reason is Reason.NEVER:
                self._never(state)
            elif reason is not None:
                self._hold(self.swapped, state, reason)
                return False

    def _why_not_back(self, state: TwinRequest) -> Reason | None:
        """Bring it back, or say why not."""
        if state.stale_steps:
            return Reason.IN_FLIGHT
        if self._num_seqs_running() + state.num_seqs > self.config.max_num_seqs:
            return Reason.NUM_SEQS
        wants: list[int] = []
        for sequence in state.alive:
            want = min(len(sequence.tokens) - sequence.computed, self.budget - sum(wants))
            want = self._capped(state, sequence.computed, want)
            wants.append(want if self.prompt_budget is None else min(want, self.prompt_budget - sum(wants)))
        if not any(wants) and any(sequence.computed < len(sequence.tokens) for sequence in state.alive):
            return Reason.PREFILL_SHARE  # the step's budget is not spent, or it would not be considered
        ends = [sequence.computed + want for sequence, want in zip(state.alive, wants, strict=True)]
        need = self.memory.return_need(state.alive, ends, self.host)
        if self.running:  # each of them, and of these, needs room for one token more
            need = self.memory.return_need(state.alive, [self._next(end) for end in ends], self.host)
            started = [sequence for other in self.running for sequence in other.started]
            need = total(need, *(self.memory.num_missing(one, self._next(one.computed)) for one in started))
        reason = self._why_short(need)
        if reason is not None:
            return reason
        self.swapped.remove(state)
        self._enter(state)
        num_tokens = sum(len(sequence.tokens) for sequence in state.alive)
        num_computed = sum(sequence.computed for sequence in state.alive)
        num_blocks = self.memory.swap_in(state.alive, self.host)
        self.events.append(Swapped(*self._at(state), False, num_blocks))
        for sequence, want, upto in zip(state.alive, wants, ends, strict=True):
            sequence.started = True
            sequence.mid_prefill = len(sequence.tokens) - sequence.computed > 1
            self.memory.record(state.request, sequence, sequence.computed)
            self.admitted.append({"id": self._name(state, sequence), "kind": "resumed", "cached": sequence.computed})
            if want:
                self.memory.grow(sequence, upto)
                self._place(state, sequence, want, enters=True)
        self._note_admitted(state, AdmitKind.SWAPPED_IN, num_tokens, None, num_computed, sum(wants))
        return None

    def _next(self, end: int) -> int:
        return min(end + 1, self.max_model_len)

    def _note_admitted(
        self, state: TwinRequest, kind: AdmitKind, num_tokens: int, cached: int | None, computed: int, new: int
    ) -> None:
        held = sum(len({block for block in table if block != NULL}) for table in state.started[0].tables)
        counts = num_tokens, cached, computed, new, held, len(self.pool.free)
        self.events.append(Admitted(*self._at(state), kind, *counts))

    def _why_short(self, need: Need) -> Reason | None:
        """Why a request that needs so many blocks does not enter. The watermark is kept only next to others."""
        free = self.pool.num_free()
        if exceeds(need, free):
            return Reason.BLOCKS if self.running or free != list(self.pool.sizes) else Reason.NEVER
        return Reason.WATERMARK if self.running and exceeds(total(need, self.watermark), free) else None

    def _never(self, state: TwinRequest) -> None:
        self.ignored.append(state.id)
        for sequence in state.alive:
            self.deferred[self._name(state, sequence)] = "length"
        has_output = any(sequence.num_output for sequence in state.sequences)
        status = RequestStatus.FINISHED_LENGTH_CAPPED if has_output else RequestStatus.FINISHED_IGNORED
        self._end(state, status, WHY_ENDED)

    # Admission ------------------------------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        closed: set[Hashable] = set()
        while True:
            queue = [one for one in self.waiting if not one.is_aside and adapter_of(one.request) not in closed]
            if not queue:
                return
            state = queue[0]
            if self.budget <= 0:
                self._hold(self.waiting, state, Reason.BUDGET)
                return
            if self._has_too_many_adapters(state):
                closed.add(adapter_of(state.request))
                self._hold(self.waiting, state, Reason.LORA)
                self._count_skip(state)
                continue
            if state.stale_steps:
                self._hold(self.waiting, state, Reason.IN_FLIGHT)
                state.is_aside = True
                continue
            if self._lacks_something(self.waiting, state):
                continue
            reason = self._why_never(state) or self._why_held(state) or self._admit(state)
            if reason is Reason.NEVER:
                self._never(state)
            elif reason is not None and not (reason in NO_ROOM and self._make_way(state)):
                self._hold(self.waiting, state, reason)
                return

    def _lacks_something(self, queue: list[TwinRequest], state: TwinRequest) -> bool:
        """Set it aside until its grammar or adapter is ready, or end it if that can never be. Return False if it is."""
        try:
            reason = self.why_not_ready(state.request)
        except RequestError:
            self.ignored.append(state.id)
            self._end(state, RequestStatus.FINISHED_ERROR, WHY_ENDED)
            return True
        if reason is not None:
            self._hold(queue, state, reason)
            state.is_aside = True
        return reason is not None

    def _why_held(self, state: TwinRequest) -> Reason | None:
        if self._num_seqs_running() + state.num_seqs > self.config.max_num_seqs:
            return Reason.NUM_SEQS
        factor = self.config.scheduler_delay_factor
        oldest = min(other.request.arrival_time_s for other in self.waiting)
        if self.running and factor > 0 and self.clock.now() - oldest <= factor * self.last_prompt_step_s:
            return Reason.DELAY
        lacking = sum(
            sequence.computed < len(sequence.tokens) and not self._is_decode(sequence)
            for other in self.running
            for sequence in other.started
        )
        return Reason.PARTIAL_PREFILLS if 0 < self.config.max_num_partial_prefills <= lacking else None

    @staticmethod
    def _is_decode(sequence: TwinSequence) -> bool:
        return len(sequence.tokens) - sequence.computed == 1 and sequence.num_output > 0

    def _num_seqs_running(self) -> int:
        return sum(state.num_seqs for state in self.running)

    def _count_skip(self, state: TwinRequest) -> None:
        """The first of those with its adapter is passed over: 64 times, then none with an adapter passes it."""
        state.adapter_skips += 1
        self.closed_to_adapters |= state.adapter_skips > 64

    def _has_too_many_adapters(self, state: TwinRequest) -> bool:
        is_closed = self.config.max_loras > 0 and self.closed_to_adapters and adapter_of(state.request) is not None
        return is_closed or self._is_without_room(state)

    def _is_without_room(self, state: TwinRequest) -> bool:
        limit = self.config.max_loras
        in_use = {adapter_of(other.request) for other in self.running} - {None}
        adapter = adapter_of(state.request)
        return limit > 0 and adapter is not None and adapter not in in_use and len(in_use) >= limit

    def _may_chunk(self, state: TwinRequest) -> bool:
        if self.config.scheduling_mode is SchedulingMode.MIXED:
            return self.config.enable_chunked_prefill
        return len(state.alive[0].tokens) > self.config.max_num_batched_tokens

    def _most_blocks(self, state: TwinRequest) -> Need:
        """Blocks that its known tokens hold at once, in an empty pool."""
        own = self.memory.most_need(state.request, len(state.alive[0].tokens))
        need = total(own, self._sibling_need(state))
        for pool in range(len(need)):  # each sequence writes to a state of its own
            kinds = [spec.kind for spec, at in zip(self.memory.groups, self.memory.pool_of, strict=True) if at == pool]
            need[pool] = max(
                need[pool], kinds.count(KVGroupKind.STATE) * len(state.alive) if len(state.alive) > 1 else 0
            )
        return need

    def _why_never(self, state: TwinRequest) -> Reason | None:
        phased = self.config.scheduling_mode is SchedulingMode.PHASED
        is_too_long = phased and state.request.num_prompt_tokens > self.config.max_num_batched_tokens
        is_too_much = exceeds(self._most_blocks(state), list(self.pool.sizes))
        is_too_much |= state.num_seqs > self.config.max_num_seqs
        return Reason.NEVER if is_too_much or is_too_long else None

    def _admit(self, state: TwinRequest) -> Reason | None:
        """Let it in, or say why not."""
        request, sequence = state.request, state.alive[0]
        known = len(sequence.tokens)
        siblings = self._sibling_need(state)
        hit = self._hit(state)
        cached = hit.num_tokens
        want = self._capped(state, cached, known - cached)
        if self.prompt_budget is not None:
            want = min(want, self.prompt_budget)
            if not want:
                return Reason.PREFILL_SHARE
        if want > self.budget and not self._may_chunk(state):
            return Reason.BUDGET
        share = self.encoder.share(state, cached, min(want, self.budget))
        want = share.want
        if want <= 0:
            self.encoder.release(state)
            return Reason.ENCODER
        upto = cached + want
        need = self.memory.admission_need(request, upto, hit, capped=False)
        if self.config.admit_whole_prompt:
            whole = self.memory.admission_need(request, known, hit, capped=True)
            need = list(map(max, need, total(whole, siblings)))
        reason = self._why_short(need)
        if reason is not None:
            self.encoder.release(state)
            return reason
        kind = AdmitKind.RESUMED if state.status == "preempted" else AdmitKind.NEW
        self.waiting.remove(state)
        self._enter(state)
        self.memory.adopt(request, sequence, hit)
        sequence.computed = cached
        sequence.started = True
        self.memory.grow(sequence, upto)
        self.admitted.append({"id": self._name(state, sequence), "kind": kind.name.lower(), "cached": cached})
        self._place(state, sequence, want, enters=True)
        self.has_prompt = True
        self._encode(state, share)
        self._note_admitted(state, kind, known, cached if hit.was_asked else None, cached, want)
        return None

    def _hit(self, state: TwinRequest) -> Hit:
        """What is cached of its first sequence."""
        # Sequences that return share the first one's prompt blocks; a hit would not hold those that a window has left.
        if len(state.alive) > 1 and state.forked and self.memory.has_windows:
            return Hit(0, [[] for _ in self.memory.groups], was_asked=False)
        return self.memory.hit(state.request, state.alive[0].tokens)

    def _sibling_need(self, state: TwinRequest) -> Need:
        """Blocks of the sequences that resume with the first, after the full prompt blocks that they share with it."""
        is_alone = len(state.alive) == 1 or not state.forked
        return self.memory.nothing() if is_alone else self.memory.sibling_need(state)

    def _enter(self, state: TwinRequest) -> None:
        state.status = "running"
        self.admissions += 1
        state.admission = self.admissions
        state.held_for = None
        self.running.append(state)

    def _make_way(self, head: TwinRequest) -> bool:
        """Preempt the worst running request if `head` is more urgent (an option of the priority policy)."""
        if not self.config.evict_for_priority or self.config.scheduling_policy is not SchedulingPolicy.PRIORITY:
            return False
        if self.admitted or not self.running:
            return False  # who entered in this step may read blocks that the victim was to fill
        candidates = self.running
        worst = self._victim(candidates)
        leaving = [state for state in candidates if state.place > head.place]
        if worst not in leaving or not self._has_room_without(leaving, head):
            return False
        self._take_out(worst)
        self._preempt(worst, head)
        return True

    def _has_room_without(self, leaving: list[TwinRequest], head: TwinRequest) -> bool:
        """Whether `head` could compute a token if those did not run."""
        staying = [state for state in self.running if state not in leaving]
        if sum(state.num_seqs for state in staying) + head.num_seqs > self.config.max_num_seqs:
            return False
        hit = self._hit(head)
        need = self.memory.admission_need(head.request, hit.num_tokens + 1, hit, capped=False)
        if self.config.admit_whole_prompt:
            whole = self.memory.admission_need(head.request, len(head.alive[0].tokens), hit, capped=True)
            need = list(map(max, need, total(whole, self._sibling_need(head))))
        held = {block for state in staying for one in state.alive for table in one.tables for block in table}
        held |= {block for table in hit.tables for block in table if not self.pool.is_free(block)}
        for number in held - {NULL}:
            need[self.pool.blocks[number].pool] += 1
        return not exceeds(total(need, self.watermark) if staying else need, list(self.pool.sizes))

    def _place(self, state: TwinRequest, sequence: TwinSequence, new: int, *, enters: bool = False) -> None:
        self.budget -= new
        of_prompts = new if self.prompt_budget is not None and (enters or sequence.mid_prefill) else 0
        if self.prompt_budget is not None:
            self.prompt_budget -= of_prompts
        known = len(sequence.tokens) + sequence.placeholders
        decodes = not enters and not sequence.mid_prefill
        drafts = sequence.drafts[: max(0, sequence.computed + new - known)]
        sequence.drafts = []
        confirmed = min(sequence.computed + new, len(sequence.tokens))
        recorded = self.memory.record(state.request, sequence, confirmed)
        self.planned.append(
            Planned(
                state,
                sequence,
                sequence.computed,
                new,
                drafts,
                state.epoch,
                decodes=decodes,
                mid_prefill=sequence.mid_prefill,
                of_prompts=of_prompts,
                recorded=recorded,
            )
        )
        sequence.computed += new
        sequence.in_flight += new
        sequence.mid_prefill = sequence.computed < known

    # The record of the step, and its results --------------------------------------------------------------------

    def _record(self) -> Record:
        sampling: list[Planned] = []
        forks: list[Planned] = []
        pooling: list[Planned] = []
        for entry in list(self.planned):
            state, sequence = entry.state, entry.sequence
            is_complete = sequence.computed >= len(sequence.tokens) + sequence.placeholders
            entry.samples = is_complete and state.request.pooling is None
            if is_complete and not entry.samples:
                pooling.append(entry)
            if entry.samples:
                sampling.append(entry)
                if not state.forked:
                    forks += self._fork(entry)
        sampling += forks
        self.joined: list[Planned] = []
        for state in self.running:
            self._join(state)
        if self.config.async_scheduling:
            for entry in sampling:
                if entry.state.request.is_beam_search:
                    continue  # its next token depends on the other beams
                entry.sequence.placeholders += 1 + len(entry.drafts)
        for entry in [*self.planned, *sampling, *self.joined]:
            entry.reads = self.memory.stamps(entry.sequence, 0, entry.sequence.computed)
            entry.writes = (
                self.memory.stamps(entry.sequence, entry.start, entry.start + entry.new) if entry.new else set()
            )
        has_prompt = self.has_prompt or any(entry.mid_prefill for entry in self.planned)
        step = Step(self.step_number, self.planned, sampling, has_prompt, pooling)
        step.copied, step.encoded, step.joined = self.memory.copied, dict(self.encoder.encoded), self.joined
        if self.planned:
            self.in_flight.append(step)
        record: Record = {
            "scheduled": [[self._name(entry.state, entry.sequence), entry.new] for entry in self.planned],
            "admitted": self.admitted,
            "preempted": sorted(self.preempted),
            "samples": [self._name(entry.state, entry.sequence) for entry in sampling],
            "drafts": {entry.state.id: entry.drafts for entry in self.planned if entry.drafts},
            "encoder": self.encoder.encoded,
            "copies": len(self.memory.copies),
            "swapped_out": self.memory.swapped_out,
            "ignored": sorted(set(self.ignored)),
            "handle": step,
        }
        self.preempted, self.ignored = [], []
        return record

    def _fork(self, entry: Planned) -> list[Planned]:
        """The prompt is complete: the other sequences share its blocks, and sample from the same logits."""
        state, source = entry.state, entry.sequence
        state.forked = True
        forks: list[Planned] = []
        for sequence in state.alive:
            if sequence is not source:
                self.memory.fork(source, sequence)
                sequence.started = True
                forks.append(Planned(state, sequence, entry.start, 0, [], state.epoch, samples=True))
        return forks

    def _join(self, state: TwinRequest) -> None:
        """Sequences that return after a recompute share the full prompt blocks of the first one, once it has them."""
        first = state.alive[0]
        known = min((len(sequence.tokens) for sequence in state.alive if not sequence.started), default=0)
        shared = min(state.request.num_prompt_tokens - self.memory.has_states, known - 1)
        shared = shared // self.memory.block_size * self.memory.block_size
        if not state.forked or not first.started or first.computed < shared:
            return
        for sequence in state.alive:
            if not sequence.started:
                sequence.started = sequence.mid_prefill = True
                sequence.computed = shared
                self.memory.share_prefix(first, sequence, sequence.computed)
                self.joined.append(Planned(state, sequence, shared, 0, [], state.epoch))
                self.admitted.append(
                    {"id": self._name(state, sequence), "kind": "resumed", "cached": sequence.computed}
                )

    def update(self, step: Step, sampled: dict[str, list[int]], duration_s: float = 0.0) -> Record:
        if not step.planned:
            return self._with_deferred({"emitted": {}, "finished": {}})
        assert self.in_flight.pop(0) is step
        if step.has_prompt:
            self.last_prompt_step_s = duration_s
        self.event_step = step.number
        for state in step.requests:
            if (
                state.status != "gone"
                and step.epochs[state.id] < state.epoch
                and step.epochs[state.id] >= state.drop_before
            ):
                state.stale_steps -= 1
                state.is_aside &= state.stale_steps > 0
        for entry in step.planned:
            if entry.epoch == entry.state.epoch:
                entry.sequence.in_flight -= entry.new
                if entry.state.status == "running":
                    started = entry.state.started
                    passed = min(one.computed - one.in_flight for one in started)
                    self.encoder.release(entry.state, None if self.encoder_decoder else passed)
        emitted: dict[str, list[int]] = {}
        finished: dict[str, str] = {}
        self._extend_beams(step, emitted, finished)
        counts = [entry for entry in step.sampling if self._counts(entry) and not entry.state.request.is_beam_search]
        for entry in counts:
            if entry.epoch == entry.state.epoch:
                self._note_first_token(entry.state)
        self._note_verified([entry for entry in step.planned if entry.drafts and self._counts(entry)], sampled)
        for entry in counts:
            state, sequence = entry.state, entry.sequence
            self._note_first_token(state)
            name = self._name(state, sequence)
            tokens = sampled[name]
            rejected = len(entry.drafts) - (len(tokens) - 1)
            if entry.drafts and self.memory.has_states:
                if rejected or entry.epoch != state.epoch:
                    rejected = len(entry.drafts)
                else:
                    self.memory.keep_drafted(sequence, len(entry.drafts))
            if entry.epoch == state.epoch:
                sequence.computed -= rejected
                sequence.placeholders -= min(sequence.placeholders, 1 + len(entry.drafts))
            elif state.status == "swapped":
                sequence.computed -= rejected
            taken, end, stop_token = self._append(state, sequence, tokens)
            if state.status == "running":
                # What is computed of known tokens (drafts that were right, steps in flight): these run before any step
                # that looks it up, and a sequence that ends leaves it behind.
                self.memory.record(state.request, sequence, min(sequence.computed, len(sequence.tokens)))
            emitted[name] = taken
            if end is not None:
                finished[name] = end.finish_reason or ""
                self._end_sequence(state, sequence, end, stop_token)
        pooled = [entry for entry in step.pooling if self._counts(entry)]
        for entry in pooled:
            if entry.epoch == entry.state.epoch:
                self._note_first_token(entry.state)
        for entry in pooled:
            self._note_first_token(entry.state)
            finished[self._name(entry.state, entry.sequence)] = "stop"
            self._end(entry.state, RequestStatus.FINISHED_STOPPED)
        return self._with_deferred({"emitted": emitted, "finished": finished})

    def _extend_beams(self, step: Step, emitted: dict[str, list[int]], finished: dict[str, str]) -> None:
        """Let searches choose whose beams have all come back."""
        searches: dict[TwinRequest, TwinSearch] = {}
        for entry in step.sampling:
            state = entry.state
            if not state.request.is_beam_search or not self._counts(entry):
                continue
            if entry.epoch == state.epoch:
                most = min(self._max_tokens(state), self.max_model_len - state.request.num_prompt_tokens)
                state.search = state.search or TwinSearch(state.request, most, self.logprobs_of)
                state.search.arrived.add(entry.sequence.number)
                searches[state] = state.search
            elif state.status == "swapped":
                entry.sequence.computed -= 1  # it computes its last token again
        for state, search in searches.items():
            if not search.is_ready:
                continue
            if search.extend():
                self._continue_beams(state, search)
                continue
            self._note_first_token(state)
            for sequence, found in zip(list(state.sequences), search.finished, strict=False):
                name = self._name(state, sequence)
                emitted[name], finished[name] = found.output, found.status.finish_reason or ""
                self._end_sequence(state, sequence, found.status, found.stop_token)
            self._end(state, RequestStatus.FINISHED_STOPPED)

    def _continue_beams(self, state: TwinRequest, search: TwinSearch) -> None:
        for beam in search.beams:
            if beam.slot != beam.source:
                sequence, source = state.sequences[beam.slot], state.sequences[beam.source]
                self.memory.free(sequence)
                self.memory.fork(source, sequence)
        for beam in search.beams:
            sequence = state.sequences[beam.slot]
            sequence.tokens[sequence.num_prompt :] = beam.output

    def _note_first_token(self, state: TwinRequest) -> None:
        if not state.has_output:
            state.has_output = True
            self.events.append(FirstToken(*self._at(state), state.request.num_prompt_tokens))

    def _note_verified(self, entries: list[Planned], sampled: dict[str, list[int]]) -> None:
        for client in dict.fromkeys(entry.state.request.client_index for entry in entries):
            mine = [entry for entry in entries if entry.state.request.client_index == client]
            accepted = [len(sampled[self._name(entry.state, entry.sequence)]) - 1 for entry in mine]
            self.events.append(
                DraftsVerified(
                    self.event_step,
                    self.clock.now(),
                    client,
                    tuple(entry.state.request.handle for entry in mine),
                    tuple(entry.sequence.number for entry in mine),
                    tuple(len(entry.drafts) for entry in mine),
                    tuple(accepted),
                )
            )

    # Failures ---------------------------------------------------------------------------------------------------

    def fail(self, step: Step, names: Collection[str], message: str, *, raised: bool) -> None:
        """The sequences `names` of the oldest step have failed; all of them, if it raised. Called before `update`.

        They end. What read what they should have written, in this step or a later one, is computed again.
        """
        assert self.in_flight[0] is step
        self.event_step = step.number
        lost = self._lost_outputs(step) if raised else set()
        entries = dict.fromkeys([*step.planned, *step.sampling])  # once each: what samples computes, too
        failed = [entry for entry in entries if self._name(entry.state, entry.sequence) in names]
        waiting = {request_id for item in lost for request_id in self.encoder.cache.holders.get(item, ())}
        spoiled, bad = self._spoiled_by(failed, lost, waiting)
        touched: set[TwinRequest] = set()
        for entry in failed:  # all of them, before the first one ends, and with it its search
            if not raised and entry.epoch >= entry.state.drop_before:
                self._forget_all(entry)
        for entry in failed:
            if self._counts(entry):
                self.events.append(Failed(*self._at(entry.state), message))
                if self._fail_sequence(entry.state, entry.sequence):
                    touched.add(entry.state)
        touched |= {entry.state for entry in bad if self._counts(entry)}
        touched |= {self.requests[request_id] for request_id in waiting if request_id in self.requests}
        for state in sorted(touched, key=lambda one: -one.admission):
            self.events.append(Failed(*self._at(state), None))
            if state.status == "running":
                self._preempt(state, None, may_swap=False)
            elif state.status == "swapped":
                num_lost = self._lost(state, state.alive).num_tokens
                self.swapped.remove(state)
                for sequence in state.alive:
                    self.memory.drop_host(sequence, self.host)
                self.preempted.append(state.id)
                state.epoch += 1
                self._drop(state)
                self._note_preempted(state, None, num_lost, 0)
            self._drop_late_results(state)
        for item in lost:
            self.encoder.cache.drop(item)
        self.pool.forget_blocks(number for number, taken in spoiled if self.pool.blocks[number].times_taken == taken)

    def _counts(self, entry: Planned) -> bool:
        """Whether the result of this entry would be used."""
        state = entry.state
        return state.status != "gone" and not entry.sequence.finished and entry.epoch >= state.drop_before

    def _lost_outputs(self, step: Step) -> set[str]:
        media = {entry.state.id: entry.state.request.media for entry in step.planned}
        return {
            media[request_id][place].content_hash for request_id, places in step.encoded.items() for place in places
        }

    def _spoiled_by(
        self, failed: list[Planned], lost: set[str], waiting: set[str]
    ) -> tuple[set[tuple[int, int]], list[Planned]]:
        """The blocks that do not hold what they should, and the other entries that read one."""
        spoiled = {stamp for entry in failed for stamp in entry.writes}
        bad: list[Planned] = []
        for number, step in enumerate(self.in_flight):
            if number:  # copies run before a step computes anything
                spoiled |= {target for source, target in step.copied if source in spoiled}
            left = [entry for entry in [*step.planned, *step.sampling, *step.joined] if entry not in failed]
            while found := [
                entry
                for entry in left
                if entry.reads & spoiled or (number and entry.new and self._reads_lost(entry, lost, waiting))
            ]:
                bad += found
                spoiled |= {stamp for entry in found for stamp in entry.writes}
                left = [entry for entry in left if entry not in found]
        return spoiled, bad

    def _reads_lost(self, entry: Planned, lost: set[str], waiting: set[str]) -> bool:
        """Whether it reads an encoder output that was not computed. waiting: ids that do, of an encoder-decoder."""
        if entry.epoch < entry.state.drop_before:
            return False
        if self.encoder_decoder:
            return entry.state.id in waiting
        end = entry.start + entry.new
        media = [item for item in entry.state.request.media if item.content_hash in lost]
        return any(item.offset < end and entry.start < item.offset + item.length for item in media)

    def _forget_all(self, entry: Planned) -> None:
        """Nothing that the sequence has computed may be found."""
        if not self.memory.caching:
            return
        request, sequence = entry.state.request, entry.sequence
        numbers = {number for table in sequence.tables for number in table if number != NULL}
        if sequence.finished or not sequence.started:
            numbers = self.memory.equal_blocks(request, sequence.tokens)
        else:  # it does not know any more which blocks its windows have left
            numbers |= self.memory.equal_blocks(request, sequence.tokens[: sequence.computed], of_windows=True)
        self.pool.forget_blocks(numbers)

    def _forget_output(self, request: Request, sequence: TwinSequence) -> None:
        if self.memory.caching:
            after_prompt = self.memory.equal_blocks(request, sequence.tokens, after=sequence.num_prompt)
            self.pool.forget_blocks(after_prompt)

    def _fail_sequence(self, state: TwinRequest, sequence: TwinSequence) -> bool:
        """It ends. Return whether siblings wait for it: they start again without it."""
        if state.request.is_beam_search:
            self._end(state, RequestStatus.FINISHED_ERROR, WHY_ENDED)
            return False
        restarts = state.status == "running" and state.started == [sequence] and len(state.alive) > 1
        self._end_sequence(state, sequence, RequestStatus.FINISHED_ERROR, message=WHY_ENDED)
        return restarts

    def _with_deferred(self, record: Record) -> Record:
        record["finished"] |= self.deferred
        self.deferred = {}
        return record

    def _append(
        self, state: TwinRequest, sequence: TwinSequence, tokens: list[int]
    ) -> tuple[list[int], RequestStatus | None, int | None]:
        """The tokens that count, how the output ends with the last of them, and by which stop token."""
        sampling = state.request.sampling
        assert sampling is not None
        taken: list[int] = []
        for token in tokens:
            sequence.tokens.append(token)
            taken.append(token)
            if sampling.max_tokens == 0:
                return taken, RequestStatus.FINISHED_LENGTH_CAPPED, None  # the prompt is only scored
            may_stop = sequence.num_output >= sampling.min_tokens
            eos = token in state.request.eos_token_ids and not sampling.ignore_eos
            if eos and (may_stop or sampling.grammar):
                return taken, RequestStatus.FINISHED_STOPPED, None
            if may_stop and token in sampling.stop_token_ids:
                return taken, RequestStatus.FINISHED_STOPPED, token
            if sequence.num_output >= self._max_tokens(state) or len(sequence.tokens) >= self.max_model_len:
                return taken, RequestStatus.FINISHED_LENGTH_CAPPED, None
        return taken, None, None

    def _max_tokens(self, state: TwinRequest) -> int:
        sampling = state.request.sampling
        if sampling is None or sampling.max_tokens is None:
            return self.max_model_len
        return sampling.max_tokens

    @staticmethod
    def _name(state: TwinRequest, sequence: TwinSequence) -> str:
        return f"{state.id}/{sequence.number}" if len(state.sequences) > 1 else state.id

    def state(self) -> Record:
        def held(state: TwinRequest) -> list[int]:
            """Distinct blocks per group."""
            return [
                len({block for sequence in state.alive for block in sequence.tables[group] if block != NULL})
                for group in range(len(self.memory.groups))
            ]

        return {
            "free_blocks": self.pool.num_free(),
            "free_host_blocks": self.host.num_free(),
            "running": [state.id for state in self.running],
            "waiting": [state.id for state in self.waiting],
            "swapped": [state.id for state in self.swapped],
            "blocks": {state.id: held(state) for state in self.running},
            "computed": {state.id: state.alive[0].computed for state in self.requests.values()},
        }
