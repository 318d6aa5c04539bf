"""The low-rank ops: each implementation against the reference, and rows that do not depend on their neighbours."""

import pytest
import torch

from pagoda.base.errors import InvariantBroken
from pagoda.kernels.low_rank.table import FillableLowRank, LowRankPiece
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps
from tests.device_under_test import DeviceUnderTest

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 1e-5, BF16: 2e-2, F16: 2e-3}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def piece(rank: int, columns: int, rows: int, first_row: int = 0, seed: int = 0, bias: bool = False) -> LowRankPiece:
    a, b = draw(rank, columns, seed=seed) / columns**0.5, draw(rows, rank, seed=seed + 1) / rank**0.5
    return LowRankPiece(a, b, first_row, draw(rows, seed=seed + 2) if bias else None)


def table_of(
    ops: Ops, slots: dict[int, list[LowRankPiece]], rows: int, columns: int, dtype: torch.dtype
) -> FillableLowRank:
    table = ops.make_low_rank_table(6, rows, columns, dtype)
    for slot, pieces in slots.items():
        table.fill(slot, pieces)
    return table


def mixed_slots(rows: int, columns: int) -> dict[int, list[LowRankPiece]]:
    """Ranks from 1 to 256, in one piece, in three with a gap between them, and in the last row; slot 4 is empty"""
    third = max(1, rows // 3)
    parts = [piece(rank, columns, third, at * third, seed=10 * rank) for at, rank in enumerate((4, 33)) if at < rows]
    if rows > 2:
        parts.append(piece(16, columns, 1, rows - 1, seed=7, bias=True))
    return {
        1: [piece(256, columns, rows, seed=3)],
        2: parts if rows > 2 else parts[:1],
        3: [piece(1, columns, 1, rows - 1, seed=5)],
        5: [piece(5, columns, rows, seed=9, bias=True)],
    }


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "columns", "rows"), [(1, 64, 96), (2, 33, 1), (37, 96, 161), (130, 31, 300), (7, 576, 65), (0, 16, 16)]
)
def test_equals_the_reference(
    fast: Ops, reference: ReferenceOps, tokens: int, columns: int, rows: int, dtype: torch.dtype
) -> None:
    slots = mixed_slots(rows, columns)
    adapters = torch.randint(0, 6, (tokens,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    x = draw(tokens, columns + 3, seed=2).to(dtype)[:, :columns]  # rows with a gap between them
    for y_dtype in {dtype, F32}:
        before = draw(tokens, rows, seed=4).to(y_dtype)
        got, want = before.clone(), before.clone()
        fast.add_low_rank(got, x, adapters, table_of(fast, slots, rows, columns, dtype))
        reference.add_low_rank(want, x, adapters, table_of(reference, slots, rows, columns, dtype))
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        untouched = (adapters == 0) | (adapters == 4)
        assert torch.equal(got[untouched], before[untouched])


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("vocab", [1, 50, 257])
def test_of_an_embedding_equals_the_reference(
    fast: Ops, reference: ReferenceOps, vocab: int, dtype: torch.dtype
) -> None:
    slots = {slot: [piece(rank, vocab, 40, seed=slot)] for slot, rank in ((1, 3), (2, 64), (5, 33))}
    ids = torch.randint(0, vocab, (29,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    ids[3] = vocab  # an id that the table does not have
    adapters = torch.tensor([0, 1, 2, 5, 3] * 5 + [2, 2, 1, 1], dtype=torch.int32)
    before = draw(29, 40, seed=4).to(dtype)
    got, want = before.clone(), before.clone()
    fast.add_low_rank_embedding(got, ids, adapters, table_of(fast, slots, 40, vocab, dtype))
    reference.add_low_rank_embedding(want, ids, adapters, table_of(reference, slots, 40, vocab, dtype))
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(got[3], before[3])


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_a_row_has_the_bits_it_has_alone(native: NativeOps, dtype: torch.dtype) -> None:
    many = NativeOps(native.library, threads=3)
    rows, columns, tokens = 300, 131, 203
    slots = mixed_slots(rows, columns)
    adapters = torch.randint(0, 6, (tokens,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    adapters[40:160] = 2  # adjacent rows, in more than one block
    x, before = draw(tokens, columns).to(dtype), draw(tokens, rows, seed=1).to(dtype)
    table = table_of(native, slots, rows, columns, dtype)
    together = before.clone()
    many.add_low_rank(together, x, adapters, table)
    for row in range(0, tokens, 7):
        alone = before[row : row + 1].clone()
        native.add_low_rank(alone, x[row : row + 1], adapters[row : row + 1], table)
        assert torch.equal(alone[0], together[row])


def test_a_slot_is_filled_again_and_cleared(fast: Ops, reference: ReferenceOps) -> None:
    x, adapters = draw(3, 20), torch.tensor([1, 2, 1], dtype=torch.int32)
    table = table_of(fast, {1: [piece(8, 20, 30)], 2: [piece(4, 20, 30)]}, 30, 20, F32)
    table.fill(1, [piece(3, 20, 10, 20, seed=6)])
    table.clear(2)
    got, want = torch.zeros(3, 30), torch.zeros(3, 30)
    fast.add_low_rank(got, x, adapters, table)
    reference.add_low_rank(want, x, adapters, table_of(reference, {1: [piece(3, 20, 10, 20, seed=6)]}, 30, 20, F32))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert not got[1].any()


def test_refuses_what_does_not_fit(fast: Ops, reference: ReferenceOps) -> None:
    for ops in (fast, reference):
        table = ops.make_low_rank_table(3, 30, 20, F32)
        for slot, pieces, words in (
            (0, [piece(4, 20, 30)], "slot 0 is not one of 1 .. 2"),
            (3, [piece(4, 20, 30)], "slot 3 is not one of 1 .. 2"),
            (1, [piece(4, 21, 30)], "do not fit a layer [30, 20]"),
            (1, [piece(4, 20, 30, 1)], "do not fit a layer [30, 20]"),
            (1, [piece(4, 20, 10), piece(4, 20, 10, 9)], "for the same outputs"),
        ):
            with pytest.raises(ValueError, match=words.replace("[", r"\[").replace("]", r"\]")):
                table.fill(slot, pieces)


def test_refuses_adapters_that_the_table_does_not_have(
    fast: Ops, reference: ReferenceOps, device_under_test: DeviceUnderTest
) -> None:
    device_under_test.must_check_indices()
    for ops in (fast, reference):
        table = ops.make_low_rank_table(3, 30, 20, F32)
        with pytest.raises(InvariantBroken, match="element 1 is 3, allowed are 0 to 2"):
            ops.add_low_rank(torch.zeros(2, 30), torch.zeros(2, 20), torch.tensor([0, 3], dtype=torch.int32), table)
