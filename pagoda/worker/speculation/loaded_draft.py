"""What drafts with a model: a draft model in a device's memory, and a worker's speculator over it or its own model."""

from dataclasses import dataclass

import torch

from pagoda.kernels.ops import Ops
from pagoda.loading.loader import load_model
from pagoda.loading.packed_cache import PackedCache
from pagoda.worker.adapters import Adapters
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.devices import Device
from pagoda.worker.dry_runs import LargestSteps
from pagoda.worker.forward_runner import ForwardRunner, make_forward
from pagoda.worker.grammar_rows import GrammarRows
from pagoda.worker.speculation.drafter import MAX_DRAFT_STEP_TOKENS
from pagoda.worker.speculation.models import DraftForward
from pagoda.worker.speculation.registry import make_drafter
from pagoda.worker.speculation.setup import DraftSetup
from pagoda.worker.speculation.speculator import Speculator
from pagoda.worker.table_mirror import TableMirror

_MAX_QUERY_LEN = 2
"""Of rows that are drafted for in every step: their cache lacks the last token, and often the one before."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedDraft:
    """A draft model, and its KV cache."""

    forward: ForwardRunner
    cache: CacheEngine

    def largest_steps(self, max_rows: int, max_len: int) -> LargestSteps:
        """Return the largest steps in which it drafts.   max_rows: sequences that run at once.   max_len: of one."""
        model = self.forward.model
        return LargestSteps(
            min(max_rows, MAX_DRAFT_STEP_TOKENS),
            MAX_DRAFT_STEP_TOKENS,
            max_len,
            model.spec.vocab_size,
            len(model.kv_groups),
            _MAX_QUERY_LEN - 1,
        )


def load_draft(
    setup: DraftSetup,
    ops: Ops,
    dtype: torch.dtype,
    device: Device,
    max_rows: int,
    max_len: int,
    block_size: int,
    cache: PackedCache | None = None,
) -> LoadedDraft | None:
    """Load the draft model and allocate its KV cache; None if the settings have no such model.

    dtype: of its weights and its cache.   max_rows, max_len: of the table of rows.   cache: see load_model.
    """
    if setup.files is None:
        return None
    model = load_model(setup.files, ops, dtype, device.device, setup.config.quantization, max_len, cache=cache)
    forward = make_forward(model, ops, device, max_rows, max_len, _MAX_QUERY_LEN)
    return LoadedDraft(forward, CacheEngine(model.kv_groups, block_size, setup.num_blocks, 0, dtype, device))


def speculator_of(
    setup: DraftSetup,
    forward: ForwardRunner,
    table: TableMirror,
    cache: CacheEngine,
    max_model_len: int,
    draft: LoadedDraft | None = None,
    grammars: GrammarRows | None = None,
    adapters: Adapters | None = None,
) -> Speculator:
    """Return the speculator of a worker.

    forward, table, cache: of the model whose tokens are drafted.   draft: the draft model, if there is one.
    grammars: of the worker's rows; what they force is drafted first.   adapters: of its rows; a draft model has none.
    """
    drafting, num_blocks = None, 0
    if setup.num_layers:
        drafting = DraftForward(forward, table, cache.layers, setup.num_layers, adapters)
    elif draft is not None:
        num_groups = len(draft.forward.model.kv_groups)
        own_table = TableMirror(*table.token_ids.shape, table.block_size, num_groups)
        drafting, num_blocks = DraftForward(draft.forward, own_table, draft.cache.layers), draft.cache.num_blocks
    drafter = make_drafter(setup.config, drafting, num_blocks, grammars)
    return Speculator(setup, drafter, max_model_len, len(table.num_tokens), grammars)
