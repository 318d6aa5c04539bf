"""A GGUF's codes taken as they are give the values that dequantising gives; the native kernels pack the same codes."""

from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType as Kind

from pagoda.kernels.linear.forms import GGUF_TYPES
from pagoda.kernels.linear.quantize import BlockRows, BlockWeight, QuantizedWeight, StackedWeight, codes_of, stack
from pagoda.loading.gguf_blocks import dequantize_reference, read_codes
from tests.kernels.random_blocks import random_blocks

CPU = torch.device("cpu")
KINDS = list(GGUF_TYPES)
Order: TypeAlias = tuple[int, ...] | None


def block_weight(
    kind: str, rows: int, columns: int, seed: int = 0, order: tuple[int, ...] | None = None
) -> BlockWeight:
    data = random_blocks(kind, rows, columns, seed)

    def read() -> QuantizedWeight:
        return read_codes(data.reshape(-1).data, Kind[kind], rows, columns).reordered(order)

    return BlockWeight(GGUF_TYPES[kind], (BlockRows(kind, data, order),), columns, read)


def values_of(kind: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    values = torch.empty(rows, columns)
    dequantize_reference(random_blocks(kind, rows, columns, seed).reshape(-1).data, Kind[kind], values)
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_codes_have_the_values_of_the_blocks_except_that_products_are_rounded_to_float16(kind: str) -> None:
    expected = values_of(kind, 6, 512)
    difference = (codes_of(block_weight(kind, 6, 512)).dequantize() - expected).abs().max()
    is_product = kind in ("Q2_K", "Q3_K", "IQ4_XS")
    assert difference <= (6e-4 * float(expected.abs().max()) if is_product else 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns", "order"), [(70, 512, None), (3, 256, None), (64, 768, (0, 2, 1, 3))])
def test_blocks_are_packed_as_their_codes_are(
    native: Any, kind: str, rows: int, columns: int, order: tuple[int, ...] | None
) -> None:
    weight = block_weight(kind, rows, columns, order=order)
    packed = native.prepare_quantized_linear(weight, torch.float32)
    expected = native.prepare_quantized_linear(codes_of(weight), torch.float32)
    assert torch.equal(packed.panels, expected.panels)


def test_blocks_of_32_values_in_rows_that_256_does_not_divide(native: Any) -> None:
    weight = block_weight("Q5_1", 40, 96)
    packed, expected = (native.prepare_quantized_linear(of, torch.float32) for of in (weight, codes_of(weight)))
    assert torch.equal(packed.panels, expected.panels)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_packed_table_of_codes(native: Any, kind: str) -> None:
    weight = block_weight(kind, 70, 256)
    table = native.table_of(native.prepare_quantized_linear(weight, torch.bfloat16))
    ids = torch.tensor([0, 33, 69, 1], dtype=torch.int32)
    expected = codes_of(weight).dequantize()[ids.long()].bfloat16()
    torch.testing.assert_close(native.embedding(ids, table), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_parts_of_different_kinds_keep_them(native: Any, reference: Any, bias: bool) -> None:
    """As in a Q4_K_M file's q, k and v; neighbours of one form are one weight."""
    kinds, sizes = ["Q4_K", "Q4_1", "Q6_K"], [64, 40, 33]
    parts = [block_weight(kind, rows, 256, seed) for seed, (kind, rows) in enumerate(zip(kinds, sizes, strict=True))]
    weight = stack(parts, CPU)
    assert isinstance(weight, StackedWeight)
    assert [part.held_as.form.name for part in weight.parts] == ["Q4_K", "Q4_MIN", "Q6_K"]
    add = torch.randn(sum(sizes)) if bias else None
    x = torch.randn(3, 256)
    got = native.linear(x, native.prepare_quantized_linear(weight, torch.float32, add))
    values = torch.cat([codes_of(part).dequantize() for part in weight.parts])
    expected = reference.linear(x, reference.prepare_linear(values, add))
    # x has 8 bits, of 128 in a row one step.
    torch.testing.assert_close(got, expected, rtol=0, atol=0.03 * float(expected.abs().max()))


def test_kernels_without_codes_of_two_kinds_get_8_bits() -> None:
    parts = [block_weight("Q4_1", 6, 512), block_weight("Q6_K", 6, 512, 1)]
    stacked = codes_of(StackedWeight(tuple(parts)))
    expected = torch.cat((values_of("Q4_1", 6, 512), values_of("Q6_K", 6, 512, 1)))
    assert stacked.form.name == "Q8"
    assert (stacked.dequantize() - expected).abs().max() <= 5e-3 * float(expected.abs().max())


def test_the_definition_agrees_with_what_the_gguf_package_quantizes() -> None:
    values = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    data = np.ascontiguousarray(quants.quantize(values, Kind.Q8_0)).reshape(-1).data
    assert np.abs(read_codes(data, Kind.Q8_0, 6, 512).dequantize().numpy() - values).max() < 0.02
