"""DeviceBlocks: whole blocks of the KV cache, in all planes at once. The definition, in torch's own operations."""

from collections.abc import Sequence

import numpy as np
import torch

from pagoda.kernels.transfer import to_device

_WORDS = (torch.int64, torch.int32, torch.int16)


class DeviceBlocks:
    """The blocks of a device. `words`: of a block, in all planes."""

    def __init__(self, planes: Sequence[torch.Tensor]) -> None:
        """planes: [num_blocks, elements per block] each, contiguous; they stay where they are."""
        self.word = _widest_word(planes)
        self._planes = [plane.view(self.word) for plane in planes]
        self._ends = np.cumsum([plane.shape[1] for plane in self._planes]).tolist()
        self.words = self._ends[-1] if self._ends else 0

    def read(self, ids: np.ndarray) -> torch.Tensor:
        """Return a copy of blocks `ids` (int32 [k]): [k, words]."""
        index = self._index(ids)
        blocks = torch.empty((len(ids), self.words), dtype=self.word, device=index.device)
        for plane, end in zip(self._planes, self._ends, strict=True):
            blocks[:, end - plane.shape[1] : end] = plane.index_select(0, index)
        return blocks

    def write(self, ids: np.ndarray, blocks: torch.Tensor) -> None:
        """Set blocks `ids` to what `read` returned for others."""
        index = self._index(ids)
        for plane, end in zip(self._planes, self._ends, strict=True):
            plane.index_copy_(0, index, blocks[:, end - plane.shape[1] : end])

    def copy(self, pairs: np.ndarray) -> None:
        """Copy blocks pairs[:, 0] to pairs[:, 1] (int32 [k, 2]); all are read before any is written."""
        if not self._planes:
            return
        index = self._index(np.ascontiguousarray(pairs.T))
        for plane in self._planes:
            plane.index_copy_(0, index[1], plane.index_select(0, index[0]))

    def _index(self, ids: np.ndarray) -> torch.Tensor:
        return to_device([ids.astype(np.int64)], self._planes[0].device)[0]


def _widest_word(planes: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the widest integer that divides the blocks of all planes: indexing copies one at a time."""
    for word in _WORDS:
        if all(plane.shape[1] * plane.dtype.itemsize % word.itemsize == 0 for plane in planes):
            return word
    return torch.uint8
