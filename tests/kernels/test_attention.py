"""Every attention against its reference, over ugly shapes; and, natively, the same bits in any batch."""

import random

import pytest
import torch

from pagoda.base.errors import ConfigError, InvariantBroken
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.kernels.torch_ops import TorchOps
from tests.kernels.paged import Geometry, PagedRows, Sequence, make_metadata

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 3e-5, BF16: 2e-2, F16: 3e-3}

# heads, KV heads, head size, block size, window (below 0: chunks), softcap
SHAPES = [
    (9, 3, 64, 16, 0, 0.0),
    (4, 4, 32, 8, 0, 0.0),
    (8, 1, 80, 32, 5, 0.0),
    (4, 2, 96, 128, 300, 0.0),
    (2, 1, 256, 16, 33, 30.0),
    (6, 2, 48, 24, 0, 50.0),
    (5, 1, 112, 64, 1, 0.0),
    (64, 1, 16, 8, 70, 0.0),
    (6, 2, 32, 8, -1, 0.0),
    (4, 2, 48, 16, -37, 0.0),
    (8, 2, 64, 16, -256, 30.0),
]


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_reference(fast: Ops, reference: ReferenceOps, shape: tuple, dtype: torch.dtype) -> None:
    *sizes, window, softcap = shape
    geometry = Geometry(*sizes, dtype=dtype)
    rows = [Sequence.random(geometry, length, seed) for seed, length in enumerate((1, 37, 130, 331))]
    ours, theirs = PagedRows(fast, geometry, rows), PagedRows(reference, geometry, rows, seed=1)
    for step in ([(1, 36), (3, 300)], [(0, 1), (1, 1), (2, 129), (3, 1)], [(3, 30), (2, 1)]):
        got, want = ours.step(step, 0.1, window, softcap), theirs.step(step, 0.1, window, softcap)
        torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def sinks_of(geometry: Geometry) -> torch.Tensor:
    return 3 * torch.randn(geometry.num_heads + 2, generator=torch.Generator().manual_seed(5)).to(geometry.dtype)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("shape", [(9, 3, 64, 16, 0), (8, 1, 80, 32, 5), (4, 2, 96, 128, 300)], ids=str)
def test_sinks_match_the_reference(fast: Ops, reference: ReferenceOps, shape: tuple, dtype: torch.dtype) -> None:
    *sizes, window = shape
    geometry = Geometry(*sizes, dtype=dtype)
    rows = [Sequence.random(geometry, length, seed) for seed, length in enumerate((1, 37, 331))]
    ours, theirs = (PagedRows(ops, geometry, rows, sinks=sinks_of(geometry)) for ops in (fast, reference))
    without = PagedRows(reference, geometry, rows)
    for step in ([(1, 36), (2, 300)], [(0, 1), (1, 1), (2, 1)], [(2, 30)]):
        got, want, plain = (paged.step(step, 0.1, window).float() for paged in (ours, theirs, without))
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert (want - plain).abs().max() > 0.05


def test_a_sink_takes_its_share_of_the_softmax(reference: ReferenceOps) -> None:
    """With as large a score as the only key, it takes half; of no weight, nothing; of all, everything."""
    geometry = Geometry(1, 1, 16, 8, F32)
    row = Sequence.random(geometry, 1, 0)
    score = float(row.q.flatten() @ row.k.flatten()) * 0.1
    for sink, share in ((score, 0.5), (-1e4, 1.0), (1e4, 0.0)):
        paged = PagedRows(reference, geometry, [row], sinks=torch.tensor([0.0, 0.0, sink]))
        torch.testing.assert_close(paged.step([(0, 1)], 0.1), share * row.v.view(1, -1))


def test_there_is_a_sink_for_each_head(native: NativeOps) -> None:
    geometry = Geometry(4, 2, 32, 8, F32)
    paged = PagedRows(native, geometry, [Sequence.random(geometry, 3, 0)], sinks=torch.zeros(5))
    with pytest.raises(ValueError, match="5 sinks are not those of 4 heads from 2 on"):
        paged.step([(0, 3)], 0.1)


