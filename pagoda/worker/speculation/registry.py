"""Which drafters there are, how they are made from the settings, and what comes first with all of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagoda.base.speculative_config import SpeculativeConfig
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.speculation.drafter import NO_DRAFT, NUM_GRADES, Draft, Drafter
from pagoda.worker.speculation.lookup import NgramDrafter, SuffixDrafter
from pagoda.worker.table_mirror import TableMirror

if TYPE_CHECKING:
    from pagoda.worker.grammar_rows import GrammarRows
    from pagoda.worker.speculation.models import DraftForward


def make_drafter(
    config: SpeculativeConfig,
    draft: "DraftForward | None" = None,
    num_blocks: int = 0,
    grammars: "GrammarRows | None" = None,
) -> Drafter:
    """Return the drafter of a configuration whose method is set. What grammars force comes first with any method.

    draft: of the methods that run a model: its forward pass.   num_blocks: of its own KV cache, 0 if it uses the
    target's.   grammars: of the worker's rows.
    """
    return ForcedDrafter(grammars, _drafter_of(config, draft, num_blocks))


def _drafter_of(config: SpeculativeConfig, draft: "DraftForward | None", num_blocks: int) -> Drafter | None:
    """Return the drafter of a method; None if only what grammars force is drafted."""
    match config.method:
        case "ngram":
            return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
        case "suffix":
            return SuffixDrafter(
                config.suffix_decoding_max_tree_depth,
                config.suffix_decoding_max_cached_requests,
                config.suffix_decoding_max_spec_factor,
                config.suffix_decoding_min_token_prob,
            )
        case "forced":
            return None
    # Imported here because the others need no torch.
    from pagoda.worker.sampler import Sampler
    from pagoda.worker.speculation.models import DraftModelDrafter, LayerSkipDrafter

    assert draft is not None
    sampler = Sampler(draft.forward.ops)
    if config.method == "draft_model":
        return DraftModelDrafter(draft, sampler, num_blocks)
    assert config.method == "layer_skip"
    return LayerSkipDrafter(draft, sampler)


class ForcedDrafter:
    """Drafts what the grammar forces, and for rows where it forces nothing, what another drafter proposes.

    Forced tokens, such as the names of properties, cost one forward together instead of one each. Nothing else follows
    from being forced: they are verified like any draft, against masks that allow only them.
    """

    def __init__(self, grammars: "GrammarRows | None", other: Drafter | None = None) -> None:
        """grammars: of the worker's rows; None if none can have one.   other: None to draft nothing else."""
        self._grammars = grammars
        self._other = other
        self.runs_model = other is not None and other.runs_model

    def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
        if self._other is not None:
            self._other.apply(output, table)

    def propose(self, table: TableMirror, rows: np.ndarray, most: np.ndarray) -> Sequence[Draft]:
        if self._other is not None and (self._grammars is None or not self._grammars.any):
            return self._other.propose(table, rows, most)
        drafts = [self._forced(table, row, count) for row, count in zip(rows.tolist(), most.tolist(), strict=True)]
        free = np.array([not len(draft.tokens) for draft in drafts], np.bool_)
        if self._other is not None and free.any():
            others = self._other.propose(table, rows[free], most[free])
            for i, draft in zip(np.flatnonzero(free).tolist(), others, strict=True):
                drafts[i] = draft
        return drafts

    def _forced(self, table: TableMirror, row: int, most: int) -> Draft:
        tokens = self._grammars.forced(table, row) if self._grammars is not None else ()
        return Draft(np.array(tokens[:most], np.int32), NUM_GRADES - 1) if tokens else NO_DRAFT
