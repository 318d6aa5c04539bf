"""4-bit weights of AWQ and GPTQ: random words, against their formats' own definition, one element at a time."""

from typing import Any

import pytest
import torch

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.forms import Q4, Q4_ZERO, HeldAs
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.loading.packed_int4 import check_group_order, in_kernel_groups, read_awq, read_gptq, without_zeros

IN, OUT, GROUP = 256, 24, 128


def words(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


def scales_of(seed: int = 2) -> torch.Tensor:
    return (torch.rand(IN // GROUP, OUT, generator=torch.Generator().manual_seed(seed)) / 16).half()


def nibble(word: torch.Tensor, index: int) -> int:
    return int(word) >> (4 * index) & 15


def awq_values(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As AutoAWQ unpacks: output feature 8 w + (0, 2, 4, 6, 1, 3, 5, 7)[i] is nibble i of word w."""
    values = torch.empty(OUT, IN)
    for i, feature in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        for word in range(OUT // 8):
            for at in range(IN):
                group, out = at // GROUP, 8 * word + feature
                code, zero = nibble(qweight[at, word], i), nibble(qzeros[group, word], i)
                values[out, at] = float(scales[group, out]) * (code - zero)
    return values


def gptq_values(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, version: int = 1) -> torch.Tensor:
    """A zero point is stored as one less by version 1 of the format, as it is by version 2."""
    values = torch.empty(OUT, IN)
    for out in range(OUT):
        for at in range(IN):
            group = at // GROUP
            code = nibble(qweight[at // 8, out], at % 8)
            zero = nibble(qzeros[group, out // 8], out % 8) + (1 if version == 1 else 0)
            values[out, at] = float(scales[group, out]) * (code - zero)
    return values


def awq() -> tuple[QuantizedWeight, torch.Tensor]:
    stored = words(IN, OUT // 8, seed=0), words(IN // GROUP, OUT // 8, seed=1), scales_of()
    return read_awq(*stored, GROUP), awq_values(*stored)


def gptq(version: int = 1) -> tuple[QuantizedWeight, torch.Tensor]:
    stored = words(IN // 8, OUT, seed=0), words(IN // GROUP, OUT // 8, seed=1), scales_of()
    return read_gptq(*stored, GROUP, stored_zero=2 - version), gptq_values(*stored, version)


def gptq_v2() -> tuple[QuantizedWeight, torch.Tensor]:
    return gptq(version=2)


@pytest.mark.parametrize("made", [awq, gptq, gptq_v2])
def test_values(made: Any) -> None:
    weight, values = made()
    assert (weight.held_as, weight.in_features) == (HeldAs(Q4_ZERO, GROUP), IN)
    assert torch.equal(weight.dequantize(), values)


def test_version_1_has_zeros_from_1_to_16() -> None:
    zeros = gptq()[0].offsets
    assert zeros is not None
    assert (int(zeros.min()), int(zeros.max())) == (1, 16)


def test_symmetric_codes_need_no_zeros() -> None:
    sevens = torch.full((IN // GROUP, OUT // 8), 0x77777777, dtype=torch.int32)
    stored = words(IN // 8, OUT, seed=0), sevens, scales_of()
    weight = without_zeros(read_gptq(*stored, GROUP))
    assert (weight.form, weight.offsets) == (Q4, None)
    assert torch.equal(weight.dequantize(), gptq_values(*stored))
    with pytest.raises(ConfigError, match="sym = true.* has a zero point of 7 instead of 8"):
        without_zeros(read_gptq(*stored, GROUP, stored_zero=0))


@pytest.mark.parametrize("made", [awq, gptq])
@pytest.mark.parametrize("group", [128, 64, 32])
def test_smaller_groups_have_the_same_values(made: Any, group: int) -> None:
    weight, values = made()
    small = in_kernel_groups(weight, group)
    assert small.group == group
    assert torch.equal(small.dequantize(), values)


@pytest.mark.parametrize("columns", [256, 200, 40])
def test_a_row_of_one_group_is_divided(columns: int) -> None:
    """Into groups of which the last may be partial."""
    stored = words(columns // 8, OUT, seed=0), words(1, OUT // 8, seed=1), scales_of()[:1]
    whole = read_gptq(*stored, columns)
    divided = in_kernel_groups(whole, 128)
    assert (divided.group, divided.codes.shape[1], divided.in_features) == (128, -(-columns // 128) * 128, columns)
    assert torch.equal(divided.dequantize(), whole.dequantize())
    assert divided.dequantize().shape == (OUT, columns)


def test_groups_out_of_order_are_refused() -> None:
    check_group_order(torch.arange(IN) // GROUP, GROUP)
    check_group_order(torch.arange(200, dtype=torch.int32) // GROUP, GROUP)
    with pytest.raises(ConfigError, match="desc_act"):
        check_group_order(torch.arange(IN).flip(0) // GROUP, GROUP)
