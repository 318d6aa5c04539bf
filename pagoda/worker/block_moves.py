"""Whole KV blocks, moved on a device and between it and host memory.

In host memory all that a block has, in all slots, is one piece: a block moves in one copy, neighbours in one for all.
"""

from collections.abc import Sequence

import numpy as np
import torch

from pagoda.kernels.transfer import to_device
from pagoda.worker.devices.streams import Streams

_WORDS = (torch.int64, torch.int32, torch.int16)


class DeviceBlocks:
    """The blocks of a device. `words`: in all planes."""

    def __init__(self, planes: Sequence[torch.Tensor]) -> None:
        """planes: [num_blocks, elements per block] each."""
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
        """Copy blocks pairs[:, 0] to pairs[:, 1]; per plane, all are read before any is written."""
        if not self._planes:
            return
        index = self._index(np.ascontiguousarray(pairs.T))
        for plane in self._planes:
            plane.index_copy_(0, index[1], plane.index_select(0, index[0]))

    def _index(self, ids: np.ndarray) -> torch.Tensor:
        return to_device([ids.astype(np.int64)], self._planes[0].device)[0]


class HostBlocks:
    """Blocks of a device that are kept in host memory."""

    def __init__(self, blocks: DeviceBlocks, num_blocks: int, streams: Streams) -> None:
        memory = streams.new_host_memory(num_blocks * blocks.words * blocks.word.itemsize)
        self._memory = memory.view(blocks.word).view(num_blocks, blocks.words)
        self._streams = streams

    def store(self, blocks: torch.Tensor, ids: np.ndarray) -> None:
        """Begin to keep blocks [k, words] as `ids` (int32 [k])."""
        self._streams.store(blocks, self._rows(ids))

    def load(self, ids: np.ndarray) -> torch.Tensor:
        """Return blocks `ids` on the device: [k, words]."""
        return self._streams.load(self._rows(ids))

    def _rows(self, ids: np.ndarray) -> list[torch.Tensor]:
        """Return the memory of blocks `ids`, in pieces of consecutive ids."""
        begins = np.concatenate([[0], np.flatnonzero(np.diff(ids) != 1) + 1, [len(ids)]])
        first, count = ids[begins[:-1]].tolist(), np.diff(begins).tolist()
        return [self._memory[start : start + num] for start, num in zip(first, count, strict=True)]


def _widest_word(planes: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the widest integer that divides the blocks of all planes: indexing copies one at a time."""
    for word in _WORDS:
        if all(plane.shape[1] * plane.dtype.itemsize % word.itemsize == 0 for plane in planes):
            return word
    return torch.uint8
