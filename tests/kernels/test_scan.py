"""Mamba-2 and the gated delta rule: against their definition, and the same bits in every chunking, batch and number of
threads."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps
from tests.kernels.paged import Geometry, make_metadata

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of the largest value


@dataclass(frozen=True)
class Layer:
    """A layer's sizes, and a call of its op.   groups: of keys and queries.   tiled: see ForwardOps.gated_delta."""

    is_delta: bool
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.float32
    tiled: bool = False

    def draw(self, num_tokens: int, seed: int) -> torch.Tensor:
        """A row's tokens: x, then the numbers per head (dt; or a and b)."""
        width = self.heads * self.value_dim + 2 * self.groups * self.key_dim + 2 * self.heads
        return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def new_states(self, num_blocks: int) -> KVLayer:
        """States full of what no row may read; of the null block, NaN."""
        v = torch.full((num_blocks + 1, self.heads, self.key_dim, self.value_dim), 9.0)
        v[0] = torch.nan
        return KVLayer(torch.zeros(num_blocks + 1, 3, 1, 8, dtype=self.dtype), v)

    def __call__(self, ops: Ops, tokens: torch.Tensor, states: KVLayer, at: AttentionMetadata) -> torch.Tensor:
        of_heads = torch.Generator().manual_seed(5)
        rate, dt_bias, d = (torch.randn(self.heads, generator=of_heads) for _ in range(3))
        rate = -rate.exp()
        x, first, second = tokens.split([tokens.shape[1] - 2 * self.heads, self.heads, self.heads], dim=1)
        if self.is_delta:
            return ops.gated_delta(x, first, second, rate, dt_bias, states, at, self.tiled)
        return ops.mamba2(x, first, rate, dt_bias, d, states, at, 0.02, 3.0)


SIZES = [(4, 2, 16, 32), (3, 1, 7, 5), (6, 3, 33, 48)]
LAYERS = pytest.mark.parametrize("sizes", SIZES, ids=str)
RULES = pytest.mark.parametrize("is_delta", [False, True], ids=["mamba2", "gated_delta"])


