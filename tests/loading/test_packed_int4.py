"""4-bit weights of AWQ and GPTQ: random words, against their formats' own definition, one element at a time."""

from typing import Any

import pytest
import torch

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.loading.packed_int4 import read_awq, read_gptq

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


def gptq_values(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = torch.empty(OUT, IN)
    for out in range(OUT):
        for at in range(IN):
            group = at // GROUP
            code = nibble(qweight[at // 8, out], at % 8)
            zero = nibble(qzeros[group, out // 8], out % 8) + 1
            values[out, at] = float(scales[group, out]) * (code - zero)
    return values


def awq() -> tuple[QuantizedWeight, torch.Tensor]:
    stored = words(IN, OUT // 8, seed=0), words(IN // GROUP, OUT // 8, seed=1), scales_of()
    return read_awq(*stored), awq_values(*stored)


def gptq() -> tuple[QuantizedWeight, torch.Tensor]:
    stored = words(IN // 8, OUT, seed=0), words(IN // GROUP, OUT // 8, seed=1), scales_of()
    return read_gptq(*stored, g_idx=torch.arange(IN) // GROUP), gptq_values(*stored)


@pytest.mark.parametrize("made", [awq, gptq])
def test_values(made: Any) -> None:
    weight, values = made()
    assert (weight.bits, weight.group, weight.in_features) == (4, GROUP, IN)
    torch.testing.assert_close(weight.dequantize(), values, atol=1e-6, rtol=0)


def test_symmetric_codes_need_no_minima() -> None:
    sevens = torch.full((IN // GROUP, OUT // 8), 0x77777777, dtype=torch.int32)
    stored = words(IN // 8, OUT, seed=0), sevens, scales_of()
    weight = read_gptq(*stored)
    assert weight.minima is None
    torch.testing.assert_close(weight.dequantize(), gptq_values(*stored), atol=1e-6, rtol=0)


def test_groups_out_of_order_are_refused() -> None:
    stored = words(IN // 8, OUT, seed=0), words(IN // GROUP, OUT // 8, seed=1), scales_of()
    with pytest.raises(ConfigError, match="desc_act"):
        read_gptq(*stored, g_idx=torch.arange(IN).flip(0) // GROUP)
