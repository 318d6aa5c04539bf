"""Experts of one layer that are stored in different forms: all of them are held in one, of AWQ and GPTQ as floats."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from pagoda.kernels.native.build import NativeUnavailable
from pagoda.kernels.native.library import load
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.torch_ops import TorchOps
from pagoda.loading.loader import load_model
from pagoda.loading.model_files import identify
from pagoda.loading.weight_memory import PreparedAs, weight_memory
from pagoda.worker.forward_runner import ForwardRunner
from tests.device_under_test import DeviceUnderTest
from tests.loading.test_weight_memory import held
from tests.models.gguf_writer import write_gguf
from tests.models.packed_writer import Packing, write_packed
from tests.models.paged_runner import PagedRunner
from tests.models.tiny import VOCAB, make_model, save

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = torch.randint(3, VOCAB, (5,), generator=torch.Generator().manual_seed(5)).tolist()
LEFT_OUT = ("mlp.gate", "layers.1.mlp.experts.2", "layers.2.mlp.experts.0.up_proj")
PACKINGS = {
    "awq": Packing("awq", keep=LEFT_OUT),
    "gptq": Packing("gptq", group=64, symmetric=True, keep=LEFT_OUT),
}


@pytest.mark.parametrize(
    ("method", "kernels"),
    [
        ("awq", "torch"),
        ("awq", "native"),
        ("awq", "triton"),
        ("gptq", "torch"),
        ("gptq", "native"),
        pytest.param("gptq", "triton", marks=pytest.mark.slow),
    ],
)
def test_one_expert_of_floats(
    method: str,
    kernels: str,
    tmp_path: Path,
    without_triton: Callable[[str], NoReturn],
    without_native: Callable[[str], NoReturn],
    on: DeviceUnderTest,
) -> None:
    """The whole of an expert in one layer; in another a part of one, whose experts stay codes in `down_proj`."""
    if kernels == "triton" and find_spec("triton") is None:
        without_triton("Triton is not installed")
    if kernels == "native":
        try:
            load()
        except NativeUnavailable as error:
            without_native(str(error))
    packed, values = tmp_path / "packed", tmp_path / "values"
    write_packed(save(make_model("qwen3-moe-renormalized"), tmp_path / "floats"), PACKINGS[method], packed, values)
    ops = on.ops(kernels)
    model, exact = (load_model(identify(folder), ops, torch.float32, on.device) for folder in (packed, values))
    with torch.inference_mode():
        ours, theirs = (
            PagedRunner(ForwardRunner(each, ops), 1, 16, torch.float32, 16, on.device).logits([(0, 0, PROMPT)])
            for each in (model, exact)
        )
    if kernels == "native":  # its products with codes quantise the input
        assert 0 < (ours - theirs).norm() < 0.25 * theirs.norm()
    else:
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    is_tiled = kernels != "native" and type(ops) is not TorchOps  # "torch" is of a CPU; a GPU has its own
    prepared = PreparedAs("float32", None, kernels == "native", num_positions=64, for_triton=is_tiled)
    assert weight_memory(identify(packed), prepared) == held(model)


def test_gate_and_up_of_two_kinds_are_held_as_8_bits(tmp_path: Path, without_native: Callable[[str], NoReturn]) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_model("qwen3-moe-renormalized"), path, lambda name: Kind.Q4_1 if "up_proj" in name else Kind.Q8_0)
    try:
        ops = NativeOps(load(), 1)
    except NativeUnavailable as error:
        without_native(str(error))
    model = load_model(identify(path), ops, torch.float32, torch.device("cpu"), "gguf", 64)
    assert weight_memory(identify(path), PreparedAs("float32", "gguf", packed=True, num_positions=64)) == held(model)
