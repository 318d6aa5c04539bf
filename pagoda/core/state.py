"""SchedulerState: the owners of all that a scheduler keeps, built from its settings. Plain functions work on it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pagoda.base.clock import Clock
from pagoda.base.config import CacheConfig, SchedulingMode
from pagoda.base.errors import ConfigError, InvariantBroken
from pagoda.core.cost_model import CostModel
from pagoda.core.decision_log import DecisionLog
from pagoda.core.drafts import Drafts
from pagoda.core.encoder import EncoderInputs
from pagoda.core.events import EventStream
from pagoda.core.in_flight import StepsInFlight
from pagoda.core.kv import KVCacheManager, KVGroupKind, KVGroupSpec, KVSizing, KVTier
from pagoda.core.policy import POLICIES, Policy, RequestQueue
from pagoda.core.request import Reason, Request, RequestKey, RequestState, RequestStatus
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import NO_BEAMS, BeamRows
from pagoda.core.stats import SchedulerStats
from pagoda.core.stops import StopTokens

if TYPE_CHECKING:
    from pagoda.core.beams import BeamSearch


class Preparations(Protocol):
    """Prepares what requests need on the workers (a compiled grammar, an adapter), and keeps it while they run."""

    def why_not_ready(self, request: Request) -> Reason | None:
        """Return None if the workers have what the request needs; otherwise begin to prepare it, say what is missing.

        `take_woken` returns the request's key when it is worth asking again. Raises RequestError that says why it
        cannot be had.
        """
        ...

    def take_woken(self) -> Iterable[RequestKey]:
        """Return the keys of requests that were not ready and may be now; each once."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended; it waits for nothing."""
        ...

    def pin(self, request: Request) -> None:
        """The request enters the running batch: keep what it needs until `unpin`. It was ready just before."""
        ...

    def unpin(self, request: Request) -> None:
        """Undo one `pin`."""
        ...


