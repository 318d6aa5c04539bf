"""Packed linear layers against their definition, and each row's bits in different batches."""

from ctypes import addressof, c_int64
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagoda.kernels.linear.forms import K_SEGMENT, NATIVE_FORMS, Q4_ZERO, Offset, WeightFormat
from pagoda.kernels.linear.packed import PackedWeight
from pagoda.kernels.linear.quantize import (
    QuantizedWeight,
    exponents_of,
    quantize,
    quantize_rows,
    scales_of,
)
from pagoda.kernels.linear.reference import sum_by_groups, sum_by_segments
from pagoda.kernels.native.abi import PackedLinear
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.torch_ops import TorchOps
from pagoda.ops.declare import Activation
from pagoda.ops.tensor import LinearWeight
from tests.device_under_test import DeviceUnderTest
from tests.kernels.random_codes import random_codes

SHAPES = [(576, 960), (1536, 576), (100, 17), (17, 100), (1, 1), (33, 65), (130, 49)]  # in, out
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUANTIZED = {
    f"{form.name} of {group}": WeightFormat(form, group)
    for form in NATIVE_FORMS
    if form.offset is not Offset.NONE
    for group in form.native_groups
}
"""Every kind of codes that the native kernels multiply."""


def with_threads(native: Any, threads: int) -> Any:
    return NativeOps(native.library, threads)


def quantized(kind: str, out_features: int, in_features: int) -> QuantizedWeight:
    return random_codes(QUANTIZED[kind], out_features, in_features)


def planned(native: Any, record: Any, threads: int) -> tuple[int, ...]:
    plan = (c_int64 * 3)()
    native.library["linear_plan"](addressof(record), threads, addressof(plan))
    return tuple(plan)


def any_weight(native: Any, kind: torch.dtype | str, out_features: int, in_features: int) -> LinearWeight:
    if isinstance(kind, str):
        return native.prepare_quantized_linear(
            quantized(kind, out_features, in_features), torch.float32, torch.randn(out_features)
        )
    return native.prepare_linear(torch.randn(out_features, in_features).to(kind), torch.randn(out_features).to(kind))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_reference(native: Any, reference: Any, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    in_features, out_features = shape
    weight, bias = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features).to(dtype)
    x = torch.randn(37, in_features).to(dtype)
    for used in (bias, None):
        packed, plain = native.prepare_linear(weight, used), reference.prepare_linear(weight, used)
        expected = reference.logits(x, plain)
        tolerance = 2e-6 * float(in_features**0.5) * 4
        torch.testing.assert_close(native.logits(x, packed), expected, rtol=1e-5, atol=tolerance)
        assert torch.equal(native.linear(x, packed), native.logits(x, packed).to(dtype))


@pytest.mark.parametrize("in_features", [1, 33, 130, K_SEGMENT, K_SEGMENT + 1, 2 * K_SEGMENT + 131])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_have_the_bits_of_the_definition(native: Any, dtype: torch.dtype, in_features: int) -> None:
    """In each number of rows that tiles have, in more panels than are multiplied by a segment at a time."""
    if dtype == torch.float32 and native.library.isa in ("sse4_2", "portable"):
        pytest.skip("rounds products of float32, too, without an instruction for both")
    generator = torch.Generator().manual_seed(in_features)
    weight = torch.randn(33 * 32 + 5, in_features, generator=generator).to(dtype)
    x = torch.randn(80, in_features, generator=generator).to(dtype)
    some = torch.tensor([0, 1, 2, 3, 7, 40, 79])
    columns = torch.tensor([0, 15, 16, 31, 32, 70, 33 * 32 - 1, 33 * 32, 33 * 32 + 4])
    expected = sum_by_segments(x[some], weight[columns])
    packed = native.prepare_linear(weight)
    assert torch.equal(native.logits(x, packed)[some][:, columns], expected)
    for rows in range(1, 8):
        assert torch.equal(native.logits(x[some[:rows]], packed)[:, columns], expected[:rows]), rows