# heads, size of the rotated part, block size, size of the latent
LATENT_SHAPES = [(16, 64, 16, 512), (5, 16, 8, 32), (8, 32, 24, 48), (128, 16, 64, 32)]


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("shape", LATENT_SHAPES, ids=str)
def test_latents_match_the_reference(fast: Ops, reference: ReferenceOps, shape: tuple, dtype: torch.dtype) -> None:
    if fast.name == "triton":
        pytest.skip("there is no Triton kernel for latent attention: it is refused when an engine starts")
    heads, rotated, block_size, latent = shape
    geometry = Geometry(heads, 1, rotated, block_size, dtype, latent=latent)
    rows = [Sequence.random(geometry, length, seed) for seed, length in enumerate((1, 37, 331))]
    ours, theirs = PagedRows(fast, geometry, rows), PagedRows(reference, geometry, rows, seed=1)
    for step in ([(1, 36), (2, 300)], [(0, 1), (1, 1), (2, 1)], [(2, 30)]):
        got, want = ours.step(step, latent**-0.5), theirs.step(step, latent**-0.5)
        torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_the_definition_of_latent_attention_is_attention_with_longer_keys(reference: ReferenceOps) -> None:
    geometry = Geometry(6, 1, 16, 8, latent=32)
    row = Sequence.random(geometry, 40, 0)
    got = PagedRows(reference, geometry, [row]).step([(0, 40)], 0.1)
    wide = Geometry(6, 1, 48, 8)
    keys = torch.cat((row.v, row.k), dim=-1)
    want = PagedRows(reference, wide, [Sequence(row.q, keys, keys)]).step([(0, 40)], 0.1)
    torch.testing.assert_close(got, want.unflatten(1, (6, 48))[..., :32].flatten(1))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_bits_of_latent_attention_depend_on_the_row_alone(native: NativeOps, dtype: torch.dtype) -> None:
    """In any chunking, on any number of threads, and whatever is in memory that the row has not written."""
    geometry = Geometry(20, 1, 16, 16, dtype, latent=64)
    rows = [Sequence.random(geometry, length, seed) for seed, length in enumerate((600, 75))]
    want = [alone(native, geometry, row, 0, 0.0) for row in rows]
    for threads in (1, 4):
        paged = PagedRows(NativeOps(native.library, threads), geometry, rows)
        for pages in (paged.cache.k, paged.cache.v):
            pages.fill_(float("nan"))
        steps = ([(1, 33), (0, 290)], [(0, 1)], [(0, 300), (1, 42)], [(0, 9)])
        parts = [paged.step(step, 0.1) for step in steps]
        assert torch.equal(torch.cat((parts[0][33:], parts[1], parts[2][:300], parts[3])), want[0])
        assert torch.equal(torch.cat((parts[0][:33], parts[2][300:])), want[1])


def test_latent_attention_is_of_one_head_whose_value_is_the_larger_part(native: NativeOps) -> None:
    geometry = Geometry(4, 1, 48, 16, latent=32)
    with pytest.raises(ValueError, match="K of 48 and V of 32 elements"):
        PagedRows(native, geometry, [Sequence.random(geometry, 3, 0)]).step([(0, 3)], 0.1)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_bits_with_sinks_depend_on_the_row_alone(native: NativeOps, dtype: torch.dtype) -> None:
    geometry = Geometry(8, 2, 64, 16, dtype)
    row, other = (Sequence.random(geometry, 600, seed) for seed in range(2))
    sinks = sinks_of(geometry)
    together = PagedRows(NativeOps(native.library, 3), geometry, [row, other], 1, sinks).step([(1, 70), (0, 600)], 0.1)
    single = PagedRows(native, geometry, [row], 99, sinks)
    alone = torch.cat([single.step([(0, 1)], 0.1) for _ in range(600)])
    assert torch.equal(together[70:], alone)


