"""A prefix that rows share: found in block tables, attended to once, with the result of each row by itself."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagoda.kernels.attention import shared_prefix
from pagoda.kernels.attention.shared_prefix import find_shared_prefix
from pagoda.kernels.batch import AttentionMetadata
from tests.kernels.paged import Geometry, make_metadata
from tests.kernels.test_triton import ATTENTION_TOLERANCE, BF16, DEVICE, F16, F32, draw, moved, on_device


def slow_shared_prefix(table: np.ndarray, context: np.ndarray, block_size: int) -> tuple[int, int] | None:
    """The same, group by group and block by block."""
    best: tuple[int, int, int] | None = None
    for rows in range(2, len(table) + 1):
        blocks = 0
        while all(
            blocks < table.shape[1] and (blocks + 1) * block_size <= context[row] and table[row, blocks] != 0
            and table[row, blocks] == table[0, blocks]
            for row in range(rows)
        ):  # fmt: skip
            blocks += 1
        saved = blocks * block_size * (rows - 1)
        if saved >= shared_prefix.LEAST_SAVED_TOKENS and (best is None or saved > best[0]):
            best = saved, blocks * block_size, rows
    return None if best is None else best[1:]


@pytest.mark.parametrize("seed", range(40))
def test_the_group_that_saves_most_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED_TOKENS", 40)
    rng = np.random.default_rng(seed)
    rows, blocks = int(rng.integers(1, 9)), 12
    table = np.arange(1, rows * blocks + 1, dtype=np.int32).reshape(rows, blocks)
    for row in range(1, rows):
        common = int(rng.integers(0, 13))
        table[row, :common] = table[0, :common]
    if seed % 5 == 0:
        table[:, : int(rng.integers(0, 3))] = 0
    context = rng.integers(0, 12 * 8, rows)
    assert find_shared_prefix(table, context, 8) == slow_shared_prefix(table, context, 8)


def test_little_is_not_worth_it() -> None:
    table = np.tile(np.arange(1, 129, dtype=np.int32), (9, 1))
    context = np.full(9, 2048, np.int64)
    assert find_shared_prefix(table, context, 16) == (2048, 9)
    assert find_shared_prefix(table[:8], context[:8], 16) is None
    assert find_shared_prefix(table[:1], context[:1], 16) is None


def step(geometry: Geometry, contexts: list[int], shared: int, rows: int) -> AttentionMetadata:
    """A decode of rows whose contexts begin with `shared` common tokens, as far as the first `rows` are concerned."""
    blocks = iter(range(1, 1000))
    common = [next(blocks) for _ in range(shared // geometry.block_size)]
    tables = []
    for row, context in enumerate(contexts):
        own = [next(blocks) for _ in range(context // geometry.block_size + 1)]
        tables.append((common + own[len(common) :]) if row < rows else own)
    metadata = moved(make_metadata(geometry, [(context, 1) for context in contexts], tables))
    return replace(metadata, shared_prefix=torch.tensor([shared, rows], dtype=torch.int32, device=DEVICE))


# heads, KV heads, head size, block size; contexts; shared tokens and rows
@pytest.mark.parametrize(
    ("shape", "dtype", "pages", "contexts", "shared", "rows"),
    [
        ((4, 2, 32, 16), BF16, "plain", [200, 150, 129, 7], 128, 3),
        ((3, 1, 16, 8), F32, "plain", [190, 64, 64], 64, 3),
        pytest.param((5, 1, 48, 8), F16, "int8", [300] * 20 + [9], 136, 20, marks=pytest.mark.slow),
        pytest.param((16, 2, 80, 16), BF16, "fp8", [257, 256, 300, 400, 256], 256, 5, marks=pytest.mark.slow),
        pytest.param((2, 2, 256, 32), BF16, "plain", [100, 70], 64, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attended_to_once(
    make_triton_ops, reference: Any, monkeypatch: pytest.MonkeyPatch,
    shape: tuple, dtype: torch.dtype, pages: str, contexts: list[int], shared: int, rows: int,
) -> None:  # fmt: skip
    geometry = Geometry(*shape, dtype=dtype, int8_cache=pages == "int8", fp8_cache=pages == "fp8")
    metadata = step(geometry, contexts, shared, rows)
    cache = on_device(geometry.new_cache(int(metadata.block_table.max()) + 1), spare=0)
    slots = torch.arange(geometry.block_size, cache.k.shape[0] * geometry.block_size, device=DEVICE)
    k, v = (draw(len(slots), geometry.num_kv_heads, geometry.head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    reference.write_kv(k, v, cache, replace(metadata, slot_mapping=slots))
    q = draw(len(contexts), geometry.num_heads, geometry.head_dim, dtype=dtype)
    want = reference.attention(q, cache, metadata, 0.1)

    from pagoda.kernels.attention import triton_attention

    launches: list[str] = []
    kernel = triton_attention.attend_shared
    monkeypatch.setattr(triton_attention, "attend_shared", Recorded(kernel, launches))
    ops: Any = make_triton_ops()
    tolerance = 2e-2 if pages != "plain" else ATTENTION_TOLERANCE[dtype]
    for batch_invariant, softcap, window in ((False, 0.0, 0), (True, 0.0, 0), (False, 30.0, 0), (False, 0.0, 50)):
        ops.attention = triton_attention.PagedAttention(64, batch_invariant).attention
        got = ops.attention(q, cache, metadata, 0.1, window, softcap)
        if not (softcap or window):
            torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)
    assert launches == ["attend_shared"]  # neither batch-invariant, nor with a window or a soft cap


class Recorded:
    """A kernel that notes its launches."""

    def __init__(self, kernel, launches: list[str]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: object):
        self._launches.append("attend_shared")
        return self._kernel[grid]
