"""Weights of AWQ and GPTQ: random words, against their formats' own definition, one element at a time."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.forms import Q4, Q4_ZERO, Q8_ZERO, WeightFormat
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.loading.packed_codes import packed_weight
from pagoda.loading.quantization import AWQ, GPTQ, PackedFormat

IN, OUT, GROUP = 256, 24, 128
AWQ_FORMAT = PackedFormat("awq", AWQ, GROUP, symmetric=False)
GPTQ_FORMAT = PackedFormat("gptq", GPTQ, GROUP, symmetric=False, stored_zero=1)
ORDER = torch.arange(IN) * 7 % 256 // GROUP
"""A group of each element, not in order."""


def words(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


def scales_of(seed: int = 2) -> torch.Tensor:
    return (torch.rand(IN // GROUP, OUT, generator=torch.Generator().manual_seed(seed)) / 16).half()


def code_at(word: torch.Tensor, index: int, bits: int = 4) -> int:
    return int(word) >> (bits * index) & ((1 << bits) - 1)


def awq_values(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor) -> torch.Tensor:
    """As AutoAWQ unpacks: output feature 8 w + (0, 2, 4, 6, 1, 3, 5, 7)[i] is nibble i of word w."""
    values = torch.empty(OUT, IN)
    for i, feature in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        for word in range(OUT // 8):
            for at in range(IN):
                group, out = at // GROUP, 8 * word + feature
                code, zero = code_at(qweight[at, word], i), code_at(qzeros[group, word], i)
                values[out, at] = float(scales[group, out]) * (code - zero)
    return values


def gptq_values(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor,
    version: int = 1,
    bits: int = 4,
    group_of: torch.Tensor | None = None,
) -> torch.Tensor:
    """A zero point is stored as one less by version 1 of the format, as it is by version 2."""
    per_word = 32 // bits
    values = torch.empty(OUT, IN)
    for out in range(OUT):
        for at in range(IN):
            group = at // GROUP if group_of is None else int(group_of[at])
            code = code_at(qweight[at // per_word, out], at % per_word, bits)
            zero = code_at(qzeros[group, out // per_word], out % per_word, bits) + (1 if version == 1 else 0)
            values[out, at] = float(scales[group, out]) * (code - zero)
    return values


def awq() -> tuple[QuantizedWeight, torch.Tensor]:
    stored = words(IN, OUT // 8, seed=0), scales_of(), words(IN // GROUP, OUT // 8, seed=1)
    return packed_weight(AWQ_FORMAT, *stored).read(), awq_values(*stored)


def gptq(version: int = 1) -> tuple[QuantizedWeight, torch.Tensor]:
    stored = words(IN // 8, OUT, seed=0), scales_of(), words(IN // GROUP, OUT // 8, seed=1)
    return packed_weight(replace(GPTQ_FORMAT, stored_zero=2 - version), *stored).read(), gptq_values(*stored, version)


def gptq_v2() -> tuple[QuantizedWeight, torch.Tensor]:
    return gptq(version=2)


def gptq_in_order_of_activations() -> tuple[QuantizedWeight, torch.Tensor]:
    stored = words(IN // 8, OUT, seed=0), scales_of(), words(IN // GROUP, OUT // 8, seed=1)
    weight = packed_weight(replace(GPTQ_FORMAT, ordered=True), *stored, ORDER)
    return weight.read(), gptq_values(*stored, group_of=ORDER)


def gptq_of_8_bits() -> tuple[QuantizedWeight, torch.Tensor]:
    stored = words(IN // 4, OUT, seed=0), scales_of(), words(IN // GROUP, OUT // 4, seed=1)
    return packed_weight(replace(GPTQ_FORMAT, bits=8), *stored).read(), gptq_values(*stored, bits=8)


MADE = [awq, gptq, gptq_v2, gptq_in_order_of_activations, gptq_of_8_bits]
HELD_AS = {gptq_in_order_of_activations: WeightFormat(Q4_ZERO, 32), gptq_of_8_bits: WeightFormat(Q8_ZERO, GROUP)}


@pytest.mark.parametrize("made", MADE)
def test_values(made: Any) -> None:
    weight, values = made()
    assert (weight.held_as, weight.in_features) == (HELD_AS.get(made, WeightFormat(Q4_ZERO, GROUP)), IN)
    assert torch.equal(weight.dequantize(), values)


@pytest.mark.parametrize(("made", "largest"), [(gptq, 16), (gptq_of_8_bits, 256)])
def test_zero_points_of_version_1_do_not_wrap(made: Any, largest: int) -> None:
    stored = PackedFormat("gptq", GPTQ, GROUP, False, 4 if largest == 16 else 8, stored_zero=1)
    ones = torch.full((IN // GROUP, OUT // stored.codes_per_word), -1, dtype=torch.int32)
    zeros = packed_weight(stored, words(IN // stored.codes_per_word, OUT, seed=0), scales_of(), ones).read().offsets
    assert zeros is not None
    assert (int(zeros.min()), int(zeros.max())) == (largest, largest)


def test_symmetric_codes_need_no_zeros() -> None:
    sevens = torch.full((IN // GROUP, OUT // 8), 0x77777777, dtype=torch.int32)
    stored = words(IN // 8, OUT, seed=0), scales_of(), sevens
    weight = packed_weight(replace(GPTQ_FORMAT, symmetric=True), *stored).read()
    assert (weight.form, weight.offsets) == (Q4, None)
    assert torch.equal(weight.dequantize(), gptq_values(*stored))
    with pytest.raises(ConfigError, match="sym = true.* has a zero point of 7 instead of 8"):
        packed_weight(replace(GPTQ_FORMAT, symmetric=True, stored_zero=0), *stored)


@pytest.mark.parametrize("made", [awq, gptq])
@pytest.mark.parametrize("group", [128, 64, 32])
def test_smaller_groups_have_the_same_values(made: Any, group: int) -> None:
    weight, values = made()
    small = weight.in_groups_of(group)
    assert small.group == group
    assert torch.equal(small.dequantize(), values)


@pytest.mark.parametrize("columns", [256, 200, 40])
def test_a_row_of_one_group_is_divided(columns: int) -> None:
    """Into groups of which the last may be partial."""
    stored = words(columns // 8, OUT, seed=0), scales_of()[:1], words(1, OUT // 8, seed=1)
    divided = packed_weight(replace(GPTQ_FORMAT, group=None), *stored).read()
    assert (divided.group, divided.codes.shape[1], divided.in_features) == (128, -(-columns // 128) * 128, columns)
    once = [code_at(stored[0][at // 8, 3], at % 8) for at in range(columns)]
    values = float(stored[1][0, 3]) * (torch.tensor(once) - code_at(stored[2][0, 0], 3) - 1)
    assert torch.equal(divided.dequantize()[3], values)


def test_groups_that_do_not_exist_are_refused() -> None:
    stored = words(IN // 8, OUT, seed=0), scales_of(), words(IN // GROUP, OUT // 8, seed=1)
    for wrong in (ORDER + 1, ORDER - 1):
        with pytest.raises(ConfigError, match="its g_idx has groups from"):
            packed_weight(replace(GPTQ_FORMAT, ordered=True), *stored, wrong)
