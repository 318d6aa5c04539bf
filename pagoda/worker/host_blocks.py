"""KV blocks in host memory.

All that a block has there, in all slots, is one piece: a block moves in one copy, neighbours in one for all.
"""

import numpy as np
import torch

from pagoda.kernels.kv_cache.device_blocks import DeviceBlocks
from pagoda.worker.devices.streams import Streams


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
