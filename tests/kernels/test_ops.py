"""Every op but attention: each implementation against the reference, over ugly shapes, and row by row."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from pagoda.base.errors import InvariantBroken
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.ops.declare import Activation
from tests.device_under_test import DeviceUnderTest
from tests.kernels.paged import Geometry, make_metadata

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
# One rounding of the result, and for float32 a few of the sums.
TOLERANCE = {F32: 4e-6, BF16: 8e-3, F16: 1e-3}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 7, 70])
@pytest.mark.parametrize("hidden", [16, 37, 576, 1031])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_norms(
    fast: Ops, reference: ReferenceOps, tokens: int, hidden: int, unit_offset: bool, dtype: torch.dtype
) -> None:
    x, residual, weight = (draw(*shape, dtype=dtype) for shape in ((tokens, hidden), (tokens, hidden), (hidden,)))
    residual = residual.flip(0)
    close(fast.rms_norm(x, weight, 1e-5, unit_offset), reference.rms_norm(x, weight, 1e-5, unit_offset))
    got = fast.add_rms_norm(x, residual, weight, 1e-5, unit_offset)
    want = reference.add_rms_norm(x, residual, weight, 1e-5, unit_offset)
    close(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(fast.add(x, residual), want[1])


@DTYPES
@pytest.mark.parametrize("tokens", [1, 7, 70])
@pytest.mark.parametrize("hidden", [16, 37, 384, 1031])
def test_layer_norms(fast: Ops, reference: ReferenceOps, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight, bias = (draw(*shape, dtype=dtype, seed=len(shape)) for shape in ((tokens, hidden), (hidden,), (hidden,)))
    x = x * 3 + 5  # far from a mean of 0
    residual = draw(tokens, hidden, dtype=dtype).flip(0)
    close(fast.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))
    got = fast.add_layer_norm(x, residual, weight, bias, 1e-12)
    want = reference.add_layer_norm(x, residual, weight, bias, 1e-12)
    close(got[0], want[0])
    assert torch.equal(got[1], want[1])
    with pytest.raises((ValueError, RuntimeError)):
        fast.layer_norm(x, weight[1:].contiguous(), bias, 1e-5)


@DTYPES
def test_norm_of_heads_inside_a_fused_projection(fast: Ops, reference: ReferenceOps, dtype: torch.dtype) -> None:
    """QK norm: vectors of one head each, strided over tokens and heads."""
    q, k, _ = fast.split_qkv(draw(5, (4 + 2 * 2) * 80, dtype=dtype), 4, 2, 80)
    weight = draw(80, dtype=dtype)
    for heads in (q, k):
        close(fast.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))
        all_heads = torch.randn(heads.shape[1] * heads.shape[2], dtype=dtype)
        got, want = (ops.rms_norm(heads, all_heads, 1e-6) for ops in (fast, reference))
        assert got.shape == heads.shape
        close(got, want)
        close(want, reference.rms_norm(heads.flatten(1), all_heads, 1e-6).view(heads.shape))


@DTYPES
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("groups", "dim"), [(1, 576), (4, 37)])
def test_gated_norms(
    fast: Ops, reference: ReferenceOps, groups: int, dim: int, gate_first: bool, dtype: torch.dtype
) -> None:
    wide, gate = draw(9, 2 * groups * dim + 3, dtype=dtype), draw(9, groups * dim, dtype=dtype, seed=1)
    x = fast.select_heads(wide, 3, groups, dim)
    for weight in (draw(dim, dtype=dtype, seed=2), draw(groups * dim, dtype=dtype, seed=3)):
        got, want = (ops.gated_rms_norm(x, gate, weight, 1e-5, gate_first) for ops in (fast, reference))
        close(got, want)
        group = slice((groups - 1) * dim, None)
        gated = F.silu(gate[:, group].float())
        last = x[:, -1].float() * gated if gate_first else x[:, -1].float()
        last = F.rms_norm(last, (dim,), weight[-dim:].float(), 1e-5)
        close(want[:, group], (last if gate_first else last * gated).to(dtype))


@DTYPES
@pytest.mark.parametrize("width", [8, 100, 1536])
@pytest.mark.parametrize("tokens", [1, 3, 65])
def test_gated_activations(fast: Ops, reference: ReferenceOps, tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = 4 * draw(tokens, 2 * width, dtype=dtype)
    for kind in Activation:
        close(fast.gate(gate_up, kind), reference.gate(gate_up, kind))


@DTYPES
@pytest.mark.parametrize("kind", Activation, ids=lambda kind: kind.name)
def test_plain_activations(fast: Ops, reference: ReferenceOps, kind: Activation, dtype: torch.dtype) -> None:
    for x in (4 * draw(65, 100, dtype=dtype), torch.linspace(-20, 20, 9001).to(dtype).view(1, -1)):
        close(fast.activate(x, kind), reference.activate(x, kind))
    assert fast.activate(torch.full((1, 3), torch.nan, dtype=dtype), kind).isnan().all()


@DTYPES
@pytest.mark.parametrize(("tokens", "width"), [(1, 48), (3, 40), (70, 1000)])
def test_activations_of_some_columns(
    fast: Ops, reference: ReferenceOps, tokens: int, width: int, dtype: torch.dtype
) -> None:
    x = draw(tokens, width + 77, dtype=dtype)
    gate = fast.select_heads(x, 33, 1, width)
    for kind in Activation:
        close(fast.activate(gate, kind), reference.activate(x[:, None, 33 : 33 + width].contiguous(), kind))


@DTYPES
def test_xielu(fast: Ops, reference: ReferenceOps, dtype: torch.dtype) -> None:
    for x in (torch.linspace(-20, 20, 9001), torch.linspace(-1e-2, 1e-2, 77)):
        given = x.to(dtype).view(1, -1)
        close(fast.xielu(given, 0.9, 0.7, 0.5, -1e-6), reference.xielu(given, 0.9, 0.7, 0.5, -1e-6))
    assert fast.xielu(torch.full((1, 3), torch.nan, dtype=dtype), 0.9, 0.7, 0.5, -1e-6).isnan().all()


@DTYPES
def test_activations_at_their_ends(fast: Ops, dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e4, -90.0, -1e-3, 0.0, 1e-3, 90.0, 1e4], dtype=dtype)
    ones = torch.ones_like(gate)

    for kind in (Activation.SILU, Activation.GELU, Activation.GELU_TANH):
        gated, plain = fast.gate(torch.cat([gate, ones]).unsqueeze(0), kind), fast.activate(gate.unsqueeze(0), kind)
        for out in (gated[0], plain[0]):
            close(out[[0, 1, 3, 5, 6]], torch.tensor([0.0, 0.0, 0.0, 90.0, 1e4], dtype=dtype))
            assert out[2] < 0 < out[4]


@DTYPES
@pytest.mark.parametrize("elements", [1, 33, 50_000])
def test_softcap(fast: Ops, reference: ReferenceOps, elements: int, dtype: torch.dtype) -> None:
    x = 100 * draw(2, elements, dtype=dtype)
    close(fast.softcap(x, 30.0) / 30.0, reference.softcap(x, 30.0) / 30.0)


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 33.94])
def test_embedding(fast: Ops, reference: ReferenceOps, scale: float, dtype: torch.dtype) -> None:
    table = draw(50, 40, dtype=dtype)
    token_ids = torch.tensor([0, 49, 7, 7], dtype=torch.int32)
    assert torch.equal(fast.embedding(token_ids, table, scale), reference.embedding(token_ids, table, scale))


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 33.94])
@pytest.mark.parametrize(("vocab", "hidden"), [(50, 40), (33, 7), (1, 1), (64, 17)])
def test_embedding_of_a_tied_head(
    fast: Ops, reference: ReferenceOps, vocab: int, hidden: int, scale: float, dtype: torch.dtype
) -> None:
    """Rows read from the packed head are the rows of the table, bit for bit."""
    table = draw(vocab, hidden, dtype=dtype)
    shared = fast.table_of(fast.prepare_linear(table.clone()))
    if shared is None:
        assert (fast.name, dtype) == ("torch", torch.bfloat16)  # packed by torch in its own layout
        return
    token_ids = torch.tensor([0, vocab - 1, vocab // 2, vocab // 2], dtype=torch.int32)
    assert torch.equal(fast.embedding(token_ids, shared, scale), reference.embedding(token_ids, table, scale))


@DTYPES
@pytest.mark.parametrize("head_dim", [32, 80, 128])
def test_rotary(fast: Ops, reference: ReferenceOps, head_dim: int, dtype: torch.dtype) -> None:
    q, k, _ = fast.split_qkv(draw(6, 7 * head_dim, dtype=dtype), 3, 2, head_dim)
    positions = torch.tensor([0, 5, 5, 99, 1, 64], dtype=torch.int32)
    cos, sin = draw(100, head_dim // 2, dtype=F32), draw(100, head_dim // 2, dtype=F32, seed=1)
    for got, want in zip(
        fast.rotary(q, k, positions, cos, sin), reference.rotary(q, k, positions, cos, sin), strict=True
    ):
        close(got, want)


@DTYPES
@pytest.mark.parametrize("runs", [1, 2, 20])
def test_several_positions_of_a_row(native: NativeOps, reference: ReferenceOps, runs: int, dtype: torch.dtype) -> None:
    """Each run of a head's pairs is rotated to its own position, with and without a write to the cache."""
    geometry = Geometry(4, 2, 80, 8, dtype, False)
    q, k, v = native.split_qkv(draw(21, 8 * 80, dtype=dtype), 4, 2, 80)
    cos, sin = draw(100, 40, dtype=F32), draw(100, 40, dtype=F32, seed=1)
    positions = torch.randint(0, 100, (21, runs), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    metadata, cache, other = make_metadata(geometry, [(3, 21)], [[3, 1, 2]]), *(geometry.new_cache(3) for _ in "ab")
    got, want = (ops.rotary(q, k, positions, cos, sin) for ops in (native, reference))
    for ours, theirs in zip(got, want, strict=True):
        close(ours, theirs)
    halves, whole = got[0].view(21, 4, 2, runs, -1), native.rotary(q, k, positions[:, 0].contiguous(), cos, sin)[0]
    assert torch.equal(halves[:, :, :, 0], whole.view(21, 4, 2, runs, -1)[:, :, :, 0])
    assert torch.equal(native.rotary_write_kv(q, k, v, positions, cos, sin, cache, metadata), got[0])
    native.write_kv(got[1], v, other, metadata)
    assert torch.equal(cache.k, other.k)


def test_positions_that_do_not_divide_a_head(native: NativeOps) -> None:
    q, angles = draw(2, 1, 80, dtype=F32), draw(9, 40, dtype=F32)
    with pytest.raises(ValueError, match="do not divide the 40 pairs of a head"):
        native.rotary(q, q, torch.zeros((2, 3), dtype=torch.int32), angles, angles)
    with pytest.raises(InvariantBroken, match="rotary: positions: element 3 is 9"):
        native.rotary(q, q, torch.tensor([[0, 1], [2, 9]], dtype=torch.int32), angles, angles)


@DTYPES
@pytest.mark.parametrize("int8_cache", [False, True], ids=["plain", "int8"])
def test_rotary_fused_with_the_write(fast: Ops, int8_cache: bool, dtype: torch.dtype) -> None:
    """The same bits as one after the other."""
    geometry = Geometry(4, 2, 80, 8, dtype, int8_cache)
    q, k, v = fast.split_qkv(draw(21, 8 * 80, dtype=dtype), 4, 2, 80)
    cos, sin = draw(100, 40, dtype=F32), draw(100, 40, dtype=F32, seed=1)
    positions = torch.arange(3, 24, dtype=torch.int32)
    metadata = make_metadata(geometry, [(3, 21)], [[3, 1, 2]])
    fused, plain = geometry.new_cache(3), geometry.new_cache(3)
    got = fast.rotary_write_kv(q, k, v, positions, cos, sin, fused, metadata)
    want, rotated = fast.rotary(q, k, positions, cos, sin)
    fast.write_kv(rotated, v, plain, metadata)
    assert torch.equal(got, want)
    for name in ("k", "v", "k_scale", "v_scale"):
        a, b = getattr(fused, name), getattr(plain, name)
        assert a is b is None or torch.equal(a, b)


@DTYPES
@pytest.mark.parametrize("rows", [1, 5])
def test_linear_and_logits(fast: Ops, reference: ReferenceOps, rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = draw(rows, 96, dtype=dtype), draw(70, 96, dtype=dtype, seed=1) / 10, draw(70, dtype=dtype)
    for with_bias in (None, bias):
        ours, theirs = fast.prepare_linear(weight, with_bias), reference.prepare_linear(weight, with_bias)
        assert (ours.out_features, ours.in_features) == (70, 96)
        torch.testing.assert_close(
            fast.linear(x, ours), reference.linear(x, theirs), atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype] * 4
        )
        got = fast.logits(x, ours)
        assert got.dtype == F32
        tolerance = TOLERANCE[dtype] * 4
        torch.testing.assert_close(got, reference.logits(x, theirs), atol=tolerance, rtol=tolerance)


@DTYPES
def test_scaled_rows(fast: Ops, reference: ReferenceOps, dtype: torch.dtype) -> None:
    x = draw(37, 99, dtype=dtype)
    heads = draw(37, 4, 33, dtype=dtype)[:, 1:3]
    for rows in (x, heads):
        close(fast.scale(rows, 0.22), reference.scale(rows, 0.22))
    for factors in (draw(37, 1, dtype=dtype, seed=1), draw(37, 1, dtype=F32, seed=1)):
        for rows in (x, heads):
            got = fast.scale_rows(rows, factors)
            assert got.shape == rows.shape
            close(got, reference.scale_rows(rows, factors))
    close(reference.scale_rows(heads, torch.arange(37.0).unsqueeze(1))[5], 5 * heads[5])


@DTYPES
def test_products(fast: Ops, reference: ReferenceOps, dtype: torch.dtype) -> None:
    x, y = draw(37, 99, dtype=dtype), draw(37, 4, 99, dtype=dtype, seed=1)
    for other in (y[:, 2:3], y[:, 0], x):
        got = fast.multiply(x, other)
        assert got.shape == x.shape
        close(got, reference.multiply(x, other))


def test_factors_of_a_product_have_as_many_elements(native: NativeOps) -> None:
    with pytest.raises(ValueError, match=r"rows of x \(3, 4\) and y \(3, 2\) have not as many"):
        native.multiply(draw(3, 4, dtype=F32), draw(3, 2, dtype=F32))


def test_a_factor_is_needed_for_each_row(native: NativeOps) -> None:
    with pytest.raises(ValueError, match=r"factors \(3, 2\) are not one per row"):
        native.scale_rows(draw(3, 4, dtype=F32), draw(3, 2, dtype=F32))


def test_select_rows(fast: Ops) -> None:
    x = draw(9, 4, dtype=F32)
    assert torch.equal(fast.select_rows(x, torch.tensor([8, 0, 3])), x[[8, 0, 3]])
    together = fast.select_rows(x, torch.tensor([[8, 0], [3, 3]]))
    assert torch.equal(together, torch.cat([x[[8, 3]], x[[0, 3]]], dim=1))


@DTYPES
def test_mean_rows(fast: Ops, reference: ReferenceOps, dtype: torch.dtype) -> None:
    x, index = draw(9, 33, dtype=dtype), torch.tensor([[8, 0, 3], [3, 3, 1]])
    close(fast.mean_rows(x, index), reference.mean_rows(x, index))
    assert torch.equal(fast.mean_rows(x, index[1:]), fast.mean_rows(x, index)[1:])


@DTYPES
def test_put_rows(fast: Ops, reference: ReferenceOps, dtype: torch.dtype) -> None:
    x, rows, index = draw(9, 33, dtype=dtype), draw(3, 33, dtype=dtype, seed=1), torch.tensor([8, 0, 3])
    got, want = x.clone(), x.clone()
    fast.put_rows(got, rows, index)
    reference.put_rows(want, rows, index)
    assert torch.equal(got, want)
    assert torch.equal(got[index], rows)
    others = [row for row in range(9) if row not in (8, 0, 3)]
    assert torch.equal(got[others], x[others])


@DTYPES
def test_put_rows_of_a_view(fast: Ops, dtype: torch.dtype) -> None:
    """One head of wider rows."""
    x, wide, index = draw(9, 33, dtype=dtype), draw(3, 99, dtype=dtype, seed=1), torch.tensor([8, 0, 3])
    fast.put_rows(x, fast.select_heads(wide, 33, 1, 33), index)
    assert torch.equal(x[index], wide[:, 33:66])


@DTYPES
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_join(fast: Ops, reference: ReferenceOps, rows: int, dtype: torch.dtype) -> None:
    x, y = draw(rows, 33, dtype=dtype), draw(rows, 40, dtype=dtype, seed=1)
    for first in (x, x.view(rows, 3, 11), draw(rows, 50, dtype=dtype)[:, 7:40]):
        want = reference.join(first, y)
        assert torch.equal(fast.join(first, y), want)
        assert torch.equal(want[:, 33:], y)
        assert torch.equal(want[:, :33], first.reshape(rows, 33))


def test_put_rows_refuses_rows_that_are_not_there(fast: Ops, device_under_test: DeviceUnderTest) -> None:
    device_under_test.must_check_indices()
    x = draw(9, 33, dtype=F32)
    before = x.clone()
    with pytest.raises(InvariantBroken, match="put_rows: index: element 1"):
        fast.put_rows(x, draw(3, 33, dtype=F32, seed=1), torch.tensor([0, 9, 1]))
    assert torch.equal(x, before)


def test_rows_to_put_must_fit(native: NativeOps) -> None:
    for rows in (draw(2, 5, dtype=F32), draw(2, 4, dtype=BF16)):
        with pytest.raises(ValueError, match="rows"):
            native.put_rows(draw(3, 4, dtype=F32), rows, torch.tensor([0, 1]))


@DTYPES
def test_bits_depend_on_the_row_alone(native: NativeOps, dtype: torch.dtype) -> None:
    """Native elementwise ops: row by row, by one thread and by three, the same bits."""
    tokens = 90
    ops = {threads: NativeOps(native.library, threads) for threads in (1, 3)}
    x, residual = draw(tokens, 576, dtype=dtype), draw(tokens, 576, dtype=dtype, seed=1)
    weight, gate_up = draw(576, dtype=dtype, seed=2), draw(tokens, 3072, dtype=dtype, seed=3)
    for run in (
        lambda o, rows: o.add_rms_norm(x[rows], residual[rows], weight, 1e-5)[0],
        lambda o, rows: o.rms_norm(x[rows], weight, 1e-5),
        *(partial(lambda o, rows, kind: o.gate(gate_up[rows], kind), kind=kind) for kind in Activation),
        *(partial(lambda o, rows, kind: o.activate(x[rows], kind), kind=kind) for kind in Activation),
        lambda o, rows: o.scale(x[rows], 0.3),
        lambda o, rows: o.scale(x[rows][:, 2:], 0.3),
        lambda o, rows: o.multiply(x[rows], residual[rows]),
        lambda o, rows: o.scale_rows(x[rows], residual[rows, :1].contiguous()),
        lambda o, rows: o.gated_rms_norm(x[rows].view(-1, 4, 144), residual[rows], weight, 1e-5, True),
        lambda o, rows: o.layer_norm(x[rows], weight, weight, 1e-5),
        lambda o, rows: o.add_layer_norm(x[rows], residual[rows], weight, weight, 1e-5)[0],
        lambda o, rows: o.softcap(x[rows], 20.0),
        lambda o, rows: o.xielu(x[rows], 0.9, 0.7, 0.5, -1e-6),
    ):
        whole = run(ops[1], slice(None))
        assert torch.equal(whole, run(ops[3], slice(None)))
        assert torch.equal(whole, torch.cat([run(ops[1], slice(i, i + 1)) for i in range(tokens)]))
