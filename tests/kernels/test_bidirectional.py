"""Bidirectional attention against its reference, over ugly shapes; and, natively, the same bits in any batch."""

from dataclasses import replace

import pytest
import torch

from pagoda.base.errors import ConfigError, InvariantBroken
from pagoda.kernels.batch import AttentionMetadata
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps
from tests.kernels.paged import Geometry, Sequence

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 3e-5, BF16: 2e-2, F16: 3e-3}

# heads, KV heads, head size, window, softcap
SHAPES = [
    (12, 12, 32, 0, 0.0),
    (9, 3, 64, 65, 0.0),
    (8, 1, 80, 5, 0.0),
    (2, 1, 256, 257, 30.0),
    (6, 2, 48, 0, 50.0),
    (5, 1, 112, 1, 0.0),
    (64, 1, 16, 2**31 - 1, 0.0),
    (4, 4, 72, 0, 0.0),
    (6, 2, 19, 40, 50.0),
]
LENGTHS = (130, 1, 37, 331, 16, 64)


def rows_of(shape: tuple, lengths: tuple[int, ...], dtype: torch.dtype) -> list[Sequence]:
    geometry = Geometry(*shape[:3], dtype=dtype)
    return [Sequence.random(geometry, length, seed) for seed, length in enumerate(lengths)]


def metadata_of(rows: list[Sequence]) -> AttentionMetadata:
    lengths = torch.tensor([len(row.q) for row in rows], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    longest = int(lengths.max())
    no_blocks = torch.empty(len(rows), 0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
    return AttentionMetadata(starts, lengths, *no_blocks, 16, longest, longest)


def attend(ops: Ops, shape: tuple, rows: list[Sequence], bias: torch.Tensor | None = None) -> torch.Tensor:
    q, k, v = (torch.cat([getattr(row, name) for row in rows]) for name in "qkv")
    return ops.bidirectional_attention(q, k, v, metadata_of(rows), 0.1, *shape[3:], bias)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_reference(
    fast: Ops, reference: ReferenceOps, shape: tuple, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.kernels.attention.library.CHUNK_SCORES", 9000)  # several chunks of queries
    rows = rows_of(shape, LENGTHS, dtype)
    got, want = attend(fast, shape, rows), attend(reference, shape, rows)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(12, 12, 32, 0, 0.0), (9, 3, 64, 65, 0.0), (6, 2, 19, 40, 50.0)], ids=str)
def test_a_bias_by_distance_matches_the_reference(
    fast: Ops, reference: ReferenceOps, shape: tuple, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.kernels.attention.library.CHUNK_SCORES", 9000)
    rows = rows_of(shape, LENGTHS, dtype)
    bias = 2 * torch.randn(shape[0], 101, generator=torch.Generator().manual_seed(6))
    got, want = attend(fast, shape, rows, bias), attend(reference, shape, rows, bias)
    torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert (want - attend(reference, shape, rows)).abs().max() > 0.05
    assert (want - attend(reference, shape, rows, bias.flip(1))).abs().max() > 0.05  # before and after differ


def test_the_reference_sees_both_ways(reference: ReferenceOps) -> None:
    """Against torch's own attention with the mask written out."""
    shape = (4, 2, 32, 7, 0.0)
    (row,) = rows_of(shape, (40,), F32)
    at = torch.arange(40)
    q, k, v = (x.transpose(0, 1) for x in (row.q, row.k.repeat_interleave(2, 1), row.v.repeat_interleave(2, 1)))
    mask = (at.unsqueeze(1) - at).abs() < 7
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.1).transpose(0, 1).flatten(1)
    torch.testing.assert_close(attend(reference, shape, [row]), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_depend_on_the_row_alone(native: NativeOps, shape: tuple, dtype: torch.dtype) -> None:
    rows = rows_of(shape, (*LENGTHS, 700), dtype)
    alone = [attend(native, shape, [row]) for row in rows]
    for threads, order in ((1, (3, 0, 1)), (2, (6, 5, 4, 3, 2, 1, 0)), (4, (6,)), (3, (2, 2, 6, 1))):
        ops = NativeOps(native.library, threads)
        got = attend(ops, shape, [rows[i] for i in order]).split([len(rows[i].q) for i in order])
        bits = torch.int32 if dtype == F32 else torch.int16  # -0 is not +0
        for i, part in zip(order, got, strict=True):
            assert torch.equal(part.view(bits), alone[i].view(bits))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_affect_no_other_row(fast: Ops, bad: float) -> None:
    shape = (4, 2, 64, 0, 0.0)
    rows = rows_of(shape, (19, 40, 7), BF16)
    clean = attend(fast, shape, rows)
    rows[1].v[17, 1, 5] = bad
    rows[1].k[3] = torch.nan
    got = attend(fast, shape, rows)
    assert not got[19:59].isfinite().all()
    assert torch.equal(got[:19], clean[:19])
    assert torch.equal(got[59:], clean[59:])


def test_a_chunk_of_a_text_is_refused(native: NativeOps) -> None:
    """Its other tokens are in no cache."""
    shape = (4, 2, 32, 0, 0.0)
    rows = rows_of(shape, (9, 11), F32)
    q, k, v = (torch.cat([getattr(row, name) for row in rows]) for name in "qkv")
    metadata = metadata_of(rows)
    for broken, said in (
        (replace(metadata, seq_lens=metadata.seq_lens + 3), "row 0: seq_lens must be the row's queries"),
        (replace(metadata, query_start=metadata.query_start - 1), "query_start"),
        (metadata_of(rows[:1]), "query_start"),
    ):
        with pytest.raises(InvariantBroken, match=said):
            native.bidirectional_attention(q, k, v, broken, 0.1)


def test_heads_that_the_native_kernels_cannot_hold_are_refused(native: NativeOps) -> None:
    rows = rows_of((2, 1, 528), (3,), F32)
    with pytest.raises(ConfigError, match="not 528 and 16; choose kernels='torch'"):
        attend(native, (2, 1, 528, 0, 0.0), rows)
    (row,) = rows_of((3, 2, 32), (3,), F32)
    with pytest.raises(ValueError, match="do not fit those of k"):
        attend(native, (3, 2, 32, 0, 0.0), [row])
