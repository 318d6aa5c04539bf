"""The Triton kernels against the reference, over small ugly shapes: on a GPU, or else in Triton's interpreter.

The `fast` fixture runs all other kernel tests on them as well, marked slow: the interpreter takes a millisecond or more
for each program that a GPU runs in a microsecond.
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.low_rank.table import LowRankPiece
from pagoda.kernels.sampling import reference as sampling
from pagoda.kernels.sampling.batch import DrawParams
from pagoda.ops.declare import Activation
from pagoda.worker.batch_rows import BatchRows, PaddedSize
from tests.kernels.paged import Geometry, PagedRows, Sequence, make_metadata
from tests.kernels.test_constraints import random_constraints
from tests.kernels.test_ops import close
from tests.kernels.test_sampling import columns

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ATTENTION_TOLERANCE = {F32: 3e-5, BF16: 2e-2, F16: 3e-3}


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def moved(metadata: AttentionMetadata) -> AttentionMetadata:
    names = ("query_start", "seq_lens", "block_table", "slot_mapping")
    return replace(metadata, **{name: getattr(metadata, name).to(DEVICE) for name in names})


class Rows(PagedRows):
    """Rows on the device under test, in pages as the cache engine makes them: a block has room for more than these."""

    def __init__(self, ops: Any, geometry: Geometry, rows: list[Sequence], seed: int = 0) -> None:
        super().__init__(ops, geometry, rows, seed)
        self.cache = on_device(self.cache, spare=3 * geometry.block_size)
        self.rows = [Sequence(row.q.to(DEVICE), row.k.to(DEVICE), row.v.to(DEVICE)) for row in rows]

    def step(self, new: list[tuple[int, int]], scale: float, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
        lens = [(self.computed[row], count) for row, count in new]
        metadata = moved(make_metadata(self.geometry, lens, [self.tables[row] for row, _ in new]))
        q, k, v = (
            torch.cat([getattr(self.rows[row], name)[first : first + count] for (row, count), (first, _) in
                       zip(new, lens, strict=True)])
            for name in ("q", "k", "v")
        )  # fmt: skip
        self.ops.write_kv(k, v, self.cache, metadata)
        for row, count in new:
            self.computed[row] += count
        return self.ops.attention(q, self.cache, metadata, scale, window, softcap)


def on_device(cache: KVLayer, spare: int) -> KVLayer:
    """The same shapes, as views of blocks with `spare` more elements. What no row has written is NaN, if it can be."""

    def plane(pages: torch.Tensor) -> torch.Tensor:
        nothing = torch.nan if pages.dtype.is_floating_point else 77
        whole = torch.full((pages.shape[0], pages[0].numel() + spare), nothing, dtype=pages.dtype, device=DEVICE)
        return whole[:, : pages[0].numel()].unflatten(1, pages.shape[1:])

    scales = (None if scale is None else plane(scale) for scale in (cache.k_scale, cache.v_scale))
    return KVLayer(plane(cache.k), plane(cache.v), *scales)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 37), (3, 576)])
def test_norms(triton_ops: Any, reference: Any, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    x, residual, weight = (draw(*shape, dtype=dtype) for shape in ((tokens, hidden), (tokens, hidden), (hidden,)))
    residual, bias = residual.flip(1), weight.flip(0)
    for offset in (False, True):
        close(triton_ops.rms_norm(x, weight, 1e-5, offset), reference.rms_norm(x, weight, 1e-5, offset))
        for got, want in zip(
            triton_ops.add_rms_norm(x, residual, weight, 1e-5, offset),
            reference.add_rms_norm(x, residual, weight, 1e-5, offset),
            strict=True,
        ):
            close(got, want)
    close(triton_ops.layer_norm(3 * x + 5, weight, bias, 1e-5), reference.layer_norm(3 * x + 5, weight, bias, 1e-5))
    for got, want in zip(
        triton_ops.add_layer_norm(x, residual, weight, bias, 1e-12),
        reference.add_layer_norm(x, residual, weight, bias, 1e-12),
        strict=True,
    ):
        close(got, want)


def test_norm_of_heads_inside_a_fused_projection(triton_ops: Any, reference: Any) -> None:
    q, k, _ = triton_ops.split_qkv(draw(3, (4 + 2 * 2) * 80, dtype=BF16), 4, 2, 80)
    for heads in (q, k):
        for size in (80, 80 * heads.shape[1]):  # each head by itself, and all heads of a token as one vector
            weight = draw(size, dtype=BF16)
            close(triton_ops.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_activations(triton_ops: Any, reference: Any, dtype: torch.dtype) -> None:
    gate = torch.linspace(-20, 20, 1100)
    gate_up = torch.cat([gate, gate.flip(0) / 20]).to(DEVICE, dtype).view(1, -1).repeat(2, 1)
    for kind in Activation:
        for ours, theirs in ((triton_ops.activate, reference.activate), (triton_ops.gate, reference.gate)):
            close(ours(gate_up, kind), theirs(gate_up, kind))
            assert ours(gate_up * torch.nan, kind).isnan().all()
    close(triton_ops.softcap(gate_up, 7.0), reference.softcap(gate_up, 7.0))
    close(triton_ops.activate(gate_up / 1e4, Activation.TANH), reference.activate(gate_up / 1e4, Activation.TANH))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("pages", ["plain", "int8", "fp8"])
def test_rotary_and_the_write(triton_ops: Any, reference: Any, pages: str, dtype: torch.dtype) -> None:
    geometry = Geometry(6, 3, 80, 8, dtype, pages == "int8", pages == "fp8")
    q, k, v = triton_ops.split_qkv(draw(11, 12 * 80, dtype=dtype), 6, 3, 80)
    cos, sin = draw(100, 40), draw(100, 40, seed=1)
    positions = torch.arange(3, 14, dtype=torch.int32, device=DEVICE)
    metadata = moved(make_metadata(geometry, [(3, 11)], [[3, 1]]))
    ours, theirs = (on_device(geometry.new_cache(3), spare=5) for _ in range(2))
    got = triton_ops.rotary_write_kv(q, k, v, positions, cos, sin, ours, metadata)
    close(got, reference.rotary_write_kv(q, k, v, positions, cos, sin, theirs, metadata))
    for name in ("k", "v", "k_scale", "v_scale"):
        written, wanted = getattr(ours, name), getattr(theirs, name)
        if written is not None:
            # A rounded rotation may have the next code: of e4m3, an eighth more.
            absolute = 1 if written.dtype == torch.int8 else 8e-3
            relative = 0.13 if written.dtype == torch.float8_e4m3fn else 8e-3
            torch.testing.assert_close(
                written.float(), wanted.float(), atol=absolute, rtol=relative, equal_nan=True
            )  # fmt: skip
            if pages == "fp8" and name == "v":  # not rotated
                assert torch.equal(written.view(torch.uint8)[1:], wanted.view(torch.uint8)[1:])


@pytest.mark.parametrize("pages", ["int8", "fp8"])
def test_a_scale_of_nan_stays(triton_ops: Any, pages: str) -> None:
    geometry = Geometry(2, 2, 16, 8, BF16, pages == "int8", pages == "fp8")
    k = draw(3, 2, 16, dtype=BF16)
    k[1, 0, 7] = torch.nan
    cache = on_device(geometry.new_cache(1), spare=0)
    triton_ops.write_kv(k, k, cache, moved(make_metadata(geometry, [(0, 3)], [[1]])))
    assert cache.k_scale is not None
    assert cache.k_scale[1, :, :3].isnan().tolist() == [[False, True, False], [False, False, False]]


def attention_ops(make_triton_ops, batch_invariant: bool) -> Any:
    """TritonOps that split contexts so early that short rows have several splits."""
    ops = make_triton_ops(batch_invariant=batch_invariant)
    from pagoda.kernels.attention.triton_attention import PagedAttention

    ops.attention = PagedAttention(64, batch_invariant).attention
    return ops


# heads, KV heads, head size, block size, window, softcap
@pytest.mark.parametrize(
    ("shape", "dtype", "pages", "batch_invariant"),
    [
        ((3, 1, 48, 24, 0, 50.0), F32, "plain", False),
        ((2, 1, 64, 16, 40, 0.0), BF16, "plain", True),
        ((5, 1, 16, 8, 33, 30.0), BF16, "int8", False),
        ((4, 2, 32, 16, 0, 0.0), F16, "fp8", False),
        pytest.param((9, 3, 64, 16, 70, 0.0), F16, "plain", False, marks=pytest.mark.slow),
        pytest.param((2, 1, 256, 16, 0, 0.0), F16, "plain", False, marks=pytest.mark.slow),
        pytest.param((20, 1, 80, 8, 33, 30.0), BF16, "int8", True, marks=pytest.mark.slow),
        pytest.param((4, 2, 32, 16, 0, 0.0), F32, "int8", True, marks=pytest.mark.slow),
        pytest.param((6, 2, 80, 8, 33, 30.0), BF16, "fp8", True, marks=pytest.mark.slow),
        pytest.param((3, 1, 48, 24, 0, 0.0), F32, "fp8", False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attention(
    make_triton_ops, reference: Any, shape: tuple, dtype: torch.dtype, pages: str, batch_invariant: bool
) -> None:
    *sizes, window, softcap = shape
    geometry = Geometry(*sizes, dtype=dtype, int8_cache=pages == "int8", fp8_cache=pages == "fp8")
    rows = [Sequence.random(geometry, length, seed) for seed, length in enumerate((1, 9, 80))]
    ours = Rows(attention_ops(make_triton_ops, batch_invariant), geometry, rows)
    theirs = Rows(reference, geometry, rows, seed=1)
    tolerance = 2e-2 if pages != "plain" else ATTENTION_TOLERANCE[dtype]
    for step in ([(2, 60)], [(1, 8), (2, 17)], [(0, 1), (1, 1), (2, 1)], [(2, 2)]):
        got, want = (paged.step(step, 0.1, window, softcap) for paged in (ours, theirs))
        torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block_size", [16, 24])
def test_attention_whose_masks_are_in_a_loop_of_their_own(
    make_triton_ops, reference: Any, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on compute capability 9.0, with smaller tiles: chunks that all queries see whole have a loop without masks."""
    geometry = Geometry(3, 1, 48, block_size, dtype=BF16)
    rows = [Sequence.random(geometry, length, seed) for seed, length in enumerate((9, 130))]
    ours, theirs = Rows(attention_ops(make_triton_ops, False), geometry, rows), Rows(reference, geometry, rows, seed=1)
    from pagoda.kernels.attention import triton_attention

    taken: list[object] = []
    tiles = triton_attention.Tiles(32, 32, 4, 2, True)
    monkeypatch.setattr(triton_attention, "_PROMPTS_OF_64", tiles)
    monkeypatch.setattr(triton_attention, "_is_hopper", lambda q: taken.append(q) or True)
    for step in ([(1, 70)], [(0, 9), (1, 43)]):
        got, want = (paged.step(step, 0.1) for paged in (ours, theirs))
        torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)
    assert len(taken) == 2


