"""Products with weights of AWQ and GPTQ, in groups of 128, made from random packed words."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pagoda.kernels.linear.library import LibraryLinear
from pagoda.kernels.torch_ops import TorchOps
from tests.loading.test_packed_codes import MADE, awq, gptq_in_order_of_activations, gptq_of_8_bits


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("kernels", ["triton_ops", "native", "torch"])
def test_products(made: Any, kernels: str, request: pytest.FixtureRequest) -> None:
    ops: Any = TorchOps() if kernels == "torch" else request.getfixturevalue(kernels)
    device = torch.device("cuda" if kernels == "triton_ops" and torch.cuda.is_available() else "cpu")
    weight, values = made()
    x = torch.randn(3, values.shape[1], generator=torch.Generator().manual_seed(5))
    got = ops.linear(x.to(device), ops.prepare_quantized_linear(weight.to(device), torch.float32)).cpu()
    want = x @ values.T
    tolerance = 1e-2 if kernels == "native" else 1e-5  # the native kernels quantise the input
    torch.testing.assert_close(got, want, atol=tolerance * float(want.abs().max()), rtol=0)


@pytest.mark.parametrize("made", [gptq_in_order_of_activations, gptq_of_8_bits])
def test_codes_without_a_triton_kernel_become_floats(
    made: Any, make_triton_ops: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is said once."""
    ops, (weight, values) = make_triton_ops(), made()
    for _ in range(2):
        prepared = ops.prepare_quantized_linear(weight, torch.bfloat16)
        assert isinstance(prepared, LibraryLinear)
        assert torch.equal(prepared.weight, values.bfloat16())
    assert caplog.text.count("are held as floats, as they have no kernel on a GPU") == 1


def test_smaller_groups_have_the_same_values() -> None:
    """Of an input that whole groups do not cover."""
    weight, _ = awq()
    cut = replace(weight, in_features=200)
    small = cut.in_groups_of(32)
    assert (small.codes.shape[1], small.scales.shape[1], small.group) == (224, 7, 32)
    assert torch.equal(small.dequantize(), cut.dequantize())
