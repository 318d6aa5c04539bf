"""FinishPlan: advance the counts, fork and join sequences, and add notifications for workers to the plan."""

from dataclasses import dataclass

import numpy as np

from pagoda.core.beams import PendingBeams
from pagoda.core.decision_log import Copied, DecisionLog
from pagoda.core.encoder import EncoderInputs
from pagoda.core.kv import KVCacheManager
from pagoda.core.outbox import Outbox
from pagoda.core.passes.fork import Fork
from pagoda.core.request_table import RequestTable
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler_output import AdmitKind, RowInit
from pagoda.core.step_plan import Entry, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class FinishPlan:
    """Runs after the passes that place rows: nothing is preempted any more."""

    table: RequestTable
    kv: KVCacheManager
    batch: RunningBatch
    outbox: Outbox
    encoder: EncoderInputs
    beams: PendingBeams
    fork: Fork
    log: DecisionLog

    def run(self, plan: StepPlan) -> None:
        """Fill in the second part of the plan."""
        plan.rows, plan.start, plan.num_new = plan.arrays()
        if plan.steady is not None and not plan.placed:
            plan.at, plan.ends = plan.steady.at, plan.steady.ends
            plan.sample_rows, plan.sample_index = plan.rows, plan.steady.numbers
            self.table.advance(plan.at, plan.ends, plan.num_new)
        else:
            plan.at, plan.ends = plan.rows.astype(np.intp), plan.start + plan.num_new
            self.table.advance(plan.at, plan.ends, plan.num_new)
            self._find_samples(plan)
            enter = any(entry.kind is not AdmitKind.SWAPPED_IN for entry in plan.entering.values())
            self.fork.run(plan)
            plan.has_prompts = self.batch.note_progress(plan) or enter
        self.table.expect_tokens(plan.sample_rows, plan.drafts)
        self._drain(plan)

    def _find_samples(self, plan: StepPlan) -> None:
        """A row samples when its chunk reaches the end of its known tokens."""
        table, rows = self.table, plan.at
        reaches = (plan.ends >= table.num_known(rows)) & ~table.is_pooled[rows]
        plan.sample_index = reaches.nonzero()[0].astype(np.int32)
        plan.sample_rows = plan.rows[plan.sample_index]

    def _drain(self, plan: StepPlan) -> None:
        """Move notifications and block moves into the plan."""
        if self.log.enabled:
            for row, source, target in self.kv.copies:
                sequence = self.table.owner(row)
                self.log.note(Copied(sequence.request.request_id, sequence.index, source, target))
        if plan.entering:
            plan.admitted = tuple(self._row_init(entry) for entry in plan.entering.values())
        plan.beams = self.beams.drain()
        plan.moves = self.kv.drain_moves()
        plan.notices = self.outbox.drain()
        plan.encoder_freed = self.encoder.take_evicted()
        plan.num_common_prefix_blocks = self.kv.num_common_prefix_blocks(self.batch.running.rows)
        plan.num_lookahead_slots = self.kv.sizing.num_lookahead_slots

    def _row_init(self, entry: Entry) -> RowInit:
        sequence = self.table.owner(entry.row)
        facts = sequence.request.facts
        return RowInit(
            row=entry.row,
            request_id=facts.request_id,
            sequence=sequence.index,
            kind=entry.kind,
            token_ids=sequence.token_ids,
            num_prompt_tokens=facts.num_prompt_tokens,
            num_computed=entry.num_computed,
            block_ids=self.kv.tables_of(entry.row),
            seed=sequence.seed,
            eos_token_ids=facts.eos_token_ids,
            sampling=facts.sampling,
            pooling=facts.pooling,
            lora=facts.lora,
            media=facts.media,
            encoder_len=facts.encoder_len,
            cache_salt=facts.cache_salt,
            prompt_embeds=facts.prompt_embeds,
        )
