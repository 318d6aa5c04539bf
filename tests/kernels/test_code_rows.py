"""Codes packed straight from the file of an AWQ, GPTQ or compressed-tensors checkpoint, against those that are read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda.kernels.linear.packed import PackedWeight
from pagoda.kernels.linear.quantize import BlockWeight, codes_of, stack
from pagoda.kernels.native_ops import NativeOps
from pagoda.loading.pieces import Region
from pagoda.loading.quantization import AWQ, BYTES, GPTQ, PACKED, PackedFormat
from pagoda.loading.weights import PackedWeights
from tests.loading.test_packed_weights import GENERATOR, of_one_scale, opened, scales, signed, words

HEADS = (0, 4, 1, 5, 2, 6, 3, 7)
CPU = torch.device("cpu")


def stored_as(stored: PackedFormat, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Return random tensors of a matrix; zero points of a symmetric one are the middle."""
    layout, per_word, middle = stored.layout, 32 // stored.bits, 1 << (stored.bits - 1)
    groups = -(-columns // (stored.group or columns))
    group_of = torch.arange(columns) // (stored.group or columns)
    if stored.ordered:
        group_of = group_of[torch.randperm(columns, generator=GENERATOR)]
    if layout is BYTES:
        tensors = {"weight": signed(rows, columns), "weight_scale": scales(rows, groups)}
        return tensors if stored.symmetric else tensors | {"weight_zero_point": signed(rows, groups)}
    if layout is PACKED:
        tensors = {"weight_packed": words(rows, columns // per_word), "weight_scale": scales(rows, groups)}
        tensors |= {} if stored.symmetric else {"weight_zero_point": words(-(-rows // per_word), groups)}
        return tensors | ({"weight_g_idx": group_of} if stored.ordered else {})
    zeros = words(groups, rows // per_word)
    if stored.symmetric:
        same = torch.full((groups, rows // per_word * 4), (middle - stored.stored_zero) * (17 if per_word == 8 else 1))
        zeros = same.to(torch.uint8).view(torch.int32)
    shape = (columns, rows // per_word) if layout is AWQ else (columns // per_word, rows)
    tensors = {"qweight": words(*shape), "qzeros": zeros, "scales": scales(groups, rows)}
    return tensors | ({} if layout is AWQ else {"g_idx": group_of.int()})


def assert_packed_alike(native: Any, weight: Any) -> PackedWeight:
    assert isinstance(weight, BlockWeight)
    expected = native.prepare_quantized_linear(codes_of(weight), torch.bfloat16)
    for threads in (1, 3):
        packed = NativeOps(native.library, threads).prepare_quantized_linear(weight, torch.bfloat16)
        assert torch.equal(packed.panels, expected.panels)
    assert (packed.input_order is None) == (expected.input_order is None)
    assert packed.input_order is None or torch.equal(packed.input_order, expected.input_order)
    return packed


GPTQ_1 = PackedFormat("gptq", GPTQ, 128, False, stored_zero=1)
COMPRESSED = PackedFormat("compressed-tensors", PACKED, 128, False)
FORMATS = {
    "awq": PackedFormat("awq", AWQ, 128, False),
    "awq, symmetric": PackedFormat("awq", AWQ, 128, True),
    "gptq": GPTQ_1,
    "gptq, symmetric": replace(GPTQ_1, symmetric=True),
    "gptq of version 2, in the order of activations": replace(GPTQ_1, stored_zero=0, ordered=True),
    "gptq of 8 bits": replace(GPTQ_1, bits=8),
    "gptq of 8 bits, symmetric, in the order of activations": replace(GPTQ_1, bits=8, symmetric=True, ordered=True),
    "w4a16": replace(COMPRESSED, symmetric=True),
    "w4a16, asymmetric": COMPRESSED,
    "w4a16, in the order of activations": replace(COMPRESSED, ordered=True),
    "w8a16": replace(COMPRESSED, bits=8),
    "bytes": replace(COMPRESSED, layout=BYTES, bits=8, symmetric=True),
    "bytes, asymmetric": replace(COMPRESSED, layout=BYTES, bits=8),
}


@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("kind", FORMATS)
def test_shares_of_rows_and_columns(native: Any, kind: str, group: int | None, tmp_path: Path) -> None:
    """Rows that begin within a word and end within a panel, whole or as heads are reordered; columns of a rank."""
    if group is None and FORMATS[kind].ordered:
        group = 96  # does not divide the columns
    stored = replace(FORMATS[kind], group=group)
    weights = opened(tmp_path, stored, stored_as(stored, 200, 320))
    some = range(64, 256) if group in (32, 64) or stored.ordered or group is None else range(128, 256)
    for rows in (range(200), range(13, 150), range(64, 65)):
        for columns in (range(320), some):
            assert_packed_alike(native, weights.read_codes("layer.weight", Region(None, rows, columns)))
    region = Region(None, range(16, 112), range(320))
    assert_packed_alike(native, weights.read_codes("layer.weight", region, HEADS))


@pytest.mark.parametrize("columns", [8, 40, 200])
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_a_few_columns(native: Any, kind: str, columns: int, tmp_path: Path) -> None:
    stored = replace(FORMATS[kind], group=128 if FORMATS[kind].ordered else None)
    weights = opened(tmp_path, stored, stored_as(stored, 40, columns))
    assert_packed_alike(native, weights.read_codes("layer.weight", Region(None, range(40), range(columns))))


@pytest.mark.parametrize("columns", [1, 3, 63, 66])
@pytest.mark.parametrize("symmetric", [True, False])
def test_bytes_end_anywhere(native: Any, symmetric: bool, columns: int, tmp_path: Path) -> None:
    stored = PackedFormat("compressed-tensors", BYTES, None, symmetric, 8)
    weights = opened(tmp_path, stored, stored_as(stored, 37, columns))
    assert_packed_alike(native, weights.read_codes("layer.weight", Region(None, range(37), range(columns))))


@pytest.mark.parametrize(("layout", "bits"), [("bytes", 8), ("words", 4), ("words", 8)])
def test_a_scale_and_a_zero_point_of_the_whole_matrix(native: Any, layout: str, bits: int, tmp_path: Path) -> None:
    weights = opened(tmp_path, *of_one_scale(layout, bits))
    assert_packed_alike(native, weights.read_codes("layer.weight", Region(None, range(16), range(256))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scales_are_rounded_to_float16(native: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = stored_as(GPTQ_1, 40, 256)
    tensors["scales"] = torch.rand(tensors["scales"].shape, generator=GENERATOR).to(dtype)
    weights = opened(tmp_path, GPTQ_1, tensors)
    assert_packed_alike(native, weights.read_codes("layer.weight", Region(None, range(40), range(256))))


@pytest.mark.parametrize("kind", FORMATS)
def test_parts_of_a_fused_matrix_share_panels(native: Any, reference: Any, kind: str, tmp_path: Path) -> None:
    """Those in one order of activations; another order is a weight of its own."""
    stored, parts = FORMATS[kind], list[Any]()
    tensors = [stored_as(stored, rows, 256) for rows in (40, 8, 72)]
    order = "g_idx" if stored.layout is GPTQ else "weight_g_idx"
    if stored.ordered:
        tensors[1][order] = tensors[0][order]
    for number, of in enumerate(tensors):
        folder = tmp_path / str(number)
        folder.mkdir()
        weights: PackedWeights = opened(folder, stored, of)
        rows = range(len(of["weight_scale"]) if "weight_scale" in of else of["scales"].shape[1])
        parts.append(weights.read_codes("layer.weight", Region(None, rows, range(256))))
    if stored.ordered:
        assert not isinstance(stack(parts, CPU), BlockWeight)
    x, bias = torch.randn(3, 256), torch.randn(120)
    got = native.linear(x, native.prepare_quantized_linear(stack(parts, CPU), torch.float32, bias))
    values = torch.cat([codes_of(part).dequantize() for part in parts])
    want = reference.linear(x, reference.prepare_linear(values, bias))
    torch.testing.assert_close(got, want, rtol=0, atol=0.015 * float(want.abs().max()))
    assert_packed_alike(native, stack(parts[:2], CPU))
