"""Mixture of experts: the definition against transformers' block, and each implementation against it."""

import random

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, OlmoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

from pagoda.base.errors import ConfigError, InvariantBroken
from pagoda.kernels.linear.forms import GGUF_TYPES, MXFP4, Q4, Q4_MIN
from pagoda.kernels.linear.quantize import QuantizedWeight, quantize, scales_of
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.ops.declare import Activation
from tests.kernels.random_codes import random_codes

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 1e-5, BF16: 2e-2, F16: 2e-3}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def experts_of(ops: Ops, weights: torch.Tensor, dtype: torch.dtype):
    """weights [E, out, in], prepared."""
    return ops.prepare_experts([ops.prepare_linear(weight.to(dtype)) for weight in weights])


@pytest.mark.parametrize("renormalize", [True, False])
def test_the_definition_is_what_transformers_computes(reference: ReferenceOps, renormalize: bool) -> None:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_experts_per_tok": 3}
    if renormalize:
        block = MixtralSparseMoeBlock(MixtralConfig(num_local_experts=7, **sizes))
    else:
        block = OlmoeSparseMoeBlock(OlmoeConfig(num_experts=7, norm_topk_prob=False, **sizes))
    for seed, parameter in enumerate(block.parameters()):
        parameter.data = draw(*parameter.shape, seed=seed) / 3
    x = draw(11, 24, seed=9)
    with torch.no_grad():
        found = block(x.unsqueeze(0))
    want = (found[0] if isinstance(found, tuple) else found).reshape(11, 24)
    gate_up = experts_of(reference, block.experts.gate_up_proj.data, F32)
    down = experts_of(reference, block.experts.down_proj.data, F32)
    got = reference.moe(x, *reference.route(x @ block.gate.weight.data.T, 3, renormalize), gate_up, down)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_of_equal_experts_the_lower_is_chosen(fast: Ops, reference: ReferenceOps) -> None:
    for ops in (fast, reference):
        experts, weights = ops.route(torch.tensor([[0.5, 1.0, 1.0, 1.0, 1.0]]), 2, True)
        assert experts.tolist() == [[1, 2]]
        assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_routing_equals_the_reference(fast: Ops, reference: ReferenceOps, dtype: torch.dtype) -> None:
    rng = random.Random(0)
    for seed in range(40):
        groups, size = rng.choice([1, 2, 4]), rng.choice([2, 5, 16, 33])
        logits = 3 * draw(rng.choice([1, 7]), groups * size, seed=seed).to(dtype)
        bias, factors = (draw(groups * size, seed=seed + of) for of in (100, 200))
        top_groups, best = rng.randint(1, groups), rng.randint(1, size)
        options = {
            "top_k": rng.randint(1, top_groups * size), "renormalize": rng.random() < 0.5,
            "sigmoid": rng.random() < 0.5, "factor": rng.choice([1.0, 2.5]), "factors": rng.choice([factors, None]),
        }  # fmt: skip
        if groups > 1 or rng.random() < 0.5:
            options |= {"bias": bias, "groups": groups, "top_groups": top_groups, "best": best}
        (got, weights), (want, wanted) = (ops.route(logits, **options) for ops in (fast, reference))
        assert torch.equal(got, want), options
        torch.testing.assert_close(weights, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "experts", "top_k"),
    [(1, 64, 32, 4, 2), (37, 96, 160, 8, 2), (70, 33, 49, 64, 8), (5, 576, 96, 3, 3), (9, 17, 1, 1, 1)],
)
@pytest.mark.parametrize("renormalize", [True, False])
def test_equals_the_reference(
    fast: Ops,
    reference: ReferenceOps,
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    renormalize: bool,
    dtype: torch.dtype,
) -> None:
    x, router_logits = draw(tokens, hidden).to(dtype), draw(tokens, experts, seed=1).to(dtype)
    gate_up, down = draw(experts, 2 * inner, hidden, seed=2), draw(experts, hidden, inner, seed=3)
    got, want = (
        ops.moe(
            x,
            *ops.route(router_logits, top_k, renormalize),
            experts_of(ops, gate_up / hidden**0.5, dtype),
            experts_of(ops, down / inner**0.5, dtype),
        )
        for ops in (fast, reference)
    )
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("inner", [160, 49])
def test_experts_without_a_gate_equal_the_reference(
    fast: Ops, reference: ReferenceOps, inner: int, dtype: torch.dtype
) -> None:
    kind = Activation.RELU_SQUARED
    x, router_logits = draw(37, 96).to(dtype), draw(37, 8, seed=1).to(dtype)
    up, down = draw(8, inner, 96, seed=2) / 10, draw(8, 96, inner, seed=3) / 10
    got, want = (
        ops.moe(x, *ops.route(router_logits, 3, True), *(experts_of(ops, w, dtype) for w in (up, down)), kind)
        for ops in (fast, reference)
    )
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    positive = (x[0].float() @ up.to(dtype).float()[5].T).relu()
    alone = reference.moe(
        x[:1],
        torch.tensor([[5]]),
        torch.ones(1, 1),
        *(experts_of(reference, w, dtype) for w in (up, down)),
        kind,
    )
    torch.testing.assert_close(
        alone[0].float(), positive**2 @ down.to(dtype).float()[5].T, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("inner", [160, 49])
def test_experts_with_another_gate_and_factors_equal_the_reference(
    fast: Ops, reference: ReferenceOps, inner: int, dtype: torch.dtype
) -> None:
    x, router_logits = draw(37, 96).to(dtype), draw(37, 8, seed=1).to(dtype)
    gate_up, down = draw(8, 2 * inner, 96, seed=2) / 10, draw(8, 96, inner, seed=3) / 10

    def run(ops: Ops, kind: Activation, factors: torch.Tensor | None) -> torch.Tensor:
        stacks = (experts_of(ops, each, dtype) for each in (gate_up, down))
        return ops.moe(x, *ops.route(router_logits, 3, True, factors=factors), *stacks, kind)

    factors = draw(8, seed=4).abs() + 0.2
    want = run(reference, Activation.GELU_TANH, factors)
    got = run(fast, Activation.GELU_TANH, factors)
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for other in (run(reference, Activation.SILU, factors), run(reference, Activation.GELU_TANH, None)):
        assert (want - other).abs().max() > 0.03


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("inner", [160, 49])
def test_experts_of_scaled_input_equal_the_reference(
    fast: Ops, reference: ReferenceOps, inner: int, top_k: int, dtype: torch.dtype
) -> None:
    x, router_logits = draw(37, 96).to(dtype), draw(37, 8, seed=1).to(dtype)
    gate_up, down = draw(8, 2 * inner, 96, seed=2) / 10, draw(8, 96, inner, seed=3) / 10
    got, want = (
        ops.moe(
            x, *ops.route(router_logits, top_k, False, sigmoid=True),
            *(experts_of(ops, each, dtype) for each in (gate_up, down)), scales_input=True,
        )
        for ops in (fast, reference)
    )  # fmt: skip
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    alone = torch.zeros(96)
    for expert in router_logits[5].float().topk(top_k).indices.tolist():
        row = (x[5].float() * router_logits[5, expert].float().sigmoid()).to(dtype).float()
        gate, up = (gate_up[expert].to(dtype).float() @ row).chunk(2)
        alone += down[expert].to(dtype).float() @ (torch.nn.functional.silu(gate) * up)
    torch.testing.assert_close(want[5].float(), alone, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("inner", [160, 49])
def test_limited_experts_with_biases_equal_the_reference(
    fast: Ops, reference: ReferenceOps, inner: int, dtype: torch.dtype
) -> None:
    x, router_logits = draw(37, 96).to(dtype), draw(37, 8, seed=1).to(dtype)
    shapes = (2 * inner, 96), (96, inner)

    def experts(ops: Ops, shape: tuple[int, int], seed: int):
        return ops.prepare_experts(
            [
                ops.prepare_linear(
                    (draw(*shape, seed=seed + e) / 7).to(dtype), draw(shape[0], seed=seed + 50 + e).to(dtype)
                )
                for e in range(8)
            ]
        )

    if fast.name == "triton":
        with pytest.raises(ConfigError, match="experts with biases .GPT-OSS. have no Triton kernel"):
            experts(fast, shapes[0], 100)
        return
    got, want, plain = (
        ops.moe(
            x,
            *ops.route(router_logits, 3, True),
            experts(ops, shapes[0], 100),
            experts(ops, shapes[1], 300),
            Activation.SILU,
            *limited,
        )
        for ops, limited in ((fast, (1.702, 0.8)), (reference, (1.702, 0.8)), (reference, ()))
    )
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert (want - plain).abs().max() > 0.5


@pytest.mark.parametrize("is_v3", [False, True], ids=["v2", "v3"])
def test_experts_of_the_best_groups_are_those_of_transformers(fast: Ops, reference: ReferenceOps, is_v3: bool) -> None:
    sizes = {"hidden_size": 24, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_routed_experts": 12}
    sizes["num_attention_heads"] = 4
    if is_v3:
        router = DeepseekV3TopkRouter(DeepseekV3Config(**sizes, routed_scaling_factor=2.5))
        router.e_score_correction_bias.data = draw(12, seed=4) / 5
        options = True, True, router.e_score_correction_bias.data, 4, 2, 2, 2.5
    else:
        config = DeepseekV2Config(**sizes, routed_scaling_factor=1.7, topk_method="group_limited_greedy")
        router, options = DeepseekV2TopkRouter(config), (False, False, torch.zeros(12), 4, 2, 1, 1.7)
    router.weight.data = draw(12, 24, seed=5)
    x, gate_up, down = draw(50, 24, seed=6), draw(12, 64, 24) / 4, draw(12, 24, 32, seed=1) / 4
    with torch.no_grad():
        logits, weights, chosen = router(x)
    want = torch.zeros_like(x)
    for token in range(50):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            want[token] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    for ops in (fast, reference):
        stacks = experts_of(ops, gate_up, F32), experts_of(ops, down, F32)
        for rows in (slice(None), slice(7, 8)):
            got = ops.moe(x[rows], *ops.route(logits[rows], 3, *options), *stacks)
            torch.testing.assert_close(got, want[rows], atol=1e-4, rtol=1e-4)


def test_groups_that_do_not_fit_are_refused(native: NativeOps) -> None:
    for groups, top, best in ((5, 1, 1), (4, 5, 1), (4, 2, 4), (4, 0, 1), (0, 1, 1)):
        with pytest.raises(ValueError, match=f"{top} of {groups} groups"):
            native.route(draw(2, 12), 3, True, True, torch.zeros(12), groups, top, best)
    with pytest.raises(ValueError, match="top_k must be 1 to 6, not 7"):
        native.route(draw(2, 12), 7, True, True, torch.zeros(12), 4, 2, 1)
    with pytest.raises(ValueError, match="needs a bias"):
        native.route(draw(2, 12), 3, True, groups=4, top_groups=2)


def codes(kind: str, weight: torch.Tensor, seed: int) -> QuantizedWeight:
    """8-bit codes of `weight`, or others drawn at random, as a GGUF has them."""
    if kind in GGUF_TYPES:
        torch.manual_seed(seed)
        return random_codes(GGUF_TYPES[kind], *weight.shape)
    if kind.startswith("q8"):
        return quantize(weight, 32 if kind == "q8_32" else 64)
    generator = torch.Generator().manual_seed(seed)
    out_features, in_features = weight.shape
    groups = -(-in_features // 32)
    drawn = torch.randint(0, 16, (out_features, 32 * groups), generator=generator, dtype=torch.uint8)
    if kind == "mxfp4":
        exponents = torch.randint(118, 124, (out_features, groups), generator=generator, dtype=torch.uint8)
        return QuantizedWeight(MXFP4, drawn, scales_of(exponents), None, in_features, 32)
    scales = (torch.rand(out_features, groups, generator=generator) / 40).half()
    minima = (-8 * scales.float()).half() if kind == "q4_min" else None
    return QuantizedWeight(Q4 if minima is None else Q4_MIN, drawn, scales, minima, in_features, 32)


@pytest.mark.parametrize("kind", ["q8", "q8_32", "q4", "q4_min", "mxfp4", "Q4_K", "Q6_K"])
@pytest.mark.parametrize(("hidden", "inner"), [(96, 64), (100, 33)])
def test_quantised_experts_are_those_of_linear_layers(native: NativeOps, kind: str, hidden: int, inner: int) -> None:
    """Quantised weights have no reference of their own: an expert alone is the linear layers it is made of."""
    x = draw(7, hidden).bfloat16()
    up = [
        native.prepare_quantized_linear(codes(kind, draw(2 * inner, hidden, seed=e), e), torch.float32)
        for e in range(4)
    ]
    down = [
        native.prepare_quantized_linear(codes(kind, draw(hidden, inner, seed=9 + e), 9 + e), torch.float32)
        for e in range(4)
    ]
    router_logits = draw(7, 4, seed=1)
    got = native.moe(x, *native.route(router_logits, 2, True), native.prepare_experts(up), native.prepare_experts(down))
    weights, chosen = torch.softmax(router_logits, -1).topk(2, -1)
    want = torch.zeros(7, hidden)
    for token in range(7):
        for weight, expert in zip(weights[token] / weights[token].sum(), chosen[token].tolist(), strict=True):
            active = native.gate(native.linear(x[token : token + 1], up[expert]), Activation.SILU)
            want[token] += weight * native.logits(active, down[expert])[0]
    torch.testing.assert_close(got.float(), want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", [F32, BF16, F16, "q8", "q4_min", "mxfp4", "Q5_K", "Q6_K"], ids=str)
@pytest.mark.parametrize(
    ("inner", "width"), [(64, 128), (33, 66), (33, 33)], ids=["fused gate", "gate of its own", "no gate"]
)
def test_a_tokens_bits_are_its_own(native: NativeOps, kind: torch.dtype | str, inner: int, width: int) -> None:
    """Alone, in any batch, at any place in it, on any number of threads."""
    dtype = BF16 if isinstance(kind, str) else kind
    hidden, experts, tokens = 80, 16, 150
    x, router_logits = draw(tokens, hidden).to(dtype), 3 * draw(tokens, experts, seed=1).to(dtype)

    def prepared(shape: tuple[int, int], seed: int):
        weights = [draw(*shape, seed=seed + e) / 9 for e in range(experts)]
        if isinstance(kind, str):
            return native.prepare_experts(
                [
                    native.prepare_quantized_linear(codes(kind, weight, e), torch.float32)
                    for e, weight in enumerate(weights)
                ]
            )
        return native.prepare_experts([native.prepare_linear(weight.to(dtype)) for weight in weights])

    gate_up, down = prepared((width, hidden), 100), prepared((hidden, inner), 200)

    def run(ops: NativeOps, rows: slice | torch.Tensor) -> torch.Tensor:
        return ops.moe(x[rows], *ops.route(router_logits[rows], 3, False), gate_up, down)

    alone = torch.cat([run(native, slice(i, i + 1)) for i in range(tokens)])
    assert alone.isfinite().all()
    assert alone.any(dim=1).all()
    for threads in (1, 2, 3, 7):
        ops = NativeOps(native.library, threads)
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(threads))
        assert torch.equal(run(ops, order), alone[order])
        for count in (2, 3, 17, 64):
            first = (count * 7) % (tokens - count)
            assert torch.equal(run(ops, slice(first, first + count)), alone[first : first + count])


def test_more_pairs_than_one_block_holds(native: NativeOps) -> None:
    x, router_logits = draw(3000, 32).bfloat16(), draw(3000, 4, seed=1)
    gate_up = experts_of(native, draw(4, 64, 32, seed=2), BF16)
    down = experts_of(native, draw(4, 32, 32, seed=3), BF16)

    def run(rows: slice) -> torch.Tensor:
        return native.moe(x[rows], *native.route(router_logits[rows], 2, True), gate_up, down)

    assert torch.equal(run(slice(None)), torch.cat([run(slice(i, i + 700)) for i in range(0, 3000, 700)]))


@pytest.mark.parametrize("where", ["x", "router_logits"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_affects_no_other(native: NativeOps, where: str, bad: float) -> None:
    given = {"x": draw(20, 64), "router_logits": draw(20, 4, seed=1)}
    gate_up = experts_of(native, draw(4, 64, 64, seed=2), F32)
    down = experts_of(native, draw(4, 64, 32, seed=3), F32)

    def run() -> torch.Tensor:
        return native.moe(given["x"], *native.route(given["router_logits"], 2, True), gate_up, down)

    clean = run()
    given[where][5, 2] = bad
    got = run()
    assert not got[5].isfinite().all()
    got[5] = clean[5]
    assert torch.equal(got, clean)


def test_experts_that_do_not_fit_are_refused(native: NativeOps, reference: ReferenceOps) -> None:
    gate_up, down = experts_of(native, draw(4, 64, 48), F32), experts_of(native, draw(4, 48, 32), F32)
    for wrong, said in (
        ({"top_k": 5}, "top_k must be 1 to 4, not 5"),
        ({"top_k": 0}, "top_k must be 1 to 4"),
        ({"bias": draw(5)}, "bias .5,. is not one for each of 4 experts"),
        ({"factors": draw(3)}, "not one for each of 4 experts"),
    ):
        with pytest.raises(ValueError, match=said):
            native.route(**{"router_logits": draw(3, 4), "top_k": 2, "renormalize": True, **wrong})
    chosen = torch.tensor([[0, 3]] * 3)
    given = {"x": draw(3, 48), "experts": chosen, "weights": torch.ones(3, 2), "gate_up": gate_up, "down": down}
    for wrong, said in (
        ({"experts": chosen[:2], "weights": torch.ones(2, 2)}, "different numbers of rows"),
        ({"experts": chosen[:, 0].contiguous(), "weights": torch.ones(3)}, "not .tokens, top_k."),
        ({"weights": torch.ones(3, 1)}, "weights must have the shape of experts"),
        ({"down": experts_of(native, draw(4, 48, 31), F32)}, "needs down"),
        ({"gate_up": experts_of(native, draw(4, 64, 47), F32)}, "multiplies rows of 47"),
        ({"down": experts_of(native, draw(4, 48, 32), BF16)}, "of torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=said):
            native.moe(**{**given, **wrong})
    for ops in (native, reference):
        stacks = experts_of(ops, draw(4, 64, 48), F32), experts_of(ops, draw(4, 48, 32), F32)
        for expert in (4, -1):
            with pytest.raises(InvariantBroken, match=f"moe: experts: element 5 is {expert},"):
                ops.moe(draw(3, 48), torch.tensor([[0, 3], [1, 2], [1, expert]]), torch.ones(3, 2), *stacks)
    one = native.prepare_linear(draw(64, 48))
    with pytest.raises(ValueError, match="2 kinds"):
        native.prepare_experts([one, native.prepare_linear(draw(64, 40))])