def metadata(lens: list[tuple[int, int]], tables: list[list[int]], size: int) -> AttentionMetadata:
    """As the scheduler leaves the tables: entries before the state that is read are null."""
    made = make_metadata(Geometry(block_size=size), lens, tables)
    for row, (computed, _) in enumerate(lens):
        made.block_table[row, : max(0, computed - 1) // size] = 0
    return made


def whole(ops: Ops, layer: Layer, tokens: torch.Tensor) -> torch.Tensor:
    """A row computed at once, by itself."""
    return layer(ops, tokens, layer.new_states(1), metadata([(0, len(tokens))], [[1]], len(tokens)))


def in_chunks(ops: Ops, layer: Layer, rows: list[torch.Tensor], rng: random.Random) -> list[torch.Tensor]:
    """The rows in random chunks and batches, on blocks of a random size."""
    size = rng.choice([1, 3, 8, 32, 512])
    counts = [-(-len(tokens) // size) for tokens in rows]
    ids = rng.sample(range(1, sum(counts) + 1), sum(counts))
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    states, done = layer.new_states(sum(counts)), [0] * len(rows)
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    while live := [row for row, tokens in enumerate(rows) if done[row] < len(tokens)]:
        live = rng.sample(live, rng.randint(1, len(live)))
        lens = [(done[row], min(rng.choice([1, 1, 2, 17, 40]), len(rows[row]) - done[row])) for row in live]
        step = torch.cat([rows[row][at : at + new] for row, (at, new) in zip(live, lens, strict=True)])
        out = layer(ops, step, states, metadata(lens, [tables[row] for row in live], size))
        for row, (_, new), part in zip(live, lens, out.split([new for _, new in lens]), strict=True):
            found[row].append(part)
            done[row] += new
    return [torch.cat(parts) for parts in found]


@DTYPES
@LAYERS
@pytest.mark.parametrize(
    ("is_delta", "tiled"), [(False, False), (True, False), (True, True)], ids=["mamba2", "gated_delta", "tiled"]
)
def test_rows_in_chunks_equal_the_definition(
    fast: Ops, reference: ReferenceOps, is_delta: bool, tiled: bool, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    layer = Layer(is_delta, *sizes, dtype=dtype, tiled=tiled)
    rows = [layer.draw(length, seed=length) for length in (70, 1, 33)]
    alone = [whole(fast, layer, tokens) for tokens in rows]
    for seed in range(3):
        for found, once in zip(in_chunks(fast, layer, rows, random.Random(seed)), alone, strict=True):
            assert torch.equal(found, once)
    for found, tokens in zip(alone, rows, strict=True):
        expected = whole(reference, layer, tokens)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype] * float(expected.abs().max()))


@LAYERS
def test_tiled_heads_are_those_of_groups_in_another_order(fast: Ops, sizes: tuple[int, ...]) -> None:
    heads, groups, key_dim, value_dim = sizes
    layer = Layer(True, *sizes, tiled=True)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 2 * groups * key_dim + heads * value_dim, generator=generator)
    a, b, of_heads = (torch.randn(count, heads, generator=generator) for count in (9, 9, 2))
    order = torch.arange(heads).view(-1, groups).T.flatten()  # of the heads by group
    at = metadata([(0, 9)], [[1]], 9)

    def by_group(values: torch.Tensor) -> torch.Tensor:
        return values.view(9, heads, value_dim)[:, order].flatten(1)

    found = fast.gated_delta(x, a, b, -of_heads[0].exp(), of_heads[1], layer.new_states(1), at, True)
    keys, values = x.split([2 * groups * key_dim, heads * value_dim], dim=1)
    x, (rate, dt_bias) = torch.cat((keys, by_group(values)), 1), of_heads[:, order]
    same = fast.gated_delta(x, a[:, order], b[:, order], -rate.exp(), dt_bias, layer.new_states(1), at)
    assert torch.equal(by_group(found), same)


@RULES
@pytest.mark.parametrize("sizes", [(2, 1, 128, 64), (2, 2, 128, 128), (1, 1, 256, 64)], ids=str)
def test_bits_do_not_depend_on_threads(native: NativeOps, is_delta: bool, sizes: tuple[int, ...]) -> None:
    """Of any number: threads may share a head."""
    layer = Layer(is_delta, *sizes)
    rows = [layer.draw(length, seed=length) for length in (50, 3)]
    once = [whole(native, layer, tokens) for tokens in rows]
    for threads in (2, 3, 5, 64):
        ops = NativeOps(native.library, threads)
        for found, alone in zip(in_chunks(ops, layer, rows, random.Random(threads)), once, strict=True):
            assert torch.equal(found, alone)


@RULES
def test_a_row_goes_on_from_a_state_of_the_same_step(fast: Ops, is_delta: bool) -> None:
    """As a prefix hit may: the second row begins after a block that the first one fills in this step."""
    layer = Layer(is_delta, 4, 2, 16, 32)
    tokens, states = layer.draw(20, seed=1), layer.new_states(4)
    step = torch.cat([tokens[:18], tokens[16:]])
    out = layer(fast, step, states, metadata([(0, 18), (16, 4)], [[1, 2, 3], [1, 2, 4]], 8))
    assert torch.equal(out[18:20], out[16:18])
    assert torch.equal(out[18:], whole(fast, layer, tokens)[16:])
    again = layer(fast, tokens[16:], states, metadata([(16, 4)], [[1, 2, 3]], 8))  # the snapshot is still there
    assert torch.equal(again, out[18:])


@RULES
def test_only_its_own_blocks_are_written(fast: Ops, is_delta: bool) -> None:
    layer = Layer(is_delta, 3, 1, 16, 32)
    states = layer.new_states(4)
    layer(fast, layer.draw(3, seed=1), states, metadata([(0, 3)], [[2]], 8))
    assert (states.v[[1, 3, 4]] == 9).all()
    assert states.v[0].isnan().all()
    out = layer(fast, layer.draw(12, seed=2), states, metadata([(9, 12)], [[0, 0, 0]], 8))  # a dry run: zeros
    assert torch.equal(out, whole(fast, layer, layer.draw(12, seed=2)))
    assert states.v[0].isnan().all()


@RULES
def test_nothing_outside_the_row_is_read(native: NativeOps, is_delta: bool) -> None:
    """Rows are views of wider ones, whose other columns are NaN; so are the floats between blocks."""
    layer = Layer(is_delta, 3, 1, 7, 5)
    tokens = layer.draw(9, seed=1)
    apart = torch.full((3, 1000), torch.nan)
    shape = (3, layer.heads, layer.key_dim, layer.value_dim)
    v = torch.as_strided(apart, shape, (1000, layer.key_dim * layer.value_dim, layer.value_dim, 1))
    wide = torch.full((9, 200), torch.nan)
    wide[:, 50 : 50 + tokens.shape[1]] = tokens
    states = KVLayer(layer.new_states(2).k, v)
    out = layer(native, wide[:, 50 : 50 + tokens.shape[1]], states, metadata([(0, 9)], [[2, 1]], 8))
    assert torch.equal(out, whole(native, layer, tokens))
    assert apart[1:, layer.heads * layer.key_dim * layer.value_dim :].isnan().all()


def test_a_nan_stays_in_its_row(native: NativeOps) -> None:
    for is_delta in (False, True):
        layer = Layer(is_delta, 4, 2, 16, 32)
        rows = [layer.draw(4, seed=seed) for seed in (1, 2)]
        rows[0][1] = torch.nan
        out = layer(native, torch.cat(rows), layer.new_states(2), metadata([(0, 4), (0, 4)], [[1], [2]], 8))
        assert out[0].isfinite().all()
        assert out[1:4].isnan().all()
        assert torch.equal(out[4:], whole(native, layer, rows[1]))


Calls = list[tuple[Callable[[], object], str]]


def test_what_does_not_fit_is_refused(native: NativeOps) -> None:
    layer, at = Layer(False, 4, 2, 16, 32), metadata([(0, 2)], [[1]], 8)
    x, dt, of_heads, states = torch.zeros(2, 192), torch.zeros(2, 4), torch.zeros(4), layer.new_states(1)
    half = KVLayer(states.k, states.v.bfloat16())
    calls: Calls = [
        (lambda: native.mamba2(x[:, :190], dt, of_heads, of_heads, of_heads, states, at), "keys, queries and values"),
        (lambda: native.mamba2(x, dt[:, :3], of_heads, of_heads, of_heads, states, at), "dt .* each of the 4 heads"),
        (lambda: native.mamba2(x, dt, of_heads, of_heads, torch.zeros(2), states, at), "d .* each of the 4 heads"),
        (lambda: native.mamba2(x, dt, of_heads, of_heads, of_heads, half, at), "v float32"),
        (lambda: native.mamba2(x.half(), dt.half(), of_heads, of_heads, of_heads, states, at), "F16 as x is"),
        (lambda: native.gated_delta(x[:, :128], dt, dt, of_heads, of_heads, states, at), "keys, queries and values"),
        (lambda: native.gated_delta(x, dt, dt, of_heads, dt, states, at), "dt_bias .* each of the 4 heads"),
    ]
    for call, said in calls:
        with pytest.raises(ValueError, match=said):
            call()
