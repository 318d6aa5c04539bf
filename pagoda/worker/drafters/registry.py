"""Which drafters there are, how they are made from the settings, and what comes first with all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagoda.base.speculative_config import SpeculativeConfig
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.drafters.drafter import NO_DRAFT, NUM_GRADES, Draft, Drafter
from pagoda.worker.drafters.lookup import NgramDrafter, SuffixDrafter, SuffixSettings
from pagoda.worker.table_mirror import TableMirror

if TYPE_CHECKING:
    from pagoda.worker.drafters.models import DraftForward
    from pagoda.worker.grammar_rows import GrammarRows
    from pagoda.worker.sampler import Sampler


@dataclass(frozen=True, slots=True, eq=False)
class DraftParts:
    """What a drafter that runs a model needs.

    draft: that model's forward pass.   num_blocks: of its own KV cache, 0 if it uses the target's.
    """

    draft: "DraftForward"
    sampler: "Sampler"
    num_blocks: int = 0


def _ngram(config: SpeculativeConfig, _: DraftParts | None) -> Drafter:
    return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)


def _suffix(config: SpeculativeConfig, _: DraftParts | None) -> Drafter:
    settings = SuffixSettings(
        max_depth=config.suffix_decoding_max_tree_depth,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
    )
    return SuffixDrafter(settings)


def _draft_model(_: SpeculativeConfig, parts: DraftParts | None) -> Drafter:
    from pagoda.worker.drafters.models import DraftModelDrafter

    assert parts is not None
    return DraftModelDrafter(parts.draft, parts.sampler, parts.num_blocks)


def _layer_skip(_: SpeculativeConfig, parts: DraftParts | None) -> Drafter:
    from pagoda.worker.drafters.models import LayerSkipDrafter

    assert parts is not None
    return LayerSkipDrafter(parts.draft, parts.sampler)


def _none(_: SpeculativeConfig, __: DraftParts | None) -> None:
    return None


_DRAFTERS: Mapping[str, Callable[[SpeculativeConfig, DraftParts | None], Drafter | None]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "draft_model": _draft_model,
    "layer_skip": _layer_skip,
    "forced": _none,
}


def make_drafter(
    config: SpeculativeConfig, parts: DraftParts | None = None, grammars: "GrammarRows | None" = None
) -> Drafter:
    """Return the drafter of a configuration whose method is set. What grammars force comes first with any method.

    parts: for the methods that run a model.   grammars: of the worker's rows.
    """
    assert config.method is not None
    return ForcedDrafter(grammars, _DRAFTERS[config.method](config, parts))


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