def bias_of(geometry: Geometry, reach: int) -> torch.Tensor:
    """Of two heads before those of the rows, and of theirs."""
    drawn = torch.Generator().manual_seed(6)
    return 2 * torch.randn(geometry.num_heads + 2, 2 * reach + 1, generator=drawn)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("shape", "reach"),
    [((9, 3, 64, 16, 0, 0.0), 20), ((8, 1, 80, 32, 5, 0.0), 1), ((4, 2, 96, 128, 100, 30.0), 200)],
    ids=str,
)
def test_a_bias_by_distance_matches_the_reference(
    fast: Ops, reference: ReferenceOps, shape: tuple, reach: int, dtype: torch.dtype
) -> None:
    *sizes, window, softcap = shape
    geometry = Geometry(*sizes, dtype=dtype)
    rows = [Sequence.random(geometry, length, seed) for seed, length in enumerate((1, 37, 131))]
    ours, theirs, without = (PagedRows(ops, geometry, rows) for ops in (fast, reference, reference))
    how = 0.1, window, softcap
    for step in ([(1, 36), (2, 100)], [(0, 1), (1, 1), (2, 1)], [(2, 30)]):
        bias = bias_of(geometry, reach)
        got, want = (paged.step(step, *how, bias=bias).float() for paged in (ours, theirs))
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert (want - without.step(step, *how).float()).abs().max() > 0.05


def test_a_bias_counts_by_the_distance_of_key_and_query(reference: ReferenceOps) -> None:
    """The second token sees itself at distance 0 and the first at -1; further ones have the bias of the furthest."""
    geometry = Geometry(1, 1, 16, 8, F32)
    row = Sequence.random(geometry, 4, 0)
    row = Sequence(torch.zeros_like(row.q), row.k, row.v)
    bias = torch.tensor([[9.0] * 3] * 2 + [[1.0, 2.0, 9.0]])
    found = PagedRows(reference, geometry, [row]).step([(0, 4)], 0.1, bias=bias)
    weights = torch.tensor([1.0, 1.0, 1.0, 2.0]).softmax(0)
    torch.testing.assert_close(found[3:], weights @ row.v.view(4, 16)[None])


def test_a_bias_has_a_row_for_each_head_and_a_middle(native: NativeOps) -> None:
    geometry = Geometry(4, 2, 32, 8, F32)
    for shape in ((5, 3), (6, 4), (6,)):
        paged = PagedRows(native, geometry, [Sequence.random(geometry, 3, 0)])
        with pytest.raises(ValueError, match="is not that of 4 heads from 2 on"):
            paged.step([(0, 3)], 0.1, bias=torch.zeros(shape))


@pytest.mark.parametrize("geometry", [Geometry(8, 2, 64, 16, F32), Geometry(8, 2, 64, 16, BF16, int8_cache=True)])
def test_bits_with_a_bias_depend_on_the_row_alone(native: NativeOps, geometry: Geometry) -> None:
    row, other = (Sequence.random(geometry, 600, seed) for seed in range(2))
    bias = bias_of(geometry, 100)
    together = PagedRows(NativeOps(native.library, 3), geometry, [row, other], 1)
    whole = together.step([(1, 70), (0, 600)], 0.1, bias=bias)
    single = PagedRows(native, geometry, [row], 99)
    alone = torch.cat([single.step([(0, 1)], 0.1, bias=bias) for _ in range(600)])
    assert torch.equal(whole[70:], alone)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("window", [0, 40])
def test_spans_that_attend_both_ways(
    native: NativeOps, reference: ReferenceOps, window: int, dtype: torch.dtype
) -> None:
    """Tokens 20 to 299 of the second row see all of these; alone, beside others, and after a part that is cached."""
    geometry = Geometry(4, 2, 32, 16, dtype)
    rows = [Sequence.random(geometry, length, seed) for seed, length in enumerate((50, 330))]
    seen = [max(at, 299) if 20 <= at < 300 else at for at in range(330)]
    whole = [(0, 50), (1, 330)]
    got = {
        type(ops).__name__: PagedRows(ops, geometry, rows, seed).step(whole, 0.1, window, 0.0, [*range(50), *seen])
        for seed, ops in enumerate((native, reference, TorchOps()))
    }
    for ours in got.values():
        torch.testing.assert_close(
            ours.float(), got["ReferenceOps"].float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
    plain = PagedRows(native, geometry, rows).step(whole, 0.1, window)
    assert torch.equal(plain[:70], got["NativeOps"][:70])
    assert torch.equal(plain[350:], got["NativeOps"][350:])
    assert not torch.equal(plain[70:71], got["NativeOps"][70:71])
    for threads, cuts in ((1, (330,)), (3, (20, 300, 330)), (2, (300, 330))):
        paged, at = PagedRows(NativeOps(native.library, threads), geometry, rows, seed=3), 0
        for end in cuts:
            part = paged.step([(1, end - at)], 0.1, window, 0.0, seen[at:end])
            assert torch.equal(part, got["NativeOps"][50 + at : 50 + end])
            at = end
    paged.computed[1] = 100  # as if a hit had found so much of the span, and no more
    again = paged.step([(1, 230)], 0.1, window, 0.0, seen[100:])
    assert torch.equal(again, got["NativeOps"][150:])


def test_positions_that_a_query_cannot_see_are_refused(native: NativeOps) -> None:
    geometry = Geometry(2, 1, 32, 16)
    rows = [Sequence.random(geometry, 9, 0)]
    for seen in ([0, 1, 2, 3, 4, 5, 6, 7, 9], [0, 0, 2, 3, 4, 5, 6, 7, 8], [8, 1, 2, 3, 4, 5, 6, 7, 8]):
        with pytest.raises(InvariantBroken, match="last_seen must be a position of the row"):
            PagedRows(native, geometry, rows).step([(0, 9)], 0.1, last_seen=seen)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 48, 64, 80, 128])
