"""The mixture-of-experts op: its definition against transformers' block, and each implementation against it."""

import pytest
import torch
from transformers import MixtralConfig, OlmoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps

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
    got = reference.moe(x, x @ block.gate.weight.data.T, gate_up, down, 3, renormalize)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_of_equal_experts_the_lower_is_chosen(fast: Ops, reference: ReferenceOps) -> None:
    for ops in (fast, reference):
        gate_up = experts_of(ops, draw(5, 64, 16), F32)
        down = experts_of(ops, draw(5, 16, 32, seed=1), F32)
        x = draw(1, 16, seed=2)
        tied = ops.moe(x, torch.tensor([[0.5, 1.0, 1.0, 1.0, 1.0]]), gate_up, down, 2, True)
        plain = ops.moe(x, torch.tensor([[-9.0, 1.0, 1.0, -9.0, -9.0]]), gate_up, down, 2, True)
        torch.testing.assert_close(tied, plain)


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
            router_logits,
            experts_of(ops, gate_up / hidden**0.5, dtype),
            experts_of(ops, down / inner**0.5, dtype),
            top_k,
            renormalize,
        )
        for ops in (fast, reference)
    )
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
