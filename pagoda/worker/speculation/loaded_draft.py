"""LoadedDraft: a draft model in a device's memory, with the KV cache that it alone uses."""

from dataclasses import dataclass

import torch

from pagoda.kernels.ops import Ops
from pagoda.loading.loader import load_model
from pagoda.models.base import Model
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.devices import Device
from pagoda.worker.drafters.drafter import MAX_DRAFT_STEP_TOKENS
from pagoda.worker.dry_runs import LargestSteps
from pagoda.worker.forward_runner import ForwardRunner, make_forward
from pagoda.worker.speculation.setup import DraftSetup

_MAX_QUERY_LEN = 2
"""Of rows that are drafted for in every step: their cache lacks the last token, and often the one before."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedDraft:
    """A draft model, the pass that computes it, and its KV cache of `num_blocks` blocks."""

    model: Model
    forward: ForwardRunner
    cache: CacheEngine
    num_blocks: int

    def largest_steps(self, max_rows: int, max_len: int) -> LargestSteps:
        """Return the largest steps in which it drafts.   max_rows: sequences that run at once.   max_len: of one."""
        return LargestSteps(
            min(max_rows, MAX_DRAFT_STEP_TOKENS),
            MAX_DRAFT_STEP_TOKENS,
            max_len,
            self.model.spec.vocab_size,
            len(self.model.kv_groups),
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
) -> LoadedDraft | None:
    """Load the draft model and allocate its KV cache; None if the settings have no such model.

    dtype: of its weights and its cache.   max_rows, max_len: of the table of rows.
    """
    if setup.files is None:
        return None
    model = load_model(setup.files, ops, dtype, device.device, setup.config.quantization, max_len)
    forward = make_forward(model, ops, device, max_rows, max_len, _MAX_QUERY_LEN)
    cache = CacheEngine(model.kv_groups, block_size, setup.num_blocks, 0, dtype, device)
    return LoadedDraft(model, forward, cache, setup.num_blocks)
