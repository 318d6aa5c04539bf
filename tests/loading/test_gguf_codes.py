"""A GGUF's codes taken as they are give the values that dequantising gives."""

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType as Kind

from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.loading.gguf_blocks import dequantize_reference, read_codes, stack_codes

ROWS, COLUMNS = 6, 512
# Largest difference, relative to the largest weight: none; scale and minimum rounded to float16; half a step of 8 bits.
KINDS = {
    Kind.Q4_0: 0.0,
    Kind.Q4_1: 0.0,
    Kind.Q5_0: 0.0,
    Kind.Q8_0: 0.0,
    Kind.Q5_1: 4e-3,
    Kind.Q4_K: 1e-3,
    Kind.Q6_K: 0.0,
}


def stored(kind: Kind) -> memoryview:
    rng = np.random.default_rng(0)
    if kind in (Kind.Q4_K, Kind.Q6_K):  # the gguf package cannot quantise these: random blocks with sane scales
        block_bytes, at = (144, 0) if kind == Kind.Q4_K else (210, 208)
        blocks = rng.integers(0, 256, (ROWS * COLUMNS // 256, block_bytes), dtype=np.uint8)
        halves = 2 if kind == Kind.Q4_K else 1
        scales = rng.uniform(0.001, 0.01, (len(blocks), halves)).astype(np.float16)
        blocks[:, at : at + 2 * halves] = scales.view(np.uint8)
        return blocks.reshape(-1).data
    values = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    return np.ascontiguousarray(quants.quantize(values, kind)).reshape(-1).data


def codes_of(kind: Kind) -> QuantizedWeight:
    codes = read_codes(stored(kind), kind, ROWS, COLUMNS)
    assert codes is not None
    return codes


def values_of(kind: Kind) -> torch.Tensor:
    values = torch.empty(ROWS, COLUMNS)
    dequantize_reference(stored(kind), kind, values)
    return values


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_values(kind: Kind) -> None:
    codes, expected = codes_of(kind), values_of(kind)
    assert (codes.dequantize() - expected).abs().max() <= KINDS[kind] * expected.abs().max() + 1e-6
    assert codes.form.bits == {"Q4": 4, "Q6": 6}.get(kind.name[:2], 8)


def test_floats_have_no_codes() -> None:
    assert read_codes(memoryview(bytes(64)), Kind.F16, 4, 8) is None


@pytest.mark.parametrize("second", [Kind.Q4_1, Kind.Q6_K], ids=lambda kind: kind.name)
def test_stacked_parts(second: Kind) -> None:
    """Of one kind: the codes themselves. Mixed, as in a Q4_K_M file's q, k and v: 8 bits."""
    stacked = stack_codes([codes_of(Kind.Q4_1), codes_of(second)])
    expected = torch.cat((values_of(Kind.Q4_1), values_of(second)))
    assert stacked.form.bits == (4 if second == Kind.Q4_1 else 8)
    tolerance = 1e-6 if second == Kind.Q4_1 else 4e-3 * float(expected.abs().max())
    assert (stacked.dequantize() - expected).abs().max() <= tolerance
