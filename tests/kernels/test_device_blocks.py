"""Moving whole blocks in all planes: Triton's single launch against the definition."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pagoda.kernels.kv_cache.device_blocks import DeviceBlocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS = 9
# Elements per block of each plane, by dtype: K and V of two layers, 8-bit pages with their scales, odd sizes.
POOLS = {
    "bf16": [(torch.bfloat16, 96)] * 4,
    "fp32, layers of other shapes": [(torch.float32, 12), (torch.float32, 6), (torch.float32, 2_500)],
    "int8 with scales": [(torch.int8, 64), (torch.int8, 48), (torch.float32, 3), (torch.float32, 3)],
    "fp8 with scales": [(torch.float8_e4m3fn, 40), (torch.float8_e4m3fn, 40), (torch.float32, 5)],
    "words of two bytes": [(torch.bfloat16, 3), (torch.bfloat16, 1_031)],
    "bytes": [(torch.int8, 5), (torch.int8, 1)],
}
PAIRS = {
    "one": [(3, 5)],
    "many": [(1, 2), (3, 4), (1, 8), (5, 6), (0, 7)],
    "a swap of two": [(1, 2), (2, 1)],
    "a chain": [(1, 2), (2, 3), (3, 4), (8, 1)],
    "onto itself": [(4, 4), (1, 2)],
    "none": [],
}


def pool(spec: Sequence[tuple[torch.dtype, int]], seed: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [
        torch.from_numpy(rng.integers(0, 256, (NUM_BLOCKS, elements * dtype.itemsize), np.uint8)).to(DEVICE).view(dtype)
        for dtype, elements in spec
    ]


def as_bytes(planes: Sequence[torch.Tensor]) -> list[list[int]]:
    return [plane.view(torch.uint8).flatten().tolist() for plane in planes]


def ids(*of: int) -> np.ndarray:
    return np.array(of, np.int32)


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("spec", POOLS.values(), ids=POOLS)
def test_copies(triton_ops: Any, spec: list[tuple[torch.dtype, int]], pairs: list[tuple[int, int]]) -> None:
    """All blocks are read before any is written, and nothing else changes."""
    before, ours, theirs = (pool(spec, 1) for _ in range(3))
    made = np.array(pairs, np.int32).reshape(-1, 2)
    triton_ops.make_device_blocks(ours).copy(made)
    DeviceBlocks(theirs).copy(made)
    assert as_bytes(ours) == as_bytes(theirs)
    moved = {target: source for source, target in pairs}
    for plane, old in zip(ours, before, strict=True):
        for block in range(NUM_BLOCKS):
            assert as_bytes([plane[block]]) == as_bytes([old[moved.get(block, block)]])


@pytest.mark.parametrize("spec", POOLS.values(), ids=POOLS)
def test_reads_and_writes(triton_ops: Any, spec: list[tuple[torch.dtype, int]]) -> None:
    ours, theirs, others = pool(spec, 1), pool(spec, 1), pool(spec, 2)
    mine, definition = triton_ops.make_device_blocks(ours), DeviceBlocks(theirs)
    assert (mine.word, mine.words) == (definition.word, definition.words)
    for which in (ids(3), ids(8, 0, 5), ids()):
        assert torch.equal(mine.read(which), definition.read(which))
    taken = DeviceBlocks(others).read(ids(4, 2, 7))
    mine.write(ids(1, 8, 2), taken)
    definition.write(ids(1, 8, 2), taken)
    assert as_bytes(ours) == as_bytes(theirs)
    assert not torch.equal(mine.read(ids(1)), definition.read(ids(0)))


def test_all_planes_move_in_one_launch(triton_ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two if a block is both read and written: then all are read in one launch and written in another."""
    from pagoda.kernels.kv_cache import triton_blocks

    grids: list[tuple[int, ...]] = []

    class Counting:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *_: None

    monkeypatch.setattr(triton_blocks, "_move_blocks", Counting())
    blocks = triton_ops.make_device_blocks(pool([(torch.float32, 2_500)] * 6, 1))
    blocks.copy(np.array([(1, 2), (3, 4)], np.int32))
    assert grids == [(2, 6, 2)]  # 2,500 floats are 1,250 words of 8 bytes
    blocks.copy(np.array([(1, 2), (2, 3)], np.int32))
    assert grids[1:] == [(2, 6, 2)] * 2


def test_a_cache_without_layers_has_no_blocks_to_move(triton_ops: Any) -> None:
    blocks = triton_ops.make_device_blocks([])
    blocks.copy(np.array([(1, 2)], np.int32))
    assert blocks.words == 0