@pytest.mark.parametrize("in_features", [1, 256, 300, K_SEGMENT, 2 * K_SEGMENT + 131])
@pytest.mark.parametrize("kind", [kind for kind, held in QUANTIZED.items() if held.form.sub_group])
def test_groups_with_integer_scales_have_the_bits_of_the_definition(native: Any, kind: str, in_features: int) -> None:
    """In each number of rows that tiles have, and where codes are unpacked for all rows; alone and with a gate."""
    if native.library.isa in ("sse4_2", "portable"):
        pytest.skip("rounds products of float32, too, without an instruction for both")
    torch.manual_seed(in_features)
    weight, x = quantized(kind, 4 * 32, in_features), torch.randn(70, in_features)
    x[1], x[2] = 1.0, -1.0  # the largest sums
    expected = sum_by_groups(x, weight)
    packed = native.prepare_quantized_linear(weight, torch.float32)
    gated = native.linear_gate(x[:8], packed, Activation.SILU)
    assert torch.equal(native.linear_gate(x, packed, Activation.SILU)[:8], gated)
    for rows in (1, 2, 3, 4, 5, 6, 7, 31, 32, 70):
        assert torch.equal(native.logits(x[:rows], packed), expected[:rows]), rows
    assert torch.equal(native.gate(expected[:8].contiguous(), Activation.SILU), gated)


@pytest.mark.parametrize("kind", [*DTYPES, *QUANTIZED], ids=str)
def test_segments_are_added_in_order(native: Any, kind: torch.dtype | str) -> None:
    """The first segment is so large that half of what the second has is lost next to it. Its own sums are exact."""
    weight, x = torch.zeros(33, 3 * K_SEGMENT), torch.zeros(9, 3 * K_SEGMENT)
    small = [K_SEGMENT, K_SEGMENT + 100, 3 * K_SEGMENT - 1]
    weight[:, 0], weight[:, small] = 1.0, torch.arange(33.0)[:, None]
    x[:, 0], x[:, small] = 127 * 2.0**25, 127.0  # which 8 bits have as it is
    if isinstance(kind, torch.dtype):
        if kind == torch.float16:  # its largest number is 65,504
            weight[:, 0], x[:, 0], x[:, small] = 2.0**15, 127 * 2.0**9, 127 / 2
        packed, x = native.prepare_linear(weight.to(kind)), x.to(kind)
    else:
        form, group = QUANTIZED[kind].form, QUANTIZED[kind].group
        if form.levels:
            pytest.skip("its codes are no integers")
        middle = 0 if form.offset is Offset.MINIMUM else form.middle
        largest = min(33, (1 << form.bits) - middle)
        weight = torch.where(weight < largest, weight, 0)[:, : 3 * K_SEGMENT]
        codes, scales = (weight + middle).to(torch.uint8), torch.ones(33, 3 * K_SEGMENT // group).half()
        offsets, units = None, None
        if form.sub_group:
            units = torch.stack([scales] * (2 if form.offset is Offset.MINIMUM else 1), dim=-1)
            scales = torch.ones(33, 3 * K_SEGMENT // form.sub_group, dtype=torch.uint8)
        if form.offset is Offset.MINIMUM:
            offsets = torch.zeros_like(scales)
        elif form.offset is Offset.ZERO_POINT:
            offsets = torch.full(scales.shape, middle, dtype=torch.uint8)
        coded = QuantizedWeight(form, codes, scales, offsets, 3 * K_SEGMENT, group, units=units)
        packed = native.prepare_quantized_linear(coded, torch.float32)
    first, second = x[0, 0].float() * weight[:, 0], x[0, -1].float() * weight[:, -1]
    expected = (first + 2 * second) + second
    assert (native.logits(x, packed) == expected).all()
    assert not torch.equal(expected, ((first + second) + second) + second), "or any order would do"


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, "Q8 of 64", "Q6_K of 256"], ids=str)
def test_bits_depend_on_nothing_but_the_row_on_1_to_64_threads(native: Any, kind: torch.dtype | str) -> None:
    """Random shapes: inputs that are no whole segments, few panels; the whole batch, parts of it and rows alone."""
    dtype = kind if isinstance(kind, torch.dtype) else torch.bfloat16
    generator = torch.Generator().manual_seed(3)

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for in_features in (K_SEGMENT - 1, K_SEGMENT + 30, 3 * K_SEGMENT + 517):
        weight = any_weight(native, kind, drawn(1, 200), in_features)
        x = torch.randn(drawn(70, 150), in_features, generator=generator).to(dtype)
        expected = native.logits(x, weight)
        for threads in (1, 2, 3, 5, 8, 17, 33, 64):
            ops = with_threads(native, threads)
            for _ in range(3):
                begin = drawn(0, len(x))
                end = begin + drawn(1, min(len(x) - begin, 1 << drawn(1, 8)) + 1)
                assert torch.equal(ops.logits(x[begin:end], weight), expected[begin:end]), (threads, begin, end)
            assert torch.equal(ops.logits(x, weight), expected), threads


