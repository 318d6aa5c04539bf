"""Scheduler: who runs in the next step, with how many tokens, in which blocks. The API of SPEC.md section 2.

A step is planned in a few moves, each a class of its own over one shared SchedulerState:

    mixed    running pass -> (nobody was preempted:) return swapped -> admit waiting -> emit
    phased   (nothing is swapped:) admit whole prompts -> (none entered:) running pass -> return swapped -> emit

and its result is taken in by the output pass.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pagoda.base.clock import Clock
from pagoda.base.config import CacheConfig, SchedulerConfig, SchedulingMode
from pagoda.base.errors import ConfigError, RequestError
from pagoda.core.admission_pass import AdmissionPass
from pagoda.core.decision_log import DecisionLog
from pagoda.core.emission import emit
from pagoda.core.invariants import check_invariants
from pagoda.core.kv_specs import KVGroupKind, KVGroupSpec
from pagoda.core.output_pass import OutputPass, StopTokens, find_end
from pagoda.core.request import Request, RequestStatus
from pagoda.core.request_table import Branch, LiveRequest
from pagoda.core.running_pass import RunningPass
from pagoda.core.scheduler_output import EngineCoreOutputs, Finish, ModelRunnerOutput, SchedulerOutput
from pagoda.core.scheduler_state import SchedulerState, only_finishes
from pagoda.core.scheduler_stats import SchedulerStats
from pagoda.core.step_plan import StepPlan
from pagoda.core.swapped_pass import SwappedPass


class Scheduler:
    """Plans steps and takes in their results. Single-threaded; every call leaves SPEC's invariants whole.

    num_blocks: usable device blocks; block 0 is one more, the null block.
    num_host_blocks: blocks of the swap pool, with ids from 0.
    encoder_decoder: a request's encoder input is run in its first step and read through cross-attention tables.
    max_rows: capacity of the row table; workers size theirs by it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        kv_groups: tuple[KVGroupSpec, ...],
        num_blocks: int,
        max_model_len: int,
        clock: Clock,
        num_host_blocks: int = 0,
        encoder_decoder: bool = False,
    ) -> None:
        _check_config(config, kv_groups, num_blocks, max_model_len)
        self.config = config
        self.max_model_len = max_model_len
        self._state = SchedulerState(
            config, cache, kv_groups, num_blocks, max_model_len, clock, num_host_blocks, encoder_decoder
        )
        self.max_rows = self._state.table.max_rows
        self._stops = StopTokens()
        self._running = RunningPass(self._state)
        self._swapped = SwappedPass(self._state)
        self._admission = AdmissionPass(self._state)
        self._outputs = OutputPass(self._state, self._stops)

    # Requests come and go

    def add_request(self, request: Request) -> None:
        """Put `request` in line. RequestError for an id that is live, or what no engine of this size can serve."""
        state = self._state
        if request.request_id in state.live:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        self._check_request(request)
        live = LiveRequest(request, state.policy.key(request))
        prompt = np.ascontiguousarray(request.prompt_token_ids, np.int32)
        for index in range(request.num_branches):
            prior = request.prior_output[index] if request.prior_output else ()
            tokens = np.concatenate((prompt, np.array(prior, np.int32))) if prior else prompt
            live.branches.append(Branch(live, index, tokens))
        if request.prior_output:
            live.awaiting_fork = False
            self._settle_prior_ends(live)
        if state.kv.content.caching:
            for branch in live.branches if not live.awaiting_fork else live.branches[:1]:
                state.kv.content.extend_chain(branch)
        self._stops.add(request)
        state.live[request.request_id] = live
        state.waiting.push(live)

    def _check_request(self, request: Request) -> None:
        num_tokens, longest = request.num_prompt_tokens, self.max_model_len
        if num_tokens == 0:
            raise RequestError("the prompt is empty", "prompt")
        if (request.sampling is None) == (request.pooling is None):
            raise RequestError("exactly one of sampling and pooling parameters must be given", "sampling")
        if num_tokens + (request.sampling is not None) > longest:
            room = "with at least one output token " if request.sampling else ""
            raise RequestError(f"the prompt has {num_tokens} tokens; {room}max_model_len is {longest}", "prompt")
        if request.prior_output and len(request.prior_output) != request.num_branches:
            raise RequestError("prior_output must have one entry per branch", "prior_output")
        self._check_media(request)

    def _check_media(self, request: Request) -> None:
        config = self.config
        limit = min(config.encoder_budget, config.encoder_cache_tokens)
        whole = config.no_partial_media and not self._state.encoder_decoder
        for item in request.media:
            if item.length > limit:
                raise RequestError(f"a media item has {item.length} tokens; the encoder takes {limit}", "media")
            if whole and item.length > config.max_num_batched_tokens:
                most = config.max_num_batched_tokens
                raise RequestError(f"a media item has {item.length} tokens; a step takes {most} of it whole", "media")

    def _settle_prior_ends(self, live: LiveRequest) -> None:
        """Branches of a request resumed after an engine's death that had ended already are not run again."""
        request = live.request
        limit = self._state.table.limit_of(request)
        for branch, prior in zip(live.branches, request.prior_output, strict=True):
            status = find_end(request, 0, list(prior), limit)[1]
            if status is not None:
                branch.status = status
        if not live.unfinished:
            raise RequestError("every branch of prior_output has ended already", "prior_output")

    def finish_requests(
        self, request_ids: str | Iterable[str], status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> dict[int, EngineCoreOutputs]:
        """End requests wherever they stand; ids that are gone are passed over. What clients must hear, by client.

        Blocks and seats are free at once: steps in flight come before whatever uses them next.
        """
        told: dict[int, list[Finish]] = {}
        for request_id in (request_ids,) if isinstance(request_ids, str) else tuple(request_ids):
            live = self._state.live.get(request_id)
            if live is not None:
                finishes = self._state.end_request(live, status)
                told.setdefault(live.request.client_index, []).extend(finishes)
        return {client: only_finishes(finishes) for client, finishes in told.items()}

    def finish_branch(
        self, request_id: str, branch: int, status: RequestStatus = RequestStatus.FINISHED_STOPPED
    ) -> dict[int, EngineCoreOutputs]:
        """End one branch (a stop string was found in its text); the others go on. Nothing, if it is gone."""
        live = self._state.live.get(request_id)
        if live is None or branch >= len(live.branches) or live.branches[branch].is_finished:
            return {}
        finish = self._state.end_one_branch(live.branches[branch], status)
        return {live.request.client_index: only_finishes((finish,))}

    # Steps

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. Changes state: called again before the result is home, it plans the step after."""
        plan = self._open_step()
        if self.config.scheduling_mode is SchedulingMode.PHASED:
            self._plan_phased(plan)
        else:
            self._plan_mixed(plan)
        return emit(self._state, plan)

    def _open_step(self) -> StepPlan:
        state, config = self._state, self.config
        state.step += 1
        state.log.open_step(state.step)
        # A request that is alone starves nobody, and phased prompts are never cut: neither is capped.
        mixed = config.scheduling_mode is SchedulingMode.MIXED
        cap = config.long_prefill_token_threshold if mixed and len(state.live) > 1 else 0
        budget = config.max_num_batched_tokens
        num_decodes = len(state.lineup.rows) - len(state.prefilling)
        if mixed and config.prefill_beside_decodes and num_decodes:
            # Decodes take what they want of this budget wherever they stand in line: the cap keeps prompts before them
            # from it.
            share = config.prefill_beside_decodes
            num_drafts = sum(len(drafts) for drafts in state.drafts.values())
            budget = min(budget, num_decodes + num_drafts + share)
            cap = min(cap or share, max(share, 1 + config.num_speculative_tokens))
        return StepPlan(state.step, budget, config.encoder_budget, cap, state.clock.now())

    def _plan_mixed(self, plan: StepPlan) -> None:
        self._running.run(plan)
        if not plan.preempted and self._swapped.run(plan):
            self._admission.run(plan)

    def _plan_phased(self, plan: StepPlan) -> None:
        if not self._state.swapped:
            self._admission.run(plan)
        if plan.is_empty:
            self._running.run(plan)
            if not plan.preempted:
                self._swapped.run(plan)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput | None
    ) -> dict[int, EngineCoreOutputs]:
        """Take in the result of a step, in the order of planning: what each client must hear.

        Of a step with nothing to compute, `model_output` may be None; it still brings the ends decided while planning.
        """
        if scheduler_output.is_empty or model_output is None:
            return self._state.take_untold()
        told = self._outputs.apply(scheduler_output, model_output)
        if self.config.check_invariants:
            self.check()
        return told

    def update_draft_token_ids(self, drafts: Mapping[str | tuple[str, int], Sequence[int]]) -> None:
        """Offer draft tokens to verify in the next step, by request id (its first branch) or (request id, branch).

        Drafts for a row that is mid-prefill, or whose last token is still in flight, are dropped: they would not fit.
        """
        state, table = self._state, self._state.table
        for key, tokens in drafts.items():
            request_id, index = (key, 0) if isinstance(key, str) else key
            live = state.live.get(request_id)
            row = live.branches[index].row if live is not None else -1
            if row < 0:
                continue
            state.drop_drafts(row)
            lacks = int(table.num_tokens[row] - table.num_computed[row])
            if len(tokens) and lacks == 1 and row not in state.prefilling:
                state.offer_drafts(row, np.array(tokens, np.int32))

    # Questions

    def has_unfinished_requests(self) -> bool:
        return bool(self._state.live)

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting); swapped requests count as waiting."""
        return len(self._state.running), len(self._state.waiting) + len(self._state.swapped)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget all cached content: False while blocks are held. `preempt_running` throws everybody out first.

        Tokens in flight of those are dropped when they land; they run again in the very next step.
        """
        if preempt_running:
            self._state.drop_running()
        return self._state.kv.content.reset_prefix_cache()

    def make_stats(self) -> SchedulerStats:
        state = self._state
        return SchedulerStats.of(
            state.counters,
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_swapped=len(state.swapped),
            num_blocks=state.kv.pool.num_blocks,
            num_free_blocks=state.kv.pool.num_free,
            num_free_host_blocks=state.swap.pool.num_free,
        )

    @property
    def explain(self) -> DecisionLog:
        """Why the last steps were planned as they were (`decision_log_steps` of them)."""
        return self._state.log

    @property
    def num_free_blocks(self) -> int:
        return self._state.kv.pool.num_free

    @property
    def num_free_host_blocks(self) -> int:
        return self._state.swap.pool.num_free

    def running_ids(self) -> list[str]:
        """In order of admission."""
        return list(self._state.running)

    def waiting_ids(self) -> list[str]:
        """In line order."""
        return [live.request_id for live in self._state.waiting]

    def swapped_ids(self) -> list[str]:
        """In line order."""
        return [live.request_id for live in self._state.swapped]

    def num_computed_tokens(self, request_id: str) -> list[int]:
        """Per unfinished branch that has been started (one entry before the fork)."""
        live, table = self._state.live[request_id], self._state.table
        started = [branch for branch in live.unfinished if branch.row >= 0 or not live.awaiting_fork]
        branches = started or live.unfinished[:1]
        return [int(table.num_computed[one.row]) if one.row >= 0 else one.num_computed for one in branches]

    def num_blocks_held(self, request_id: str) -> list[int]:
        """Per KV group: distinct device blocks the request references, the null block left out."""
        live, table = self._state.live[request_id], self._state.table
        held: list[set[int]] = [set() for _ in table.groups]
        for branch in live.branches:
            if branch.row >= 0:
                for blocks, entries in zip(held, table.tables(branch.row), strict=True):
                    blocks.update(entries[entries != 0].tolist())
        return [len(blocks) for blocks in held]

    def row_owner(self, row: int) -> tuple[str, int]:
        """(request id, branch) of a row named by a SchedulerOutput that is not home yet."""
        branch = self._state.table.branch_of[row]
        assert branch is not None, f"row {row} has no owner"
        return branch.live.request_id, branch.index

    def check(self) -> None:
        """Assert SPEC's invariants. Raises InvariantBroken."""
        check_invariants(self._state)


def _check_config(
    config: SchedulerConfig, kv_groups: tuple[KVGroupSpec, ...], num_blocks: int, max_model_len: int
) -> None:
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is below max_num_seqs={config.max_num_seqs}: "
            "a decode step could not hold every sequence"
        )
    mixed = config.scheduling_mode is SchedulingMode.MIXED
    if mixed and not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"without chunked prefill max_num_batched_tokens={config.max_num_batched_tokens} must be at least "
            f"max_model_len={max_model_len}"
        )
    if config.prefill_beside_decodes and (not config.enable_chunked_prefill or config.no_partial_media):
        raise ConfigError(
            f"prefill_beside_decodes={config.prefill_beside_decodes} cuts prompts anywhere: leave "
            "enable_chunked_prefill on and no_partial_media off, or what must not be cut waits until nothing decodes"
        )
    if num_blocks < 1:
        raise ConfigError("the KV cache has no blocks; raise kv_cache_memory or num_blocks")
    if not any(group.kind is not KVGroupKind.CROSS for group in kv_groups):
        raise ConfigError("a model needs at least one full or window KV group")
