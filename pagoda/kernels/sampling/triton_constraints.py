"""A batch's logit constraints in Triton: one launch per kind of change, over all ids of all rows."""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from pagoda.kernels.sampling.batch import BatchConstraints, TokenLists
from pagoda.kernels.sampling.triton_sampling import mask_rows
from pagoda.kernels.transfer import parts_to_device
from pagoda.kernels.triton_support import jit, jit_for_any

_BLOCK = 256


@jit_for_any("count")
def _add_bias(logits, stride, rows, ids, values, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    target = logits + tl.load(rows + at, mask=inside, other=0) * stride + tl.load(ids + at, mask=inside, other=0)
    bias = tl.load(values + at, mask=inside, other=0.0)
    tl.store(target, tl.load(target, mask=inside, other=0.0) + bias, mask=inside)


@jit_for_any("count")
def _penalize(logits, stride, rows, ids, counts, repetitions, frequencies, presences, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    target = logits + tl.load(rows + at, mask=inside, other=0) * stride + tl.load(ids + at, mask=inside, other=0)
    logit = tl.load(target, mask=inside, other=0.0)
    repetition = tl.load(repetitions + at, mask=inside, other=1.0)
    times = tl.load(counts + at, mask=inside, other=0)
    logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    frequency = tl.load(frequencies + at, mask=inside, other=0.0)
    presence = tl.load(presences + at, mask=inside, other=0.0)
    penalty = tl.where(times > 0, _times(frequency, times.to(tl.float32)) + presence, 0.0)
    tl.store(target, logit - penalty, mask=inside)


@jit
def _times(a, b):
    # fma with 0 rounds the product by itself: the compiler cannot fuse it with the sum that follows.
    return tl.fma(a, b, tl.zeros_like(a))


@jit_for_any("count")
def _forbid(logits, stride, rows, ids, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    target = logits + tl.load(rows + at, mask=inside, other=0) * stride + tl.load(ids + at, mask=inside, other=0)
    tl.store(target, tl.full([BLOCK], float("-inf"), tl.float32), mask=inside)


def constrain(logits: torch.Tensor, constraints: BatchConstraints) -> None:
    """See reference.constrain; gives the same bits. Everything travels to the device in one copy."""
    constraints.check(*logits.shape)

    def cells(lists: TokenLists) -> list[np.ndarray]:
        """Return the row and the column of each id."""
        return [constraints.rows[lists.rows], lists.ids]

    bias, penalized, forbidden = constraints.bias, constraints.penalized, constraints.forbidden
    of_id = penalized.rows
    of_penalties = [column[of_id] for column in (constraints.repetition, constraints.frequency, constraints.presence)]
    masked = [i for i, mask in enumerate(constraints.allowed) if mask is not None]
    masks = _bits([constraints.allowed[i] for i in masked], logits.shape[1])
    for_bias, for_penalties, for_masks, for_forbidden = parts_to_device(
        [
            [*cells(bias), constraints.bias_values],
            [*cells(penalized), constraints.output_counts, *of_penalties],
            [constraints.rows[masked], masks],
            cells(forbidden),
        ],
        logits.device,
    )

    def run(kernel: Any, arrays: list[torch.Tensor], count: int) -> None:
        if count:
            kernel[(triton.cdiv(count, _BLOCK),)](logits, logits.stride(0), *arrays, count, _BLOCK)

    run(_add_bias, for_bias, bias.ids.size)
    run(_penalize, for_penalties, penalized.ids.size)
    mask_rows(logits, *for_masks)
    run(_forbid, for_forbidden, forbidden.ids.size)


def _bits(masks: list[np.ndarray | None], vocab_size: int) -> np.ndarray:
    """Return masks of allowed tokens as `mask_logits` takes them."""
    bits = np.zeros((len(masks), -(-vocab_size // 32)), np.int32)
    for mask, of_row in zip(masks, bits.view(np.uint8), strict=True):
        assert mask is not None
        packed = np.packbits(mask, bitorder="little")
        of_row[: len(packed)] = packed
    return bits
