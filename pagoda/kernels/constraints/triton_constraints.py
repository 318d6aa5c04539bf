"""A batch's logit constraints in Triton: one launch per kind of change, over all ids of all rows."""

import numpy as np
import torch
import triton
import triton.language as tl

from pagoda.kernels.constraints.batch import BatchConstraints, TokenLists
from pagoda.kernels.sampling.triton_sampling import mask_logits
from pagoda.kernels.transfer import to_device
from pagoda.kernels.triton_jit import jit

_BLOCK = 256


@jit
def _add_bias(logits, stride, rows, ids, values, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    target = logits + tl.load(rows + at, mask=inside, other=0) * stride + tl.load(ids + at, mask=inside, other=0)
    bias = tl.load(values + at, mask=inside, other=0.0)
    tl.store(target, tl.load(target, mask=inside, other=0.0) + bias, mask=inside)


@jit
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


@jit
def _forbid(logits, stride, rows, ids, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    target = logits + tl.load(rows + at, mask=inside, other=0) * stride + tl.load(ids + at, mask=inside, other=0)
    tl.store(target, tl.full([BLOCK], float("-inf"), tl.float32), mask=inside)


def constrain(logits: torch.Tensor, constraints: BatchConstraints) -> None:
    """See reference.constrain; gives the same bits."""
    constraints.check(*logits.shape)
    stride, device = logits.stride(0), logits.device

    def cells(lists: TokenLists) -> list[np.ndarray]:
        """Return the row and the column of each id."""
        return [constraints.rows[lists.rows], lists.ids]

    count = constraints.bias.ids.size
    if count:
        arrays = [*cells(constraints.bias), constraints.bias_values]
        _add_bias[(triton.cdiv(count, _BLOCK),)](logits, stride, *to_device(arrays, device), count, _BLOCK)
    count = constraints.penalized.ids.size
    if count:
        of_id = constraints.penalized.rows
        columns = [constraints.repetition[of_id], constraints.frequency[of_id], constraints.presence[of_id]]
        arrays = [*cells(constraints.penalized), constraints.output_counts, *columns]
        _penalize[(triton.cdiv(count, _BLOCK),)](logits, stride, *to_device(arrays, device), count, _BLOCK)
    masked = {i: mask for i, mask in enumerate(constraints.allowed) if mask is not None}
    if masked:
        bits = np.zeros((len(masked), -(-logits.shape[1] // 32)), np.int32)
        for mask, of_row in zip(masked.values(), bits.view(np.uint8), strict=True):
            packed = np.packbits(mask, bitorder="little")
            of_row[: len(packed)] = packed
        mask_logits(logits, constraints.rows[list(masked)], bits)
    count = constraints.forbidden.ids.size
    if count:
        arrays = cells(constraints.forbidden)
        _forbid[(triton.cdiv(count, _BLOCK),)](logits, stride, *to_device(arrays, device), count, _BLOCK)
