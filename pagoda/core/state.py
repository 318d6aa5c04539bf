"""SchedulerState: the owners of all that a scheduler keeps, built from its settings. Plain functions work on it."""

from pagoda.base.clock import Clock
from pagoda.base.config import CacheConfig, SchedulingMode
from pagoda.core.decision_log import DecisionLog
from pagoda.core.drafts import Drafts
from pagoda.core.encoder import EncoderInputs
from pagoda.core.in_flight import StepsInFlight
from pagoda.core.kv import KVCacheManager, KVGroupSpec, KVSizing
from pagoda.core.outbox import Outbox
from pagoda.core.policy import POLICIES, CostModel, Policy, make_preemption_rule
from pagoda.core.preparation import Preparations
from pagoda.core.queues import RequestQueue
from pagoda.core.request_state import RequestState
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.stats import SchedulerStats
from pagoda.core.stops import StopTokens


class SchedulerState:
    """One attribute per owner (docs/internals/scheduler.md). Only its own methods change what an owner keeps.

    requests: all that have not ended, by id; written by lifecycle.py.   num_admissions: so far; also written there.
    waiting, swapped: requests without KV, and with KV in host memory.
    preparations: of grammars and adapters; None if no request needs any.
    is_phased, cuts_prompts: what the settings say of steps and of prompts.   whole_items: media items are never split.
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
    ) -> None:
        self.config = config
        self.clock = clock
        self.preparations = preparations
        self.is_phased = config.scheduling_mode is SchedulingMode.PHASED
        self.cuts_prompts = config.enable_chunked_prefill and not self.is_phased
        self.whole_items = config.no_partial_media and not encoder_decoder
        sizing = KVSizing.of(kv_groups, cache.block_size, max_model_len, config)
        has_windows, is_async = any(group.is_window for group in sizing.groups), config.async_scheduling

        self.requests: dict[str, RequestState] = {}
        self.num_admissions = 0
        self.waiting, self.swapped = RequestQueue(), RequestQueue()
        self.policy: Policy = POLICIES[config.scheduling_policy]()
        self.stops = StopTokens()
        self.stats = SchedulerStats()
        self.log = DecisionLog(config.decision_log_steps)
        self.table = RequestTable(
            config.max_rows,
            max_model_len,
            track_in_flight=has_windows or config.encoder_budget > 0,
            expect_tokens=is_async,
        )
        self.kv = KVCacheManager(self.table, sizing, num_blocks, num_host_blocks, cache, config, self.stats)
        self.drafts = Drafts(self.table, self.stats)
        self.encoder = EncoderInputs(
            self.table,
            config.encoder_cache_tokens,
            config.encoder_budget,
            encoder_decoder=encoder_decoder,
            whole_items=self.whole_items,
        )
        self.in_flight = StepsInFlight()
        self.batch = RunningBatch(self.table, self.kv, self.in_flight, self.drafts, async_scheduling=is_async)
        self.outbox = Outbox(config.max_rows)
        self.costs = CostModel()
        self.preemption_rule = make_preemption_rule(config.preemption_mode, self.costs)
