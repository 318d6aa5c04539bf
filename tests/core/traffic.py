"""Traffic: a scheduler, a worker that knows what every KV slot holds, and a client that knows what it must receive."""

import re
from collections import Counter, deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from pagoda.base.clock import VirtualClock
from pagoda.base.config import CacheConfig, SchedulingPolicy
from pagoda.base.errors import RequestError
from pagoda.core.events import Admitted, ClientEvent, Ended, Event, Removed, Stored, TierChanged
from pagoda.core.kv import BlockCounts, KVGroupSpec, KVTier, exceeds
from pagoda.core.request import AdmitKind, Reason, Request, RequestKey, RequestStatus
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from tests.core.cache_events import CacheEvents
from tests.core.exact_worker import SPOILED, ExactWorker, logprobs_after, next_token, pooled_vector
from tests.core.plain_beam_search import plain_beam_search
from tests.twin import WHY_ENDED, TwinScheduler

VOCABULARY = 7
RAISED, NOT_FINITE = "the step failed", "not finite"
NO_ROOM = re.compile(
    "the KV cache has [0-9]+ .*: too few|needs .* (KV blocks|blocks of recurrent states)|"
    "can never come back from host memory"
)
NOT_TO_BE_HAD = "the adapter cannot be had"
NO_LOGPROBS = "this worker does not return log-probabilities"
Record = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """All that a scheduler is built from."""

    scheduler: SchedulerOptions
    cache: CacheConfig
    groups: tuple[KVGroupSpec, ...] = (KVGroupSpec(),)
    num_blocks: int = 16
    num_host_blocks: int = 0
    max_model_len: int = 64
    encoder_decoder: bool = False
    beams: bool = False
    drafts: bool = False


class Readiness:
    """Grammars and adapters that are not ready.   missing: why, by request; NEVER: it cannot be had."""

    def __init__(self) -> None:
        self.missing: dict[RequestKey, Reason] = {}
        self.woken: list[RequestKey] = []  # when a step was last planned
        self.pinned: Counter[RequestKey] = Counter()
        self._ready: list[RequestKey] = []

    def get_ready(self, key: RequestKey) -> None:
        if self.missing.get(key, Reason.NEVER) is not Reason.NEVER:
            del self.missing[key]
            self._ready.append(key)

    def why_not_ready(self, request: Request) -> Reason | None:
        reason = self.missing.get(request.key)
        if reason is Reason.NEVER:
            raise RequestError(NOT_TO_BE_HAD)
        return reason

    def take_woken(self) -> list[RequestKey]:
        self.woken, self._ready = self._ready, []
        return self.woken

    def forget(self, request: Request) -> None:
        assert not self.pinned[request.key]

    def pin(self, request: Request) -> None:
        assert request.key not in self.missing
        self.pinned[request.key] += 1

    def unpin(self, request: Request) -> None:
        self.pinned[request.key] -= 1


@dataclass(frozen=True)
class Failure:
    """A step that raises; or `rows` (row numbers) of it that fail alone."""

    rows: frozenset[int] | None = None


@dataclass
class Received:
    """What the client has received of one sequence."""

    truth: list[int]
    tokens: list[int] = field(default_factory=list)
    finish: Ended | None = None
    is_stopped: bool = False  # by the client: its end comes later


def truth_of(request: Request, sequence: int, max_model_len: int) -> list[int]:
    """The output of one sequence, as if it were alone in the world."""
    sampling = request.sampling
    if sampling is None:
        return []
    tokens = [int(token) for token in request.prompt_token_ids]
    output: list[int] = []
    if sampling.max_tokens == 0:
        return [next_token(request.seed + sequence, tokens, VOCABULARY)]
    limit = min(sampling.max_tokens or max_model_len, max_model_len - len(tokens))
    if sampling.beam_search is not None:
        found = plain_beam_search(
            tokens, sampling, request.eos_token_ids, limit, lambda known: logprobs_after(known, VOCABULARY).tolist()
        )
        return found[sequence][1]
    while len(output) < limit:
        output.append(next_token(request.seed + sequence, tokens + output, VOCABULARY))
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos_token_ids))
        if output[-1] in ends and len(output) >= sampling.min_tokens:
            break
    return output


