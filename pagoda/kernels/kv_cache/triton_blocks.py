"""DeviceBlocks in Triton: one launch moves blocks in all planes of all layers."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from pagoda.kernels.kv_cache.device_blocks import DeviceBlocks
from pagoda.kernels.triton_support import jit

_MOST_WORDS = 1024  # of one program


@jit
def _move_blocks(
    planes, widths, begins, sources, targets, blocks, words,
    FROM_PLANES: tl.constexpr, TO_PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per block, plane and piece of it. blocks: [k, words], or any tensor of words if it is not used."""
    move = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    width = tl.load(widths + plane)
    pages = tl.load(planes + plane).to(blocks.dtype)
    piece = blocks + move * words + tl.load(begins + plane)
    source, target = piece, piece
    if FROM_PLANES:
        source = pages + tl.load(sources + move) * width
    if TO_PLANES:
        target = pages + tl.load(targets + move) * width
    tl.store(target + at, tl.load(source + at, mask=at < width), mask=at < width)


class TritonDeviceBlocks(DeviceBlocks):
    """See DeviceBlocks."""

    def __init__(self, planes: Sequence[torch.Tensor]) -> None:
        super().__init__(planes)
        if not self._planes:
            return
        widths = [plane.shape[1] for plane in self._planes]
        begins = [end - width for end, width in zip(self._ends, widths, strict=True)]
        addresses = [plane.data_ptr() for plane in self._planes]
        table = torch.tensor([addresses, widths, begins], dtype=torch.int64, device=self._planes[0].device)
        self._table = table.unbind()
        self._piece = min(_MOST_WORDS, triton.next_power_of_2(max(widths)))
        self._num_pieces = triton.cdiv(max(widths), self._piece)

    def read(self, ids: np.ndarray) -> torch.Tensor:
        index = self._index(ids)
        blocks = torch.empty((len(ids), self.words), dtype=self.word, device=index.device)
        self._move(index, index, blocks, from_planes=True, to_planes=False)
        return blocks

    def write(self, ids: np.ndarray, blocks: torch.Tensor) -> None:
        index = self._index(ids)
        self._move(index, index, blocks, from_planes=False, to_planes=True)

    def copy(self, pairs: np.ndarray) -> None:
        if not self._planes:
            return
        if np.isin(pairs[:, 0], pairs[:, 1]).any():
            # Programs run in any order: one could write a block before another has read it.
            self.write(pairs[:, 1], self.read(pairs[:, 0]))
            return
        index = self._index(np.ascontiguousarray(pairs.T))
        self._move(index[0], index[1], self._planes[0], from_planes=True, to_planes=True)

    def _move(
        self, sources: torch.Tensor, targets: torch.Tensor, blocks: torch.Tensor, from_planes: bool, to_planes: bool
    ) -> None:
        if len(sources):
            _move_blocks[(len(sources), len(self._planes), self._num_pieces)](
                *self._table, sources, targets, blocks, self.words, from_planes, to_planes, self._piece
            )
