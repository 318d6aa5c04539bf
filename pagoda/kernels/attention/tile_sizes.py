"""Sizes of the tiles in which the Triton attention kernels compute, chosen so that they fit in registers and memory."""

import math
from dataclasses import dataclass, replace

import triton

LOG2_E = math.log2(math.e)
"""Kernels compute exp2: what a score is multiplied by."""

_STAGES_BYTES = 80 * 1024  # of shared memory, for K and V on their way: the smallest GPUs have 99 KiB per program


@dataclass(frozen=True, slots=True)
class Tiles:
    """vectors: query vectors of a tile.   positions: of the context, loaded at once.   warps: of a program.

    stages: how many chunks of the context are loaded ahead, the current one included.
    """

    vectors: int
    positions: int
    warps: int
    stages: int


def prefill_tiles(head_dim: int, group: int, itemsize: int, is_crowded: bool = False) -> Tiles:
    """Return the tiles of rows with many queries. A tile has at least the `group` heads of one token.

    is_crowded: registers are scarce, because two results are merged or pages of 8-bit floats are converted.
    """
    vectors = 64 if head_dim <= 128 else 32
    if itemsize == 4:
        vectors //= 2  # see _tiles
    tiles = _tiles(max(vectors, triton.next_power_of_2(group)), head_dim, itemsize)
    if not is_crowded:
        return tiles
    return replace(tiles, positions=min(tiles.positions, 32), warps=4 if head_dim <= 128 else 8)


def decode_tiles(head_dim: int, group: int, itemsize: int) -> Tiles:
    """Return the tiles of rows with few queries: as small as a matrix product may be."""
    return _tiles(max(16, triton.next_power_of_2(group)), head_dim, itemsize)


def _tiles(vectors: int, head_dim: int, itemsize: int) -> Tiles:
    positions = 64 if head_dim <= 128 else 32
    if itemsize == 4:
        positions = 16  # tensor cores would round float32: products are computed in registers, which hold no more
    stage_bytes = 2 * positions * padded_dim(head_dim) * itemsize
    return Tiles(vectors, positions, 4, min(3, max(1, _STAGES_BYTES // stage_bytes)))


def padded_dim(head_dim: int) -> int:
    """Return the width of a tile for heads of this size."""
    return max(16, triton.next_power_of_2(head_dim))
