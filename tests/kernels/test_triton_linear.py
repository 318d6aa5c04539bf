"""Triton's products with quantised weights, against the float32 product with the values that the codes stand for."""

import random
from typing import Any

import pytest
import torch

from pagoda.kernels.linear import triton_vector
from pagoda.kernels.linear.forms import Q4, Q4_MIN, Q4_ZERO, Q6, Q8, WeightFormat
from pagoda.kernels.linear.quantize import CodedWeight, QuantizedWeight, quantize, quantize_fp8, quantize_vectors

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {F32: 2e-5, BF16: 2e-2, F16: 3e-3}

KINDS = {
    "int8": WeightFormat(Q8, 64),
    "int8 of 32": WeightFormat(Q8, 32),
    "int4": WeightFormat(Q4, 32),
    "int4 with minima": WeightFormat(Q4_MIN, 32),
    "int4 of 128 with minima": WeightFormat(Q4_MIN, 128),
    "int4 of 64 with zeros": WeightFormat(Q4_ZERO, 64),
    "int4 of 128 with zeros": WeightFormat(Q4_ZERO, 128),
    "int6": WeightFormat(Q6, 16),
}


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def coded(kind: str, out_features: int, in_features: int, seed: int = 0) -> QuantizedWeight:
    """Random codes of every value, with scales that float16 holds exactly."""
    held = KINDS[kind]
    bits, group = held.form.bits, held.group
    groups = -(-in_features // group)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (out_features, groups * group), generator=generator, dtype=torch.uint8)
    codes[:, in_features:] = 255 >> (8 - bits)  # what is not there must not count
    scales = (torch.rand(out_features, groups, generator=generator) / (1 << bits)).half()
    offsets = None
    if held.form is Q4_MIN:
        offsets = -torch.rand(out_features, groups, generator=generator).half() / 2
    elif held.form is Q4_ZERO:
        offsets = torch.randint(0, 17, (out_features, groups), generator=generator, dtype=torch.uint8)
    return QuantizedWeight(held.form, codes, scales, offsets, in_features, group).to(DEVICE)


def drawn(kind: str, out_features: int, in_features: int, seed: int = 0) -> CodedWeight:
    """Return a random weight of a kind: of KINDS, "fp8" or "widened fp8"."""
    if "fp8" in kind:
        return quantize_fp8(draw(out_features, in_features, seed=seed) / 4)
    return coded(kind, out_features, in_features, seed)


def prepared(ops: Any, kind: str, weight: CodedWeight, dtype: torch.dtype) -> Any:
    """Prepare a weight; for the reference, widened fp8 is a weight of floats, whose input is not rounded."""
    if kind == "widened fp8" and ops.name == "reference":
        return ops.prepare_linear(weight.dequantize())
    return ops.prepare_quantized_linear(weight, dtype)


def check(ops: Any, reference: Any, weight: CodedWeight, rows: int, dtype: torch.dtype,
          with_bias: bool) -> torch.Tensor:  # fmt: skip
    out_features, in_features = weight.dequantize().shape
    bias = draw(out_features, dtype=dtype, seed=3) if with_bias else None
    x = draw(rows, in_features + 8, dtype=dtype, seed=rows)[:, :in_features] / in_features**0.5
    ours = ops.prepare_quantized_linear(weight, dtype, bias)
    theirs = reference.prepare_quantized_linear(weight, F32, bias)
    for name in ("linear", "logits"):
        got, want = getattr(ops, name)(x, ours), getattr(reference, name)(x, theirs)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    return got


@pytest.mark.parametrize("kind", KINDS)
def test_codes(triton_ops: Any, reference: Any, kind: str) -> None:
    check(triton_ops, reference, coded(kind, 70, 330), 5, BF16, with_bias=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_all_shapes(triton_ops: Any, reference: Any, kind: str, dtype: torch.dtype) -> None:
    rng = random.Random(kind)
    for rows in (1, 16, 17, 40, 64, 65, 130):
        weight = coded(kind, rng.randrange(1, 150), rng.randrange(1, 700), seed=rows)
        check(triton_ops, reference, weight, rows, dtype, rng.random() < 0.5)


def test_a_long_sum_is_divided(triton_ops: Any, reference: Any) -> None:
    """A decode step's product has several parts, summed from first to last; with batch_invariant it has one."""
    check(triton_ops, reference, coded("int8", 10, 1500), 2, F32, with_bias=True)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("int8", BF16),
        ("int8", F32),
        ("int4", BF16),
        ("int4 with minima", BF16),
        ("int4 of 128 with zeros", BF16),
        pytest.param("int6", BF16, marks=pytest.mark.slow),
        ("fp8", BF16),
        ("widened fp8", BF16),
        pytest.param("widened fp8", F32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_codes_have_the_same_bits_in_any_batch(make_triton_ops, reference: Any, kind: str, dtype: torch.dtype) -> None:
    """In one tile of rows or in two, and in other places of them."""
    ops = make_triton_ops(batch_invariant=True, multiplies_fp8=kind != "widened fp8")
    x, weight = draw(67, 150, dtype=dtype), drawn(kind, 45, 150)
    ours, theirs = prepared(ops, kind, weight, dtype), prepared(reference, kind, weight, F32)
    for multiply in (ops.linear, ops.logits):
        got = multiply(x, ours)
        torch.testing.assert_close(got.float(), reference.logits(x, theirs), atol=0.1, rtol=2e-2)
        assert torch.equal(got, torch.cat([multiply(x[:3], ours), multiply(x[3:], ours)]))


def test_quantised_floats(triton_ops: Any, reference: Any) -> None:
    """What --quantization int8 makes of floats."""
    check(triton_ops, reference, quantize(draw(33, 100, dtype=BF16)), 3, BF16, with_bias=False)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("multiplies_fp8", [True, False])
def test_fp8(make_triton_ops, reference: Any, multiplies_fp8: bool, dtype: torch.dtype) -> None:
    ops = make_triton_ops(multiplies_fp8=multiplies_fp8)
    weight = quantize_fp8(draw(70, 200) * torch.linspace(0.01, 3, 70, device=DEVICE).unsqueeze(1))
    if multiplies_fp8:
        check(ops, reference, weight, 5, dtype, with_bias=True)
        check(ops, reference, weight, 67, dtype, with_bias=False)
    else:  # the input is not rounded
        x = draw(19, 200, dtype=dtype) / 14
        want = x.float() @ weight.dequantize().T
        got = ops.linear(x, ops.prepare_quantized_linear(weight, dtype))
        torch.testing.assert_close(got.float(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rows_as_fp8(make_triton_ops) -> None:
    make_triton_ops()
    from pagoda.kernels.linear.triton_linear import quantize_rows

    x = draw(6, 300) * torch.tensor([1e-6, 1.0, 300.0, 1e4, 0.0, 1.0], device=DEVICE).unsqueeze(1)
    x[1] *= 2.0 ** torch.arange(-20, 0, device=DEVICE).repeat(15)  # most become subnormal, or 0
    x[5, 7] = torch.nan
    codes, scales = quantize_rows(x)
    want_codes, want_scales = quantize_vectors(x)
    assert torch.equal(codes[:5], want_codes.view(torch.uint8)[:5])
    assert torch.equal(scales.nan_to_num(nan=-1.0), want_scales.nan_to_num(nan=-1.0))
    assert scales.isnan().tolist() == [False] * 5 + [True]


def test_every_e4m3_is_read_and_written(make_triton_ops) -> None:
    """All 256 codes through from_e4m3, and numbers on and next to the middle of two codes through to_e4m3."""
    make_triton_ops()
    from tests.kernels.triton_e4m3 import read, write

    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    numbers = codes.view(torch.float8_e4m3fn).float()
    is_number = ~numbers.isnan()
    assert torch.equal(read(codes)[is_number] * 256, numbers[is_number])
    assert torch.equal(write(numbers) & 0x7F, codes & 0x7F)
    positive = numbers[:0x7F]
    middles = (positive[1:] + positive[:-1]) / 2
    for some in (middles, torch.nextafter(middles, middles * 2), torch.nextafter(middles, middles * 0)):
        for x in (some, -some):
            assert torch.equal(write(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


SLOW_KINDS = ("int4", "int4 with minima", "int4 of 64 with zeros", "int6")


@pytest.mark.parametrize("tokens", [9, pytest.param(67, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", ["int8", "fp8", "widened fp8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS)]
)
def test_quantised_experts(make_triton_ops, reference: Any, kind: str, tokens: int) -> None:
    """Values, and the same bits in any batch; of 67 tokens, those of one expert are in two tiles."""
    ops = make_triton_ops(multiplies_fp8=kind != "widened fp8")
    hidden, inner, experts, top_k = 72, 48, 5, 2
    stacks = (
        [drawn(kind, out_features, in_features, e) for e in range(experts)]
        for out_features, in_features in ((2 * inner, hidden), (hidden, inner))
    )
    ours, theirs = zip(
        *(
            [by.prepare_experts([prepared(by, kind, weight, dtype) for weight in stack])
             for by, dtype in ((ops, BF16), (reference, F32))]
            for stack in stacks
        ),
        strict=True,
    )  # fmt: skip
    x, router = draw(tokens, hidden, dtype=BF16, seed=2) / 4, draw(tokens, experts, seed=3)
    router[:, 1] += 9  # all tokens choose it
    got = ops.moe(x, *ops.route(router, top_k, True), *ours)
    want = reference.moe(x[:9], *reference.route(router[:9], top_k, True), *theirs)
    torch.testing.assert_close(got[:9], want, atol=2e-2, rtol=3e-2)
    split = [ops.moe(x[rows], *ops.route(router[rows], top_k, True), *ours) for rows in (slice(3), slice(3, None))]
    assert torch.equal(got, torch.cat(split))


def test_what_cannot_be_prepared(triton_ops: Any) -> None:
    weight = coded("int8", 4, 64)
    mixed = [triton_ops.prepare_quantized_linear(coded(kind, 4, 64), BF16) for kind in ("int8", "int4")]
    with pytest.raises(ValueError, match="of one shape and form"):
        triton_ops.prepare_experts(mixed)
    with pytest.raises(ValueError, match="groups of 24 have no kernel"):
        triton_ops.prepare_quantized_linear(
            QuantizedWeight(Q8, weight.codes, weight.scales, None, 64, 24), BF16
        )  # fmt: skip


@pytest.mark.parametrize(("out_features", "in_features"), [(6, 1024), (7, 330), (16, 2048), (70, 24)])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_one_row_times_floats(
    triton_ops: Any, reference: Any, out_features: int, in_features: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A kernel of its own: two or four output features per program, with and without a rest."""
    monkeypatch.setattr(triton_vector, "_FEW", 10)
    weight, bias = draw(out_features, in_features, dtype=dtype), draw(out_features, dtype=dtype, seed=1)
    x = draw(1, in_features, dtype=dtype, seed=2) / in_features**0.5
    for of_bias in (None, bias):
        ours, theirs = (ops.prepare_linear(weight, of_bias) for ops in (triton_ops, reference))
        for name in ("linear", "logits"):
            got, want = getattr(triton_ops, name)(x, ours), getattr(reference, name)(x, theirs)
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("out_features", "in_features"), [(16, 1024), (6, 332)])
@pytest.mark.parametrize("kind", ["int8", "int4", "int4 with minima", "int4 of 128 with zeros"])
def test_few_rows_times_codes(triton_ops: Any, reference: Any, kind: str, out_features: int, in_features: int) -> None:
    """A kernel of its own: with all features of a program or few, with a last group that is whole or not."""
    weight = coded(kind, out_features, in_features)
    for rows in (1, 2):
        x = draw(rows, in_features, dtype=BF16)
        assert triton_vector.takes_codes(x, triton_ops.prepare_quantized_linear(weight, BF16))
        check(triton_ops, reference, weight, rows, BF16, with_bias=rows == 2)
