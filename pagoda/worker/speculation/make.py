"""Make the Speculator of an executor from a DraftSetup."""

import time

from pagoda.kernels.ops import Ops
from pagoda.worker.adapters import Adapters
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.drafters.registry import DraftParts, make_drafter
from pagoda.worker.drafters.rollout import DraftForward
from pagoda.worker.forward_runner import ForwardRunner
from pagoda.worker.grammar_rows import GrammarRows
from pagoda.worker.sampler import Sampler
from pagoda.worker.speculation.controller import DraftController
from pagoda.worker.speculation.loaded_draft import LoadedDraft
from pagoda.worker.speculation.setup import DraftSetup
from pagoda.worker.speculation.speculator import Speculator
from pagoda.worker.table_mirror import TableMirror


def make_speculator(
    setup: DraftSetup,
    forward: ForwardRunner,
    table: TableMirror,
    cache: CacheEngine,
    ops: Ops,
    max_model_len: int,
    draft: LoadedDraft | None = None,
    grammars: GrammarRows | None = None,
    adapters: Adapters | None = None,
) -> Speculator:
    """Return the speculator of a worker.

    forward, table, cache: of the model whose tokens are drafted.   draft: the draft model, if there is one.
    grammars: of the worker's rows; what they force is drafted first.   adapters: of its rows; a draft model has none.
    """
    parts: DraftParts | None = None
    if setup.num_layers:
        parts = DraftParts(DraftForward(forward, table, cache.layers, setup.num_layers, adapters), Sampler(ops))
    elif draft is not None:
        own_table = TableMirror(*table.token_ids.shape, table.block_size, len(draft.model.kv_groups))
        drafting = DraftForward(draft.forward, own_table, draft.cache.layers)
        parts = DraftParts(drafting, Sampler(ops), draft.num_blocks)
    drafter = make_drafter(setup.config, parts, grammars)
    max_rows = len(table.num_tokens)
    controller = DraftController(max_rows, setup.max_drafts) if setup.config.adaptive else None
    return Speculator(
        drafter, controller, setup.max_drafts, max_model_len, max_rows, time.perf_counter, setup.num_steps_ahead
    )