@pytest.mark.parametrize("kind", [*DTYPES, *QUANTIZED], ids=str)
def test_a_few_rows_of_few_panels_are_divided_along_k_with_the_same_bits(native: Any, kind: torch.dtype | str) -> None:
    """Alone and with a gate, on more threads than there are panels, and on as many as there are segments."""
    torch.manual_seed(0)
    dtype = kind if isinstance(kind, torch.dtype) else torch.bfloat16
    weight = any_weight(native, kind, 2 * 64, 2 * K_SEGMENT + 100)
    assert planned(native, weight.record, 3) == (4, 3, 3)
    assert planned(native, weight.record, 4) == (4, 1, 4)  # nothing to gain
    assert planned(native, weight.record, 64) == (4, 3, 12)
    x = torch.randn(17, 2 * K_SEGMENT + 100).to(dtype) / 40
    expected, gated = native.logits(x, weight), native.linear_gate(x, weight, Activation.SILU)
    for threads, numbers in ((2, (1, 2, 15, 16)), (3, range(1, 18)), (5, (1, 7, 13)), (11, (1, 6)), (64, (1, 15))):
        ops = with_threads(native, threads)
        for rows in numbers:
            assert torch.equal(ops.logits(x[:rows], weight), expected[:rows]), (threads, rows)
            assert torch.equal(ops.linear_gate(x[:rows], weight, Activation.SILU), gated[:rows]), (threads, rows)


def test_threads_of_a_plan_are_no_more_than_there_is_work_for(native: Any) -> None:
    """The layers of people's models on many cores: panels (or segments of them) per thread."""
    for out_features, in_features, threads, expected in (
        (4096, 4096, 64, (128, 1, 64)),  # two panels each
        (4096, 4096, 48, (128, 1, 48)),  # three for the busiest, as with segments
        (4096, 14336, 48, (128, 7, 48)),
        (2048, 8192, 48, (64, 4, 48)),
        (2048, 8192, 128, (64, 4, 128)),
        (2048, 2048, 128, (64, 1, 64)),
        (32, 2048, 64, (1, 1, 1)),
        (128, 64, 64, (4, 1, 1)),  # too little to wake a thread for
        (576, 576, 2, (18, 1, 2)),
    ):
        record = PackedLinear(None, None, out_features, in_features)
        assert planned(native, record, threads) == expected, (out_features, in_features, threads)


def test_a_fused_activation_has_the_bits_of_its_parts(native: Any) -> None:
    """Of inputs of several segments, in each height of tiles and in more panels than a segment multiplies at a time."""
    torch.manual_seed(0)
    weight = native.prepare_linear(
        torch.randn(2 * 37 * 32, K_SEGMENT + 52).bfloat16(), torch.randn(2 * 37 * 32).bfloat16()
    )
    x = torch.randn(70, K_SEGMENT + 52).bfloat16() / 40
    for rows in (1, 2, 5, 6, 7, 13, 70):
        linear, ops = native.linear(x[:rows], weight), with_threads(native, 2)
        for kind in Activation:
            assert torch.equal(ops.linear_gate(x[:rows], weight, kind), native.gate(linear, kind)), (rows, kind)
            assert torch.equal(ops.linear_activate(x[:rows], weight, kind), native.activate(linear, kind)), (rows, kind)