class Traffic:
    """Every method leaves with all checked that docs/reference/scheduler-contract.md says always holds."""

    def __init__(self, setting: Setting, tier: KVTier | None = None) -> None:
        self.setting = setting
        self.clock = VirtualClock()
        self.readiness = Readiness()
        self.scheduler = Scheduler(
            setting.scheduler,
            setting.cache,
            setting.groups,
            setting.num_blocks,
            setting.max_model_len,
            self.clock,
            num_host_blocks=setting.num_host_blocks,
            encoder_decoder=setting.encoder_decoder,
            preparations=self.readiness,
            tier=tier,
        )
        kv = self.scheduler._state.kv
        num_blocks, num_host_blocks = sum(kv.num_blocks), sum(kv.host.pools.num_blocks)
        memory = (setting.groups, setting.cache.block_size, num_blocks, num_host_blocks)
        self.worker = ExactWorker(*memory, VOCABULARY)
        self.follower = ExactWorker(*memory, VOCABULARY, samples=False) if setting.scheduler.has_followers else None
        self.twin: TwinScheduler | None = self._make_twin()  # None: decisions are not compared
        self.plans: deque[Record] = deque()  # the twin's, not back yet
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput, Failure | None]] = deque()
        self.failing: dict[int, set[tuple[str, int]]] = {}  # step in flight -> the sequences that its failure may end
        self.requests: dict[str, Request] = {}
        self.id_of: dict[RequestKey, str] = {}
        self.received: dict[tuple[str, int], Received] = {}
        self.aborted: set[str] = set()
        self.reset_ids: set[str] = set()  # preempted by a reset or a failure since the last step was planned
        self.finished: Counter[str] = Counter()
        self.num_cached: dict[RequestKey, int] = {}  # at the last admission
        self.outputs: list[SchedulerOutput] = []
        self.ignored: set[str] = set()  # of which a sequence ended while the last step was planned
        self.events: list[ClientEvent] = []  # since the last `check`
        self.unreceived: Counter[ClientEvent] = Counter()  # those that clients do not have yet
        self.cache_events = CacheEvents(self.scheduler)
        self.scheduler.subscribe(self._note, cache=True)

    def _note(self, event: Event) -> None:
        if isinstance(event, Stored | Removed):
            self.cache_events.note(event)
        elif isinstance(event, TierChanged):
            pass
        else:
            self.events.append(event)
            self.unreceived[event] += 1

    def _make_twin(self) -> TwinScheduler:
        setting = self.setting
        return TwinScheduler(
            setting.scheduler,
            setting.cache,
            setting.groups,
            setting.num_blocks,
            setting.max_model_len,
            setting.encoder_decoder,
            setting.num_host_blocks,
            self.clock,
            self.readiness.why_not_ready,
            lambda tokens: logprobs_after(tokens, VOCABULARY).tolist(),
        )

    # What happens ---------------------------------------------------------------------------------------------

    def add(self, request: Request, lacks: Reason | None = None) -> None:
        """lacks: what is not ready for it."""
        assert request.key not in self.id_of
        if lacks is not None:
            self.readiness.missing[request.key] = lacks
        self.scheduler.add_request(request)
        if self.twin is not None:
            self.twin.add(request)
        self.requests[request.request_id] = request
        self.id_of[request.key] = request.request_id
        for sequence in range(request.num_seqs):
            truth = truth_of(request, sequence, self.setting.max_model_len)
            self.received[request.request_id, sequence] = Received(truth)
            if self.twin is not None:
                self.cache_events.expect(request, truth, self.twin)
        self.check()

    def abort(self, ids: list[str]) -> None:
        self.scheduler.finish_requests(
            [self.requests[one].key for one in ids if one in self.requests], RequestStatus.FINISHED_ABORTED
        )
        if self.twin is not None:
            self.twin.abort(ids)
        self.aborted |= set(ids) & self.requests.keys()
        self.check()

    def stop(self, request_id: str, sequence: int) -> None:
        """The client has found a stop string in the text of a sequence; a beam search ends as a whole."""
        request = self.requests[request_id]
        is_search = request.sampling is not None and request.sampling.beam_search is not None
        self.scheduler.finish_sequence(request.key, sequence)
        if self.twin is not None:
            self.twin.finish_sequence(request_id, sequence)
        for number in range(request.num_seqs) if is_search else (sequence,):
            received = self.received[request_id, number]
            received.is_stopped, received.truth = True, received.tokens
        self.reset_ids.add(request_id)  # siblings may start again without it
        self.check()

    def reset(self, preempt_running: bool) -> bool:
        if preempt_running:
            self.reset_ids |= set(self.scheduler.running_ids())
        done = self.scheduler.reset_prefix_cache(preempt_running=preempt_running)
        if self.twin is not None:
            assert self.twin.reset_prefix_cache(preempt_running) == done
        self.check()
        return done

    def draft(self, request_id: str, guess: list[int], sequence: int = 0) -> None:
        self.scheduler.update_draft_token_ids({(self.requests[request_id].key, sequence): guess})
        if self.twin is not None:
            self.twin.set_drafts({request_id: guess}, sequence)
        self.check()

    @property
    def depth(self) -> int:
        return self.setting.scheduler.pipeline_depth

    def plan(self, choose_failure: Callable[[SchedulerOutput], Failure | None] = lambda _: None) -> SchedulerOutput:
        """Plan one step and execute it; its result is not back yet. It fails as `choose_failure` says."""
        assert len(self.in_flight) < self.depth
        not_ready = self.readiness.missing.keys() | self.scheduler._state.kv.transfers.keys()
        queue = [one for one in self.scheduler.waiting_ids() if self.requests[one].key not in not_ready]
        ended = self._ended_while_planning()
        output = self.scheduler.schedule()
        self.ignored = {request_id for request_id, _ in self._ended_while_planning() - ended}
        failure = choose_failure(output) if len(output.rows) else None
        raises = failure is not None and failure.rows is None
        result = self.worker.run(output, set(failure.rows or ()) if failure else None, raises=raises)
        if self.follower is not None:
            self.follower.run(output, set(failure.rows or ()) if failure else None, raises=raises)
            self._check_follower(output)
        self.failing[output.step] = self._sequences_of(self._failed_rows(output, failure))
        self.outputs.append(output)
        self.in_flight.append((output, result, failure))
        self.finished.update(self.id_of[key] for key in output.finished)
        self._check_step(output, queue)
        if self.twin is not None:
            self._plan_twin(output)
        self.clock.advance(result.duration_s)
        self.check()
        return output

    def _ended_while_planning(self) -> set[tuple[str, int]]:
        """Sequences that ended while a step was planned, and whose clients do not know yet."""
        pending = self.scheduler._state.events._pending
        finishes = [event for event in pending if isinstance(event, Ended)]
        return {(finish.request_id, finish.sequence) for finish in finishes}

    def _plan_twin(self, output: SchedulerOutput) -> None:
        """The twin decides the same."""
        assert self.twin is not None
        self.twin.wake(self.readiness.woken)
        plan = self.twin.schedule()
        plan["names"] = {row: self._name(row) for row in self.worker.rows}
        plan["planned_at_s"] = self.clock.now()
        self.plans.append(plan)
        placed = zip(output.rows.tolist(), output.num_new.tolist(), strict=True)
        mine = {
            "scheduled": sorted([self._name(row), new] for row, new in placed),
            "admitted": sorted(
                (self._name(init.row), "new" if init.kind is AdmitKind.NEW else "resumed", init.num_computed)
                for init in output.admitted
            ),
            "preempted": sorted(self.id_of[key] for key in output.preempted),
            "samples": sorted(self._name(row) for row in output.sample_rows.tolist()),
            "copies": len(output.copies),
            "swapped_out": len(output.swap_out),
            "ignored": sorted(self.ignored),
        }  # fmt: skip
        theirs = {
            "scheduled": sorted(plan["scheduled"]),
            "admitted": sorted((entry["id"], entry["kind"], entry["cached"]) for entry in plan["admitted"]),
            "samples": sorted(plan["samples"]),
        } | {key: plan[key] for key in ("preempted", "copies", "swapped_out", "ignored")}
        assert mine == theirs, f"step {output.step}: {_difference(mine, theirs)}"

    def _name(self, row: int) -> str:
        known = self.worker.rows[row]
        request = self.requests[known.request_id]
        sequence = known.seed - request.seed
        return f"{known.request_id}/{sequence}" if request.num_seqs > 1 else known.request_id

    def deliver(self) -> dict[int, EngineCoreOutputs]:
        """The oldest result comes back."""
        output, result, failure = self.in_flight.popleft()
        running = set(self.scheduler.running_ids()) | set(self.scheduler.swapped_ids())
        failed = self._failed_rows(output, failure)
        if failure is None:
            by_client = self.scheduler.update_from_output(output, result)
        elif failure.rows is None:
            by_client = self.scheduler.fail_step(output, RAISED)
        else:
            by_client = self.scheduler.update_from_output(output, self._without(output, result, failed))
        if failure is not None:
            self.reset_ids |= running
        may_end = self.failing.pop(output.step)
        for client, outputs in by_client.items():
            assert {event.client for event in outputs.events} <= {client}
            self.unreceived.subtract(outputs.events)
            self._receive(client, outputs, may_end)
        assert not self.unreceived.total(), "clients get each event once, with the next outputs"
        if self.twin is not None:
            plan = self.plans.popleft()
            raised = failure is not None and failure.rows is None
            if failure is not None:
                message = RAISED if raised else NOT_FINITE
                self.twin.fail(plan["handle"], [plan["names"][row] for row in failed], message, raised=raised)
            sampled = {
                plan["names"][row]: tokens[:count]
                for row, tokens, count in zip(
                    output.sample_rows.tolist(), result.sampled.tolist(), result.num_sampled.tolist(), strict=True
                )
            }
            duration_s = self.clock.now() - plan["planned_at_s"] if raised else result.duration_s
            if not raised:
                self.twin.measure(plan["handle"], output, result)
            self.twin.update(plan["handle"], sampled, duration_s)
            self._expect_of_beams(self.twin)
        self.check()
        return by_client

    def _expect_of_beams(self, twin: TwinScheduler) -> None:
        """Note what the blocks of beams are called, whether these are in the result or not."""
        for state in twin.requests.values():
            for sequence in state.sequences if state.request.is_beam_search else ():
                self.cache_events.expect(state.request, sequence.tokens[sequence.num_prompt :], twin)

    @staticmethod
    def _failed_rows(output: SchedulerOutput, failure: Failure | None) -> set[int]:
        if failure is None:
            return set()
        return {*output.rows.tolist(), *output.sample_rows.tolist()} if failure.rows is None else set(failure.rows)

    def _sequences_of(self, rows: Set[int]) -> set[tuple[str, int]]:
        """The owners of the rows, as the worker knows them; with a beam, its whole search, which ends with it."""
        found: set[tuple[str, int]] = set()
        for row in rows:
            known = self.worker.rows[row]
            request = self.requests[known.request_id]
            is_search = request.sampling is not None and request.sampling.beam_search is not None
            sequences = range(request.num_seqs) if is_search else (known.seed - request.seed,)
            found |= {(known.request_id, sequence) for sequence in sequences}
        return found

    @staticmethod
    def _without(output: SchedulerOutput, result: ModelRunnerOutput, failed: set[int]) -> ModelRunnerOutput:
        """Return the result in which these rows have failed."""
        lost = np.isin(output.sample_rows, list(failed))
        logprobs = result.logprobs
        if logprobs is not None:
            logprobs = logprobs[~np.repeat(lost, result.num_sampled)]
        return replace(
            result,
            sampled=np.where(lost[:, None], -1, result.sampled),
            num_sampled=np.where(lost, 0, result.num_sampled).astype(np.int32),
            logprobs=logprobs,
            pooled={row: vector for row, vector in result.pooled.items() if row not in failed},
            failed=dict.fromkeys(_in_order(output, failed), NOT_FINITE),
        )

    def step(self) -> SchedulerOutput:
        """Plan one more step; apply the oldest result if no further step may be in flight."""
        output = self.plan()
        if len(self.in_flight) >= self.depth or output.is_empty:
            self.deliver()
        return output

    def drain(self, limit: int = 2000) -> None:
        """Run until nothing is left; then everything must be as in the beginning."""
        for key in list(self.readiness.missing):
            self.readiness.get_ready(key)
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        else:
            stuck = self.scheduler.running_ids() + self.scheduler.waiting_ids() + self.scheduler.swapped_ids()
            places = {
                request_id: self.scheduler.num_computed_tokens(self.requests[request_id].key) for request_id in stuck
            }
            raise AssertionError(
                f"not done after {limit} steps: {self.scheduler.get_request_counts()}, computed {places}, "
                f"{self.scheduler.make_stats().num_free_blocks} blocks free"
            )
        while self.in_flight:
            self.deliver()
        self.plan()  # the worker is notified of the last ends
        self.deliver()
        assert self.scheduler.make_stats().num_free_blocks == self.setting.num_blocks
        assert self.scheduler.make_stats().num_free_host_blocks == self.setting.num_host_blocks
        assert not self.worker.rows
        assert self.scheduler.get_request_counts() == (0, 0)
        assert self.finished == Counter(self.requests.keys()), "the worker is notified of every request's end once"
        for (request_id, sequence), received in self.received.items():
            assert received.finish is not None, f"{request_id}/{sequence} was never ended"

    # What must hold -------------------------------------------------------------------------------------------

    def _receive(self, client: int, outputs: EngineCoreOutputs, may_end: Set[tuple[str, int]]) -> None:
        """may_end: the sequences that the failure of this step may end."""
        tokens = outputs.token_ids.tolist()
        assert all(event.client == client for event in outputs.events)
        ends = {(self.id_of[client, finish.handle], finish.sequence): finish for finish in outputs.ends}
        for handle, sequence, count in zip(
            outputs.handles.tolist(), outputs.sequences.tolist(), outputs.counts.tolist(), strict=True
        ):
            key = (self.id_of[client, handle], sequence)
            received = self.received[key]
            assert count > 0 or key in ends, "only what has new tokens or an end is sent"
            assert received.finish is None, f"{key} emits tokens after its end"
            assert not received.is_stopped, f"{key} emits tokens after its stop string"
            assert key[0] not in self.aborted, f"{key} emits tokens after its abort"
            received.tokens += tokens[:count]
            del tokens[:count]
            assert received.tokens == received.truth[: len(received.tokens)], f"{key} has other tokens in this schedule"
        assert not tokens
        self._receive_pooled(client, outputs)
        for key, finish in ends.items():
            received = self.received[key]
            assert received.finish is None, f"{key} ended twice"
            received.finish = finish
            if key[0] in self.aborted:
                continue  # it may have ended before that
            if finish.message is None:
                assert received.tokens == received.truth, f"{key} ended early: {finish}"
            elif finish.message in (RAISED, NOT_FINITE):
                assert key in may_end, f"{key} ended with the failure of others: {finish}"
                assert finish.status is RequestStatus.FINISHED_ERROR
            elif NO_ROOM.search(finish.message):
                needed, there = self._most_blocks(self.requests[key[0]]), self.scheduler._state.kv.num_blocks
                assert exceeds(needed, there), f"{key} would fit: {finish}"
            else:
                assert NO_LOGPROBS in finish.message or finish.message == NOT_TO_BE_HAD

    def _most_blocks(self, request: Request) -> BlockCounts:
        """Blocks that the request holds at most: each of its sequences at full length, none of them shared."""
        setting, sizing = self.setting, self.scheduler._state.kv.sizing
        output_len = request.sampling.max_tokens or setting.max_model_len if request.sampling is not None else 0
        slots = request.num_prompt_tokens + output_len
        longest = min(slots, setting.max_model_len)
        return sizing.total(
            (
                group,
                request.num_seqs * -(-longest // group.block_size)
                if group.grows
                else -(-request.encoder_len // group.block_size),
            )
            for group in sizing.groups
        )

    def _receive_pooled(self, client: int, outputs: EngineCoreOutputs) -> None:
        """A request to pool ends with its vector, and with nothing else unless it has an error."""
        admitted = [event for event in outputs.events if isinstance(event, Admitted)]
        self.num_cached |= {(client, event.handle): event.num_cached or 0 for event in admitted}
        for handle, vector in outputs.pooled.items():
            request = self.requests[self.id_of[client, handle]]
            *values, begin = vector.tolist()
            assert request.pooling is not None
            assert request.request_id not in self.aborted
            assert values == pooled_vector(request.prompt_token_ids.tolist())
            assert begin == 0 or request.reads_prefix_cache, "some states were not computed in one go"
            assert self.num_cached[client, handle] == 0 or request.reads_prefix_cache
        for finish in outputs.ends:
            if self.requests[self.id_of[client, finish.handle]].pooling is not None and finish.message is None:
                has_vector = finish.handle in outputs.pooled
                assert has_vector == (finish.status is RequestStatus.FINISHED_STOPPED), finish

    def ended_ids(self) -> set[str]:
        """Requests of which every sequence has ended."""
        ongoing = {
            request_id for (request_id, _), one in self.received.items() if one.finish is None and not one.is_stopped
        }
        return {request_id for request_id, _ in self.received} - ongoing

    def _check_step(self, output: SchedulerOutput, queue: list[str]) -> None:
        config = self.setting.scheduler
        assert output.total_num_scheduled_tokens == int(output.num_new.sum()) <= config.max_num_batched_tokens
        assert len(set(output.rows.tolist())) == len(output.rows)
        assert len(self.worker.rows) <= config.max_num_seqs
        self._check_decodes(output)
        loras = {row.lora for row in self.worker.rows.values() if row.lora is not None}
        assert not config.max_loras or len(loras) <= config.max_loras
        fresh = [init.request_id for init in output.admitted if init.sequence == 0]
        if not config.evict_for_priority and {self.id_of[key] for key in output.preempted} - self.reset_ids:
            assert not fresh, "a step that preempts admits nothing"
        self.reset_ids = set()
        fcfs = config.scheduling_policy is SchedulingPolicy.FCFS
        if fcfs and not config.max_loras and config.pipeline_depth == 1:
            entered = {init.request_id for init in output.admitted if init.request_id in queue}
            loading = self.scheduler._state.kv.transfers.keys()
            waits = [one for one in self.scheduler.waiting_ids() if self.requests[one].key not in loading]
            stayed = [request_id for request_id in queue if request_id in waits]
            assert not stayed or not entered or max(map(queue.index, entered)) < queue.index(stayed[0]), (
                "a request was overtaken"
            )
        self._check_blocks()

    def _check_decodes(self, output: SchedulerOutput) -> None:
        """No row that decodes is in two steps in flight, and each step leaves rows for the others."""
        stages = self.setting.scheduler.num_stages
        if stages == 1:
            return
        entered = {init.row for init in output.admitted}
        rows = zip(output.rows.tolist(), output.start.tolist(), strict=True)
        decodes = {row for row, start in rows if row not in entered and start >= self.worker.rows[row].num_prompt}
        *before, _ = self.in_flight
        for other, _, _ in before:
            assert not decodes & set(other.sample_rows.tolist()), "a row decodes in two steps in flight"

    def _check_follower(self, output: SchedulerOutput) -> None:
        """It has computed the same: the memory of both is equal, but for what a row sampled that was not right."""
        assert self.follower is not None
        assert self.follower.rows.keys() == self.worker.rows.keys()
        assert self.follower.device == self.worker.device
        for row, end in zip(output.rows.tolist(), (output.start + output.num_new).tolist(), strict=True):
            num_drafts = len(output.drafts.get(row, ()))
            mine, theirs = self.follower.rows[row].tokens, self.worker.rows[row].tokens
            assert mine[: end - num_drafts] == theirs[: end - num_drafts]

    def _check_blocks(self) -> None:
        """Every block is free or referenced; its count is the number of entries that name it; workers know the same."""
        named: Counter[int] = Counter()
        batch, kv = self.scheduler._state.batch, self.scheduler._state.kv  # what the public answers are made of
        assert set(batch.running.rows.tolist()) == set(self.worker.rows)
        for number, row in self.worker.rows.items():
            for table, mirrored in zip(kv.tables.of(number), row.tables, strict=True):
                entries = table.tolist()
                named.update(block for block in entries if block)
                # A worker keeps entries that a window has left, and a fork's copy of its source's reserved slots.
                assert len(entries) <= len(mirrored)
                assert all(mine in (0, theirs) for mine, theirs in zip(entries, mirrored, strict=False))
        named.update(kv.transfers.held_blocks.tolist())
        assert kv.num_free == sum(kv.num_blocks) - len(named)
        for block, count in enumerate(kv.pools.ref_count.tolist()):
            assert count == named[block], f"block {block}: {count} references, {named[block]} entries"

    def _check_cache(self) -> None:
        """Nothing that a failed step should have written can be found, once it is known that it failed."""
        if any(failure is not None for _, _, failure in self.in_flight):
            return
        for block in self.scheduler._state.kv.prefix_cache._hash_of:
            assert SPOILED not in self.worker.device[block], f"block {block} of a failed step can be found"

    def _check_events(self, theirs: list[ClientEvent]) -> None:
        """The twin has written the same since the last time."""
        mine = list(map(comparable, self.events))
        for one, other in zip_longest(mine, map(comparable, theirs)):
            assert one == other, f"{one} is the twin's {other}, in {mine}"
        theirs.clear()

    def check(self) -> None:
        self.scheduler.check()
        self._check_cache()
        running, waiting, swapped = (
            list(self.scheduler.running_ids()),
            list(self.scheduler.waiting_ids()),
            list(self.scheduler.swapped_ids()),
        )
        everywhere = running + waiting + swapped
        if self.twin is not None:
            self._check_events(self.twin.events)
            self.cache_events.check(self.twin.pool.contents)
            twin = self.twin.state()
            assert (running, waiting, swapped) == (twin["running"], twin["waiting"], twin["swapped"])
            kv = self.scheduler._state.kv
            assert (list(kv.pools.num_free), "free") == (twin["free_blocks"], "free")
            assert list(kv.host.pools.num_free) == twin["free_host_blocks"]
        self.events.clear()
        assert len(set(everywhere)) == len(everywhere), "a request is in one queue"
        assert not set(everywhere) & (self.aborted | self.ended_ids())
        assert 0 <= self.scheduler.make_stats().num_free_blocks <= self.setting.num_blocks


def _in_order(output: SchedulerOutput, rows: Set[int]) -> list[int]:
    """`rows` in the order of the step."""
    return [row for row in dict.fromkeys((*output.rows.tolist(), *output.sample_rows.tolist())) if row in rows]


def comparable(event: Event) -> Event:
    """The event without what the twin does not say: words."""
    if isinstance(event, Ended) and event.message is not None:
        return replace(event, message=WHY_ENDED)
    return event


def _difference(mine: Record, theirs: Record) -> str:
    return "; ".join(f"{key}: {mine[key]} is not the twin's {theirs[key]}" for key in mine if mine[key] != theirs[key])


def make_request(
    number: int,
    prompt: list[int],
    sampling: object,
    **cold: object,
) -> Request:
    """A request whose id, client, handle and seed follow from `number`."""
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=np.asarray(prompt, np.int32),
        sampling=sampling,  # type: ignore[arg-type]
        client_index=number % 3,
        handle=number // 3,
        seed=1000 * number,
        **{"arrival_time_s": float(number), **cold},  # type: ignore[arg-type]
    )