class FilledUp:
    """Ops whose attention gets steps as they are captured in graphs: with further tokens, and rows without any."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attention(self, q: torch.Tensor, cache: KVLayer, metadata: AttentionMetadata, *args: Any) -> torch.Tensor:
        if metadata.max_query_len > 4:
            return self._ops.attention(q, cache, metadata, *args)
        on_host = (getattr(metadata, name).cpu().numpy() for name in ("query_start", "seq_lens", "block_table"))
        query_start, seq_lens, table = on_host
        size = PaddedSize(len(q) + 5, len(seq_lens) + 4, 4, 128)
        padded = BatchRows(query_start, seq_lens, [table], 4, 128, block_size=metadata.block_size).padded(size)
        assert padded.seq_lens[len(seq_lens) :].tolist() == [4, 1, 0, 0]
        arrays = [torch.from_numpy(array).to(DEVICE) for array in padded.arrays]
        (metadata,) = padded.metadata([metadata.slot_mapping], arrays)
        more = torch.full_like(q[:1], torch.nan).expand(5, -1, -1)
        return self._ops.attention(torch.cat([q, more]), cache, metadata, *args)[: len(q)]


@pytest.mark.parametrize(
    ("heads", "batch_invariant"),  # in the tile of a decode is room for the heads of several tokens, or of one
    [
        (2, True),
        (20, False),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(20, True, marks=pytest.mark.slow),
    ],
)
def test_attention_of_steps_that_are_filled_up(make_triton_ops, heads: int, batch_invariant: bool) -> None:
    geometry = Geometry(heads, 1, 32, 16, dtype=BF16)
    rows = [Sequence.random(geometry, length, seed) for seed, length in enumerate((4, 20, 90))]
    ops = attention_ops(make_triton_ops, batch_invariant)
    plain, filled = Rows(ops, geometry, rows), Rows(FilledUp(ops), geometry, rows, seed=1)
    tolerance = 0.0 if batch_invariant else 2e-2
    for step in ([(2, 80)], [(1, 9)], [(2, 3), (0, 1), (1, 4)], [(0, 2), (2, 1)]):
        want, got = plain.step(step, 0.1), filled.step(step, 0.1)
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [0, pytest.param(30, marks=pytest.mark.slow)])
def test_attention_has_the_same_bits_in_any_batch(make_triton_ops, window: int) -> None:
    """Decodes and chunks of any length, alone or in a batch, past the first splits."""
    geometry = Geometry(3, 1, 48, 24, dtype=BF16)
    rows = [Sequence.random(geometry, length, seed) for seed, length in enumerate((100, 20))]
    ops = attention_ops(make_triton_ops, batch_invariant=True)
    single = Rows(ops, geometry, rows[:1])
    want = torch.cat([single.step([(0, count)], 0.1, window) for count in (62, 1, 1, 1, 35)])
    rng = random.Random(7)
    together, got = Rows(ops, geometry, rows, seed=5), []
    while together.computed[0] < 100:
        count = min(rng.choice([1, 30, 40]), 100 - together.computed[0])
        neighbour = min(rng.choice([0, 1, 7]), 20 - together.computed[1])
        step = [(1, neighbour), (0, count)] if neighbour else [(0, count)]
        got.append(together.step(step, 0.1, window)[neighbour:])
    assert torch.equal(torch.cat(got), want)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_linear_has_the_same_bits_in_any_batch(make_triton_ops, reference: Any, dtype: torch.dtype) -> None:
    ops = make_triton_ops(batch_invariant=True)
    x, weight, bias = draw(67, 150, dtype=dtype), draw(45, 150, dtype=dtype, seed=1) / 10, draw(45, dtype=dtype, seed=2)
    for with_bias in (None, bias):
        ours, theirs = (each.prepare_linear(weight, with_bias) for each in (ops, reference))
        got = ops.linear(x, ours)
        torch.testing.assert_close(got, reference.linear(x, theirs), atol=2e-2, rtol=2e-2)
        close(ops.logits(x, ours) / 10, reference.logits(x, theirs) / 10)
        assert torch.equal(got, torch.cat([ops.linear(x[:3], ours), ops.linear(x[3:], ours)]))


@pytest.mark.parametrize("kind", ["normal", "ties", "masked"])
def test_sampled_tokens_are_the_references(triton_ops: Any, kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    draws, vocab = 12, 2053  # in two blocks
    logits = torch.from_numpy(rng.normal(0, 3, (draws, vocab)).astype(np.float32))
    if kind == "ties":
        logits = logits.round()
    elif kind == "masked":
        logits[torch.from_numpy(rng.random((draws, vocab)) < 0.9)] = -torch.inf
        logits[:, vocab // 2] = 0.0
    params = columns(rng, draws, vocab)
    moved_logits = logits.to(DEVICE)
    best = triton_ops.best_tokens(moved_logits)
    assert torch.equal(best[0].cpu(), logits.max(-1).values)
    assert best[1].tolist() == [int(np.argmax(row)) for row in logits.numpy()]
    assert triton_ops.sample(moved_logits, params, best).tolist() == sampling.sample(logits, params).tolist()


@pytest.mark.parametrize("spread", [3.0, pytest.param(0.2, marks=pytest.mark.slow)])
def test_tokens_of_a_vocabulary_of_several_chunks(triton_ops: Any, spread: float) -> None:
    """Where the rows are nearly flat, more tokens may be drawn than there is room for among the candidates."""
    from pagoda.kernels.sampling.triton_sampling import CHUNK, find_candidates

    rng = np.random.default_rng(11)
    vocab, filters = 2 * CHUNK + 905, [(0, 1.0), (50, 1.0), (0, 0.9), (20, 0.95), (5000, 0.999), (0, 0.02), (0, 1.0)]
    logits = torch.from_numpy(rng.normal(0, spread, (len(filters), vocab)).astype(np.float32))
    logits[:, 7] = logits[:, CHUNK + 7] = logits.max(-1).values
    top_k, top_p = (np.array(column) for column in zip(*filters, strict=True))
    min_p = np.array([0.0, 0.0, 0.05, 0.0, 0.0, 0.0, 0.05], np.float32)
    uniform = np.array([0.7, 0.99, 0.3, 0.5, 0.6, 0.9, 0.95])
    one = np.ones(len(logits), np.float32)
    params = DrawParams(one, top_k.astype(np.int32), top_p.astype(np.float32), min_p, uniform)
    device, columns = logits.to(DEVICE), tuple(torch.from_numpy(column).to(DEVICE) for column in params.columns)
    found = find_candidates(device, device.max(-1).values, columns, has_filters=True)
    assert (found.nums == 0).all() == (spread < 1)
    for row, num in enumerate(found.nums.tolist()):
        kept = found.ids[row, :num].long().cpu()
        assert torch.equal(found.values[row, :num].cpu(), logits[row, kept])
        assert num == 0 or kept.tolist() == (logits[row] >= logits[row, kept].min()).nonzero()[:, 0].tolist()
    assert triton_ops.sample(device, params).tolist() == sampling.sample(logits, params).tolist()
    without = params[np.array([0, 6])]  # without filters
    assert triton_ops.sample(device[[0, 6]], without).tolist() == sampling.sample(logits[[0, 6]], without).tolist()


def test_a_row_without_a_token_gives_nan(triton_ops: Any) -> None:
    logits = draw(3, 100)
    logits[0, 70] = torch.nan
    logits[2] = -torch.inf
    values, ids = triton_ops.best_tokens(logits)
    assert values.isnan().tolist() == [True, False, False]
    assert ids[1] == logits[1].argmax()
    one = np.ones(3, np.float32)
    params = DrawParams(one, np.full(3, 5, np.int32), one / 2, 0 * one, one.astype(np.float64) / 2)
    tokens = triton_ops.sample(logits, params, (values, ids))  # ends, for rows that cannot be sampled from too
    assert ((tokens >= 0) & (tokens < 100)).all()


@pytest.mark.parametrize("seed", range(3))
def test_constraints_and_masks(triton_ops: Any, reference: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    constraints = random_constraints(rng, 12, 1000)
    logits = torch.from_numpy(rng.normal(0, 4, (12, 1000)).astype(np.float32))
    logits[3, 9], logits[4, 0], logits[6, 0] = torch.inf, -torch.inf, 0.0
    got, want = logits.to(DEVICE).clone(), logits.clone()
    triton_ops.constrain(got, constraints)
    reference.constrain(want, constraints)
    assert torch.equal(got.cpu().nan_to_num(nan=1e30), want.nan_to_num(nan=1e30))
    draws, bits = np.array([7, 2]), rng.integers(-(2**31), 2**31, (2, 32)).astype(np.int32)
    triton_ops.mask_logits(got, draws, bits)
    reference.mask_logits(want, draws, bits)
    assert torch.equal(got.cpu().nan_to_num(nan=1e30), want.nan_to_num(nan=1e30))


@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "experts", "top_k", "dtype"),
    [
        (1, 64, 32, 4, 2, F32),
        (1, 64, 32, 4, 2, BF16),
        (37, 33, 49, 8, 3, F32),
        (70, 20, 16, 2, 1, BF16),
        pytest.param(37, 33, 49, 8, 3, BF16, marks=pytest.mark.slow),
        pytest.param(70, 20, 16, 2, 1, F32, marks=pytest.mark.slow),
    ],
)
def test_experts(
    triton_ops: Any, reference: Any,
    tokens: int, hidden: int, inner: int, experts: int, top_k: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    up, down = draw(experts, 2 * inner, hidden, dtype=dtype) / 4, draw(experts, hidden, inner, dtype=dtype, seed=1) / 4
    x, router = draw(tokens, hidden, dtype=dtype, seed=2), draw(tokens, experts, seed=3)
    ours, theirs = (
        [ops.prepare_experts([ops.prepare_linear(weight) for weight in stack]) for stack in (up, down)]
        for ops in (triton_ops, reference)
    )

    def run(ops: Any, rows: slice, stacks: Any) -> torch.Tensor:
        return ops.moe(x[rows], *ops.route(router[rows], top_k, True), *stacks)

    got = run(triton_ops, slice(None), ours)
    tolerance = 1e-5 if dtype == F32 else 2e-2
    torch.testing.assert_close(got, run(reference, slice(None), theirs), atol=tolerance, rtol=tolerance)
    alone = [run(triton_ops, slice(t, t + 1), ours) for t in (0, tokens - 1)]
    assert torch.equal(torch.cat(alone), got[[0, -1]])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_low_rank(triton_ops: Any, reference: Any, dtype: torch.dtype) -> None:
    rows, size = 150, 70
    slots = {
        1: [LowRankPiece(draw(40, size) / 8, draw(rows, 40, seed=1) / 6)],
        3: [
            LowRankPiece(draw(5, size, seed=2) / 8, draw(60, 5, seed=3), 0, draw(60, seed=4)),
            LowRankPiece(draw(17, size, seed=5) / 8, draw(30, 17, seed=6), 100),
        ],
    }
    tables = [ops.make_low_rank_table(5, rows, size, dtype) for ops in (triton_ops, reference)]
    x, before = draw(6, size + 3, dtype=dtype, seed=7)[:, :size], draw(6, rows, dtype=dtype, seed=8)
    adapters, token_ids = (torch.tensor(ids, dtype=torch.int32, device=DEVICE) for ids in
                           ([0, 3, 1, 4, 3, 1], [0, 69, 3, 3, 70, 2**20]))  # fmt: skip
    single = []
    for slot, pieces in sorted(slots.items(), reverse=True):  # the larger rank comes later
        results = []
        for ops, table in zip((triton_ops, reference), tables, strict=True):
            table.fill(slot, pieces)
            y, embedded = before.clone(), before.clone()
            ops.add_low_rank(y, x, adapters, table)
            ops.add_low_rank_embedding(embedded, token_ids, adapters, table)
            results.append((y, embedded))
        for got, want in zip(*results, strict=True):
            tolerance = 1e-5 if dtype == F32 else 3e-2
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
        single.append(results[0][0][[0, 1, 3, 4]])
    assert torch.equal(single[0], single[1])  # rows of slot 3, whatever other adapters need
    tables[0].clear(3)
    y = before.clone()
    triton_ops.add_low_rank(y, x, adapters, tables[0])
    assert torch.equal(y[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_low_rank_has_the_same_bits_in_any_batch(triton_ops: Any, dtype: torch.dtype) -> None:
    """Whatever the neighbours' adapters are, and the larger ones that the table has or has not."""
    rows, size, tokens = 150, 131, 10
    slots = {
        1: [LowRankPiece(draw(40, size) / 8, draw(rows, 40, seed=1) / 6)],
        2: [
            LowRankPiece(draw(5, size, seed=2) / 8, draw(60, 5, seed=3), 0, draw(60, seed=4)),
            LowRankPiece(draw(17, size, seed=5) / 8, draw(30, 17, seed=6), 100),
        ],
        4: [LowRankPiece(draw(1, size, seed=7) / 8, draw(1, 1, seed=8), rows - 1)],
    }
    together = triton_ops.make_low_rank_table(5, rows, size, dtype)
    alone = {slot: triton_ops.make_low_rank_table(5, rows, size, dtype) for slot in slots}
    for slot, pieces in slots.items():
        together.fill(slot, pieces)
        alone[slot].fill(slot, pieces)
    adapters = torch.tensor([0, 1, 2, 3, 4] * 2, dtype=torch.int32, device=DEVICE)
    token_ids = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    x, before = draw(tokens, size, dtype=dtype, seed=9), draw(tokens, rows, dtype=dtype, seed=10)
    for op, given in ((triton_ops.add_low_rank, x), (triton_ops.add_low_rank_embedding, token_ids)):
        got = before.clone()
        op(got, given, adapters, together)
        for row, slot in enumerate(adapters.tolist()):
            single, at = before[row : row + 1].clone(), slice(row, row + 1)
            op(single, given[at], adapters[at], alone.get(slot, together))
            assert torch.equal(single[0], got[row]), (row, slot)
            assert torch.equal(got[row], before[row]) == (slot not in slots)