def test_int8_cache_matches_the_reference(
    fast: Ops, reference: ReferenceOps, block_size: int, dtype: torch.dtype
) -> None:
    geometry = Geometry(6, 2, 80, block_size, dtype, int8_cache=True)
    rows = [Sequence.random(geometry, length, seed) for seed, length in enumerate((50, 300))]
    ours, theirs = PagedRows(fast, geometry, rows), PagedRows(reference, geometry, rows)
    for step in ([(0, 49), (1, 299)], [(1, 1), (0, 1)]):
        got, want = ours.step(step, 0.1), theirs.step(step, 0.1)
        torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("head_dim", "block_size"), [(528, 16), (24, 16), (64, 12)])
def test_pages_the_native_kernels_cannot_hold_are_refused(native: NativeOps, head_dim: int, block_size: int) -> None:
    geometry = Geometry(2, 1, head_dim, block_size)
    row = Sequence.random(geometry, 3, 0)
    metadata = make_metadata(geometry, [(0, 3)], [[1]])
    cache = geometry.new_cache(1)
    tables = torch.zeros(3, head_dim // 2), torch.zeros(3, head_dim // 2)
    for call in (
        lambda: native.write_kv(row.k, row.v, cache, metadata),
        lambda: native.rotary_write_kv(
            row.q, row.k, row.v, torch.arange(3, dtype=torch.int32), *tables, cache, metadata
        ),
        lambda: native.attention(row.q, cache, metadata, 0.1),
    ):
        with pytest.raises(ConfigError, match=f"not {head_dim} and {block_size}; choose kernels='torch'"):
            call()


def test_the_largest_head(native: NativeOps, reference: ReferenceOps) -> None:
    for int8_cache in (False, True):
        geometry = Geometry(2, 1, 512, 16, int8_cache=int8_cache)
        rows = [Sequence.random(geometry, 70, 0)]
        got, want = (PagedRows(ops, geometry, rows).step([(0, 70)], 0.05) for ops in (native, reference))
        torch.testing.assert_close(got, want, atol=2e-2 if int8_cache else 1e-4, rtol=1e-2)


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("int8_cache", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_stays_nan_and_affects_no_other_row(fast: Ops, bad: float, int8_cache: bool, where: str) -> None:
    geometry = Geometry(4, 2, 64, 16, BF16, int8_cache)
    rows = [Sequence.random(geometry, 40, seed) for seed in range(2)]
    clean = PagedRows(fast, geometry, rows).step([(0, 40), (1, 40)], 0.1)
    getattr(rows[0], where)[17, 1, 5] = bad
    got = PagedRows(fast, geometry, rows).step([(0, 40), (1, 40)], 0.1)
    if int8_cache or bad is torch.nan or where == "v":
        assert not got[39, 128:].isfinite().all()
    assert torch.equal(got[40:], clean[40:])


def test_even_the_sign_of_a_zero_depends_only_on_the_row(native: NativeOps) -> None:
    """Values so small that products vanish: sums of nothing but -0, and of -0 with a segment that saw nothing."""
    geometry = Geometry(6, 2, 64, 16, BF16)
    row = Sequence.random(geometry, 600, 3)
    row.v.mul_(1e-38)
    together = PagedRows(native, geometry, [row]).step([(0, 600)], 0.1)
    single = alone(native, geometry, row, 0, 0.0)
    assert (together == 0).any()
    assert torch.equal(together.view(torch.int16), single.view(torch.int16))


def alone(ops: NativeOps, geometry: Geometry, row: Sequence, window: int, softcap: float) -> torch.Tensor:
    """The row's outputs, token by token: every query a decode."""
    paged = PagedRows(ops, geometry, [row], seed=99)
    return torch.cat([paged.step([(0, 1)], 0.1, window, softcap) for _ in range(len(row.q))])


@pytest.mark.parametrize("int8_cache", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_depend_on_the_row_alone(native: NativeOps, shape: tuple, dtype: torch.dtype, int8_cache: bool) -> None:
    *sizes, window, softcap = shape
    geometry = Geometry(*sizes, dtype=dtype, int8_cache=int8_cache)
    lengths = (300, 90, 7)
    rows = [Sequence.random(geometry, length, seed) for seed, length in enumerate(lengths)]
    want = [alone(native, geometry, row, window, softcap) for row in rows]
    chooser = random.Random(str(shape))
    for seed in range(3):
        paged = PagedRows(native, geometry, rows, seed)
        got = [torch.empty_like(part) for part in want]
        while any(done < length for done, length in zip(paged.computed, lengths, strict=True)):
            open_rows = [r for r in range(len(rows)) if paged.computed[r] < lengths[r]]
            chosen = chooser.sample(open_rows, chooser.randint(1, len(open_rows)))
            step = [(r, min(lengths[r] - paged.computed[r], chooser.choice((1, 2, 17, 64, 250)))) for r in chosen]
            starts = [paged.computed[r] for r, _ in step]
            out = paged.step(step, 0.1, window, softcap)
            for (r, count), start, part in zip(step, starts, out.split([count for _, count in step]), strict=True):
                got[r][start : start + count] = part
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


def test_bits_do_not_depend_on_threads(native: NativeOps) -> None:
    """One thread folds segments as it goes, four share them out: the same order of sums."""
    geometry = Geometry(dtype=BF16)
    row = Sequence.random(geometry, 2000, 0)
    outs = []
    for threads in (1, 2, 4):
        paged = PagedRows(NativeOps(native.library, threads), geometry, [row])
        outs.append(torch.cat([paged.step([(0, 1990)], 0.1), *(paged.step([(0, 1)], 0.1) for _ in range(10))]))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("int8_cache", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_memory_outside_a_row_is_never_read(fast: Ops, dtype: torch.dtype, int8_cache: bool) -> None:
    """NaN in every slot the row has not written, in the null block, and before its window."""
    geometry = Geometry(4, 2, 32, 16, dtype, int8_cache)
    row = Sequence.random(geometry, 83, 0)
    clean, dirty = PagedRows(fast, geometry, [row]), PagedRows(fast, geometry, [row])
    for tensor in (dirty.cache.k, dirty.cache.v, dirty.cache.k_scale, dirty.cache.v_scale):
        if tensor is not None:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
    for step in ([(0, 70)], [(0, 12)]):
        assert torch.equal(clean.step(step, 0.1), dirty.step(step, 0.1))
    # The window has left the first blocks: their ids are removed.
    for paged in (clean, dirty):
        paged.tables[0][:3] = [0, 0, 0]
    last = clean.step([(0, 1)], 0.1, window=20), dirty.step([(0, 1)], 0.1, window=20)
    assert torch.equal(*last)
    assert not last[0].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8], ids=str)
def test_keys_are_read_back_whatever_the_layout(dtype: torch.dtype, native: Ops) -> None:
    is_int8 = dtype == torch.int8
    geometry = Geometry(2, 2, 48, dtype=torch.float32 if is_int8 else dtype, int8_cache=is_int8)
    row, metadata = Sequence.random(geometry, 21, 0), make_metadata(geometry, [(0, 21)], [[3, 1]])
    caches = [geometry.new_cache(3), geometry.new_cache(3)]
    native.write_kv(row.k, row.v, caches[0], metadata)
    ReferenceOps().write_kv(row.k, row.v, caches[1], metadata)
    assert not torch.equal(caches[0].k, caches[1].k)
    assert torch.equal(native.plain_keys(caches[0].k), caches[1].k)
