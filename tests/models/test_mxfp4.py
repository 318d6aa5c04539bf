"""Experts stored in MXFP4, as GPT-OSS has them: run from their codes, or as floats, which are their values exactly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pagoda.assembly.engine_setup import resolve_engine
from pagoda.base.config import EngineConfig, ModelConfig
from pagoda.base.errors import ConfigError
from pagoda.kernels.native.build import NativeUnavailable
from pagoda.kernels.native.library import load as load_library
from pagoda.loading.loader import load_model
from pagoda.loading.model_config import summarize_weights
from pagoda.loading.model_files import ModelFiles, identify
from pagoda.loading.outline import outline
from pagoda.loading.weight_memory import PreparedAs, weight_memory
from pagoda.models.base import Model
from pagoda.worker.forward_runner import ForwardRunner
from tests.device_under_test import ON_CPU
from tests.loading.test_weight_memory import held
from tests.models.paged_runner import PagedRunner
from tests.models.ranks import Rank, on_ranks
from tests.models.tiny import VOCAB, make_model, save

PROMPT = torch.randint(3, VOCAB, (23,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module", autouse=True)
def _native(without_native: Callable[[str], NoReturn]) -> None:
    try:
        load_library()
    except NativeUnavailable as error:
        without_native(str(error))


def write_mxfp4(folder: Path, **changes: object) -> tuple[Path, Path]:
    """Write a model whose experts are random 4-bit floats, as floats and in MXFP4; return both folders."""
    floats, packed = save(make_model("gpt-oss", **changes), folder / "floats"), folder / "packed"
    tensors = load_file(floats / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    stored = {}
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert tensors[name].shape == (experts, inputs, outputs)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, floats / "model.safetensors")
    packed.mkdir()
    kept = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in stored}
    save_file({**kept, **stored}, packed / "model.safetensors")
    config = json.loads((floats / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    return floats, packed


def load(files: ModelFiles, kernels: str, quantization: str | None) -> Model:
    return load_model(files, ON_CPU.ops(kernels), torch.float32, ON_CPU.device, quantization)


def logits(folder: Path, kernels: str = "torch", quantization: str | None = None, chunk: int = 23) -> torch.Tensor:
    """Of each token that ends a chunk of the prompt."""
    runner = ForwardRunner(load(identify(folder), kernels, quantization), ON_CPU.ops(kernels))
    paged = PagedRunner(runner, 1, 40, torch.float32, block_size=8)
    with torch.inference_mode():
        return torch.cat([paged.logits([(0, at, PROMPT[at : at + chunk])]) for at in range(0, len(PROMPT), chunk)])


@pytest.mark.parametrize(("kernels", "quantization"), [("torch", None), ("torch", "none"), ("native", "none")])
def test_same_bits_as_floats(kernels: str, quantization: str | None, tmp_path: Path) -> None:
    floats, packed = write_mxfp4(tmp_path)
    assert torch.equal(logits(packed, kernels, quantization), logits(floats, kernels, quantization))
    summary, as_floats = summarize_weights(identify(packed)), summarize_weights(identify(floats))
    assert summary.num_parameters == as_floats.num_parameters
    assert set(summary.bytes_by_type) == {"MXFP4", "F32"}


def test_native_kernels_multiply_the_codes(tmp_path: Path) -> None:
    """The input is rounded to 8 bits, so logits are near those of the values; how the prompt is cut changes nothing.

    All matrices in 8 bits, as `int8` has them, round more.
    """
    _, packed = write_mxfp4(tmp_path)
    found, exact, in_8_bits = (logits(packed, "native", quantization) for quantization in (None, "none", "int8"))
    assert 0 < (found - exact).norm() < (in_8_bits - exact).norm() < 0.25 * exact.norm()
    assert torch.equal(logits(packed, "native", chunk=5)[-1:], found)


@pytest.mark.parametrize("quantization", [None, "none", "int8"])
def test_planned_memory_is_what_is_held(quantization: str | None, tmp_path: Path) -> None:
    files = identify(write_mxfp4(tmp_path)[1])
    prepared = PreparedAs("float32", quantization, packed=True, num_positions=64)
    assert weight_memory(files, prepared) == held(load(files, "native", quantization))
    if quantization is None:
        config = json.loads((files.path / "config.json").read_text())
        (tmp_path / "outline").mkdir()
        planned = outline({"config.json": config}, "m", tmp_path / "outline")
        assert weight_memory(planned, prepared) == weight_memory(files, prepared)


@pytest.mark.parametrize(("dtype", "chosen"), [("auto", "mxfp4"), ("float32", "none")])
def test_codes_are_kept_unless_a_dtype_is_asked_for(dtype: str, chosen: str, tmp_path: Path) -> None:
    _, packed = write_mxfp4(tmp_path)
    assert resolve_engine(EngineConfig(ModelConfig(str(packed), dtype=dtype))).config.model.quantization == chosen


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_ranks_share_whole_blocks(kernels: str, tmp_path: Path) -> None:
    """An expert's 160 inner values are 5 blocks, of which the second rank has 3."""
    _, packed = write_mxfp4(tmp_path, num_attention_heads=4, num_key_value_heads=2)

    def compute(rank: Rank) -> torch.Tensor:
        return PagedRunner(rank.forward, 1, 40, torch.float32, block_size=8).logits([(0, 0, PROMPT)])

    (expected,) = on_ranks(1, identify(packed), compute, kernels)
    for found in on_ranks(2, identify(packed), compute, kernels):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_blocks_without_their_scales_are_refused(tmp_path: Path) -> None:
    _, packed = write_mxfp4(tmp_path)
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, packed / "model.safetensors")
    with pytest.raises(ConfigError, match=r"down_proj_blocks' has the shape .* does not fit scales of"):
        logits(packed)
    save_file({**tensors, name: tensors[name].float()}, packed / "model.safetensors")
    with pytest.raises(ConfigError, match="down_proj_scales' is F32, expected U8"):
        logits(packed)
    del tensors[name]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ConfigError, match="down_proj_scales' is missing"):
        logits(packed)
