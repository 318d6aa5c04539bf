"""The table of adapters that the native kernels read: weights in the panels of linear layers, slots as structs."""

from collections.abc import Sequence
from ctypes import addressof

import torch

from pagoda.kernels.linear.packed import PackedLinears, SeparateTensors
from pagoda.kernels.low_rank.table import LowRankPiece, check_pieces
from pagoda.kernels.native.abi import LowRankPiece as PieceStruct
from pagoda.kernels.native.abi import LowRankSlot, LowRankSlots
from pagoda.kernels.native.dtypes import DTYPE_CODES
from pagoda.kernels.native.library import NativeLibrary


class PackedLowRank:
    """See FillableLowRank. Slots change between steps, never while a kernel runs; their struct stays where it is."""

    def __init__(
        self,
        library: NativeLibrary,
        threads: int,
        num_slots: int,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
    ) -> None:
        self.shape = (num_slots, out_features, in_features)
        self.dtype = dtype
        self.num_moves = 0
        self._linears = PackedLinears(library, threads, SeparateTensors())
        self._slots = (LowRankSlot * num_slots)()
        self._record = LowRankSlots(addressof(self._slots), num_slots, DTYPE_CODES[dtype])
        self._kept: dict[int, list[object]] = {}  # what a slot's struct points to

    @property
    def address(self) -> int:
        return addressof(self._record)

    def fill(self, slot: int, pieces: Sequence[LowRankPiece]) -> None:
        check_pieces(self.shape, slot, pieces)
        self.clear(slot)
        if not pieces:
            return
        pieces = [piece.to(self.dtype) for piece in pieces]
        # The inputs of b begin at even elements, so that the kernels can read pairs of bfloat16.
        stacked = [torch.nn.functional.pad(piece.a, (0, 0, 0, piece.rank % 2)) for piece in pieces]
        a = self._linears.prepare(torch.cat(stacked))
        records = (PieceStruct * len(pieces))()
        kept: list[object] = [a, records]
        first_rank = 0
        for record, piece, rows in zip(records, pieces, stacked, strict=True):
            b = self._linears.prepare(piece.b, piece.bias)
            record.b, record.first_rank, record.first_row = b.address, first_rank, piece.first_row
            first_rank += len(rows)
            kept.append(b)
        self._kept[slot] = kept
        record = self._slots[slot]
        record.a, record.pieces, record.count = a.address, addressof(records), len(pieces)

    def clear(self, slot: int) -> None:
        record = self._slots[slot]
        record.a, record.pieces, record.count = None, None, 0
        self._kept.pop(slot, None)