@pytest.mark.parametrize("rows", [(40, 33, 1), (64, 32, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_are_packed_as_the_stack_of_them(native: Any, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    """Parts that share a panel, and parts that begin with one of their own; of bfloat16, a pair of columns is half."""
    parts, bias = [torch.randn(count, 131).to(dtype) for count in rows], torch.randn(sum(rows)).to(dtype)
    packed, expected = native.prepare_stacked(parts, bias), native.prepare_linear(torch.cat(parts), bias)
    assert torch.equal(packed.panels, expected.panels)
    x = torch.randn(3, 131).to(dtype)
    assert torch.equal(native.linear(x, packed), native.linear(x, expected))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", [*DTYPES, *QUANTIZED], ids=str)
def test_nan_stays_nan_and_affects_no_other_row(native: Any, kind: torch.dtype | str, bad: float) -> None:
    torch.manual_seed(0)
    weight = any_weight(native, kind, 96, 130)
    x = torch.randn(20, 130).to(kind if isinstance(kind, torch.dtype) else torch.bfloat16)
    clean = native.logits(x, weight)
    for at in (0, 15, 16, 31, 63, 64, 100, 127, 129):
        broken = x.clone()
        broken[7, at] = bad
        got = native.logits(broken, weight)
        assert not got[7].isfinite().any()
        got[7] = clean[7]
        assert torch.equal(got, clean)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantized_equals_its_definition(native: Any, kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    in_features, out_features = shape
    weight, bias = quantized(kind, out_features, in_features), torch.randn(out_features)
    x = torch.randn(9, in_features).to(dtype)
    group = weight.held_as.x_group
    codes, scales = quantize_rows(x, group)
    values = (codes.double().unflatten(1, (-1, group)) * scales.double().unsqueeze(-1)).flatten(1)
    expected = values[:, :in_features] @ weight.dequantize().double().T + bias
    got = native.logits(x, native.prepare_quantized_linear(weight, torch.float32, bias))
    assert (got - expected).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("byte", [0, 255])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_sums_of_the_smallest_and_largest_codes_do_not_overflow(native: Any, kind: str, byte: int) -> None:
    """Of a group, with inputs of one sign that all become 127 or -127: in each number of rows that tiles have."""
    weight = quantized(kind, 33, 192)
    weight = replace(weight, codes=torch.full_like(weight.codes, byte >> (8 - weight.form.bits)))
    x = torch.tensor([1.0, -1.0]).repeat(4)[:, None].expand(8, 192).contiguous()
    expected = x.double() @ weight.dequantize().double().T
    prepared = native.prepare_quantized_linear(weight, torch.float32)
    for rows in range(1, 9):
        got = native.logits(x[:rows], prepared)
        assert (got - expected[:rows]).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max()))


def test_zero_points_in_the_middle_give_the_bits_of_symmetric_codes(native: Any) -> None:
    torch.manual_seed(0)
    symmetric, x = quantized("Q4 of 32", 33, 130), torch.randn(20, 130).bfloat16()
    middle = replace(symmetric, form=Q4_ZERO, offsets=torch.full(symmetric.scales.shape, 8, dtype=torch.uint8))
    ours, theirs = (
        native.logits(x, native.prepare_quantized_linear(weight, torch.float32)) for weight in (middle, symmetric)
    )
    assert torch.equal(ours, theirs)


def test_scales_of_exponents_are_exact_and_exponents_of_scales_are_theirs() -> None:
    exponents = torch.arange(256, dtype=torch.uint8)
    scales = scales_of(exponents)
    assert scales.tolist() == [2.0 ** (exponent - 128) for exponent in range(256)]
    assert torch.equal(exponents_of(scales), exponents)


def test_quantize_keeps_values_within_half_a_step(on: DeviceUnderTest) -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 200).to(on.device)
    weight[3] = 0.0
    packed = quantize(weight)
    step = packed.scales.float().repeat_interleave(64, dim=1)[:, :200]
    assert bool(((packed.dequantize() - weight).abs() <= step * 0.5 + weight.abs() * 1e-3).all())
    assert bool((packed.dequantize()[3] == 0).all())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [*DTYPES, *QUANTIZED], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(native: Any, kind: torch.dtype | str, threads: int) -> None:
    """Every number of rows from 1 to 70, at shifting positions; and more rows than one block of the cache."""
    torch.manual_seed(0)
    ops = with_threads(native, 2) if threads == 2 else native
    dtype = torch.bfloat16 if isinstance(kind, str) else kind
    for in_features, out_features in ((576, 192), (131, 49)):
        weight = any_weight(native, kind, out_features, in_features)
        x = torch.randn(200, in_features).to(dtype)
        alone = torch.cat([ops.logits(row.unsqueeze(0), weight) for row in x])
        for rows in [*range(1, 71), 128, 200]:
            first = (rows * 7) % (201 - rows)
            assert torch.equal(ops.logits(x[first : first + rows], weight), alone[first : first + rows]), rows


@pytest.mark.parametrize("kind", [torch.bfloat16, "Q8 of 64", "Q4_K of 256", "Q4_ZERO of 32"], ids=str)
def test_bits_do_not_depend_on_threads_or_how_work_is_divided(native: Any, kind: torch.dtype | str) -> None:
    """Cuts that leave remainders of rows and of panels, for fewer and for more threads than there are pieces."""
    torch.manual_seed(0)
    for in_features, out_features in ((160, 32), (160, 17), (100, 300), (1536, 576)):
        weight = any_weight(native, kind, out_features, in_features)
        for rows in (15, 16, 31, 33, 50, 64, 65, 130, 700):
            x = torch.randn(rows, in_features).bfloat16()
            expected = native.logits(x, weight)
            assert expected.isfinite().all()
            for threads in (2, 3, 4, 7, 16):
                assert torch.equal(with_threads(native, threads).logits(x, weight), expected), (rows, threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_matrix_for_each_head(native: Any, reference: Any, dtype: torch.dtype) -> None:
    """Equal to the definition, with the same bits for a row alone and on any number of threads; heads may be a view."""
    whole = torch.randn(70, 5 * 24 + 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = native.select_heads(whole, 16, 5, 24)
    weight = torch.randn(5 * 64, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = reference.linear_by_head(x, reference.prepare_linear(weight))
    by_hand = torch.cat([x[:, head].float() @ weight[64 * head : 64 * (head + 1)].float().T for head in range(5)], 1)
    torch.testing.assert_close(want.float(), by_hand, atol=0.1, rtol=0.02)
    packed, library = native.prepare_linear(weight), TorchOps()
    torch.testing.assert_close(library.linear_by_head(x, library.prepare_linear(weight)), want, atol=0.1, rtol=0.02)
    got = native.linear_by_head(x, packed)
    torch.testing.assert_close(got, want, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=0.02)
    assert torch.equal(with_threads(native, 3).linear_by_head(x, packed), got)
    assert torch.equal(torch.cat([native.linear_by_head(row, packed) for row in x.split(1)]), got)


def test_a_head_whose_rows_are_no_whole_panels_is_refused(native: Any) -> None:
    x, weight = torch.randn(3, 2, 8), native.prepare_linear(torch.randn(2 * 48, 8))
    with pytest.raises(ValueError, match="48 rows per head; must be a multiple of 32"):
        native.linear_by_head(x, weight)
    assert native.linear_by_head(x[:, :1], native.prepare_linear(torch.randn(48, 8))).shape == (3, 48)


def test_rows_may_be_strided(native: Any) -> None:
    """x may be a slice of wider rows, at any offset."""
    torch.manual_seed(0)
    for kind in (*DTYPES, *QUANTIZED):
        dtype = torch.bfloat16 if isinstance(kind, str) else kind
        weight = any_weight(native, kind, 40, 64)
        for width, first in ((65, 1), (130, 3), (128, 64)):
            x = torch.randn(5, width).to(dtype)[:, first : first + 64]
            assert torch.equal(native.linear(x, weight), native.linear(x.contiguous(), weight))


def test_no_rows(native: Any) -> None:
    weight = native.prepare_linear(torch.randn(8, 16))
    assert native.linear(torch.empty(0, 16), weight).shape == (0, 8)


def test_weights_are_aligned_to_pages(native: Any) -> None:
    weight = native.prepare_linear(torch.randn(40, 16))
    assert isinstance(weight, PackedWeight)
    assert weight.panels.data_ptr() % 4096 == 0
    assert weight.panels.numel() == 64 * 16 * 4
