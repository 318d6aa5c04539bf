"""Errors for arguments that would lead a kernel out of its memory."""

import numpy as np
import torch

from pagoda.base.errors import InvariantBroken
from pagoda.kernels.native.abi import NO_CACHE, CheckResult


def bad_index(what: str, value: int, at: int, limit: int) -> InvariantBroken:
    """Return the error for an index outside its table."""
    return InvariantBroken(f"{what}: element {at} is {value}, allowed are 0 to {limit - 1}; the step was not run")


def check_below(what: str, indices: np.ndarray, limit: int) -> None:
    """Raise InvariantBroken if one of `indices` (integers of any shape) is not in 0 .. limit - 1."""
    if indices.size and (indices.min() < 0 or indices.max() >= limit):
        at = int(np.flatnonzero((indices < 0) | (indices >= limit))[0])
        raise bad_index(what, int(indices.flat[at]), at, limit)


_GROUP_RULES = {
    CheckResult.QUERY_START: "query_start must begin at 0, never decrease, and end at the number of queries",
    CheckResult.SEQ_LEN: "seq_lens must be at least the row's queries, and its blocks must fit in the block table",
    CheckResult.BLOCK_ID: "a block id in block_table is outside the cache",
    CheckResult.LAST_SEEN: (
        "last_seen must be a position of the row, from the token's own on, and not decrease within the row"
    ),
    CheckResult.SLOT: "slot_mapping must have a slot within the cache for every token",
}


def bad_group(bad: int, at: int, num_blocks: int) -> InvariantBroken:
    """Return the error for AttentionMetadata that points outside the cache. at: the row, or for a slot the token."""
    which = "token" if bad == CheckResult.SLOT else "row"
    rule, cache = _GROUP_RULES[CheckResult(bad)], f"{num_blocks} blocks"
    if num_blocks == NO_CACHE:
        cache = "no cache"
        if bad == CheckResult.SEQ_LEN:
            rule = "seq_lens must be the row's queries, all of whose tokens must be in the batch"
    return InvariantBroken(f"attention metadata, {which} {at}: {rule} ({cache}); the step was not run")


def check_logits(logits: torch.Tensor) -> None:
    """Raise ValueError for logits that the kernels cannot read."""
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be float32 [rows, vocab] with adjacent columns, not {tuple(logits.shape)} of {logits.dtype} "
            f"with strides {logits.stride()}"
        )