class SchedulerState:
    """One attribute per owner (docs/internals/scheduler.md). Only its own methods change what an owner keeps.

    requests: all that have not ended, by key; written by lifecycle.py.   num_admissions: so far; also written there.
    searches: of beam searches whose prompt is computed; written by committing_beams.py, dropped by lifecycle.py.
    new_beams: of each search that was extended since the last step, as (row, source row, position, token).
    preempted, finished: requests, since the last step.
    waiting, swapped: requests without KV, and with KV in host memory.
    preparations: of grammars and adapters; None if no request needs any.
    is_phased, cuts_prompts: what the settings say of steps and of prompts.
    """

    def __init__(
        self,
        config: SchedulerOptions,
        cache: CacheConfig,
        kv_groups: tuple[KVGroupSpec, ...],
        num_blocks: int,
        max_model_len: int,
        clock: Clock,
        num_host_blocks: int,
        encoder_decoder: bool,
        preparations: Preparations | None,
        tier: KVTier | None = None,
    ) -> None:
        config.check(max_model_len)
        if num_blocks < 1:
            raise ConfigError("the KV cache has no blocks; raise kv_cache_memory or num_blocks")
        if kv_groups and all(group.kind is KVGroupKind.CROSS for group in kv_groups):
            raise ConfigError("a model with KV needs at least one KV group besides cross attention")
        self.config = config
        self.clock = clock
        self.preparations = preparations
        self.is_phased = config.scheduling_mode is SchedulingMode.PHASED
        self.cuts_prompts = config.enable_chunked_prefill and not self.is_phased
        sizing = KVSizing.of(kv_groups, cache.block_size, max_model_len, config)
        has_windows, is_async = any(group.is_window for group in sizing.groups), config.async_scheduling

        self.requests: dict[RequestKey, RequestState] = {}
        self.searches: dict[RequestState, BeamSearch] = {}
        self.new_beams: dict[RequestState, list[tuple[int, int, int, int]]] = {}
        self.preempted: list[RequestKey] = []
        self.finished: list[RequestKey] = []
        self.num_admissions = self.num_steps = 0
        self.waiting, self.swapped = RequestQueue(), RequestQueue()
        self.policy: Policy = POLICIES[config.scheduling_policy]()
        self.stops = StopTokens()
        self.stats = SchedulerStats()
        self.log = DecisionLog(config.decision_log_steps)
        self.events = EventStream(clock)
        self.events.subscribe(self.stats.count)
        if config.decision_log_steps:
            self.events.subscribe(self.log.note)
        self.table = RequestTable(
            config.max_rows,
            max_model_len,
            track_in_flight=has_windows or config.encoder_budget > 0,
            expect_tokens=is_async,
        )
        self.kv = KVCacheManager(self.table, sizing, num_blocks, num_host_blocks, cache, config, self.events, tier)
        self.drafts = Drafts(self.table, self.kv.tables, self.events)
        self.encoder = EncoderInputs(
            self.table,
            self.events,
            config.encoder_cache_tokens,
            config.encoder_budget,
            encoder_decoder=encoder_decoder,
            whole_items=config.no_partial_media and not encoder_decoder,
        )
        self.in_flight = StepsInFlight()
        self.batch = RunningBatch(self.table, self.kv.tables, self.in_flight, self.drafts, config)
        self.costs = CostModel(kv_groups)

    def start_over(self) -> None:
        """Forget what was cached or learnt; rows and blocks are given out as at first. Nothing may be in use."""
        self.table.start_over()
        self.kv.start_over()
        self.encoder.cache.evict_unreferenced()
        self.in_flight.start_over()
        self.costs.forget()

    # What the next SchedulerOutput must still say

    def take_beams(self) -> BeamRows:
        """Return the beams that continue, each once."""
        if not self.new_beams:
            return NO_BEAMS
        columns = np.array([beam for beams in self.new_beams.values() for beam in beams], np.int32).T
        self.new_beams.clear()
        return BeamRows(*map(np.ascontiguousarray, columns))

    def take_notices(self) -> tuple[tuple[RequestKey, ...], tuple[RequestKey, ...]]:
        """Return the preempted and the finished requests, each once."""
        notices = tuple(self.preempted), tuple(self.finished)
        self.preempted.clear()
        self.finished.clear()
        return notices

    # Invariants

    def check(self) -> None:
        """Check what must always hold (docs/reference/scheduler-contract.md). Raises InvariantBroken.

        Python loops run over requests, rows and cached blocks: meant for tests, and for `check_invariants`.
        """
        batch, rows = self.batch, self.batch.running.rows
        self.table.check()
        self.kv.check(rows)
        self._check_counts(rows)
        self.stops.check(request.spec for request in self.requests.values())
        active = set(rows.tolist())
        kept = {"prefilling": batch.prefilling, "leaders": batch.leaders, "drafts": self.drafts.offered}
        for name, by_row in kept.items():
            if not by_row.keys() <= active:
                raise InvariantBroken(f"{name} has rows {sorted(by_row.keys() - active)}, which have no sequence")
        if not self.searches.keys() <= set(self.requests.values()):
            raise InvariantBroken("a request that has ended still has a beam search")
        num_seqs = sum(self._check_place(request) for request in self.requests.values())
        if len(self.waiting) + len(self.swapped) + len(batch.requests) != len(self.requests):
            raise InvariantBroken("a queue holds a request that has ended")
        most = self.config.max_num_seqs
        if num_seqs != batch.num_seqs or num_seqs > most:
            raise InvariantBroken(f"{batch.num_seqs} sequences are counted, {num_seqs} run of {most}")

    def _check_counts(self, rows: np.ndarray) -> None:
        """No row has computed more than is known or planned: its tokens, those in flight, and drafts in flight."""
        table = self.table
        known = table.num_known(np.arange(table.max_rows))
        for row, num_drafts in self.in_flight.num_drafts().items():
            known[row] += num_drafts
        if (table.num_computed[rows] > known[rows]).any() or (table.num_pending[rows] < 0).any():
            raise InvariantBroken("more tokens are computed than are known")

    def _check_place(self, request: RequestState) -> int:
        """The request is in the one queue that its status says; only running ones have rows.

        Return its running sequences.
        """
        key, request_id = request.key, request.spec.request_id
        places = (key in self.waiting, key in self.swapped, key in self.batch.requests)
        if places != _PLACES.get(request.status):
            raise InvariantBroken(f"{request_id} is {request.status.name} but waits, is swapped, runs: {places}")
        if request.rows and not places[2]:
            raise InvariantBroken(f"{request_id} does not run but has rows {request.rows}")
        if any(sequence.is_finished and sequence.row >= 0 for sequence in request.sequences):
            raise InvariantBroken(f"{request_id}: a finished sequence has a row")
        return len(request.unfinished) if places[2] else 0


_PLACES = {
    RequestStatus.WAITING: (True, False, False),
    RequestStatus.PREEMPTED: (True, False, False),
    RequestStatus.SWAPPED: (False, True, False),
    RequestStatus.RUNNING: (False, False, True),
}
