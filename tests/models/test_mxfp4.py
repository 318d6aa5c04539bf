"""Experts stored in MXFP4, as GPT-OSS has them: the model of their values as floats, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pagoda.base.errors import ConfigError
from pagoda.loading.loader import load_model
from pagoda.loading.model_config import summarize_weights
from pagoda.loading.model_files import identify
from pagoda.worker.forward_runner import ForwardRunner
from tests.device_under_test import ON_CPU
from tests.models.paged_runner import PagedRunner
from tests.models.ranks import Rank, on_ranks
from tests.models.tiny import VOCAB, make_model, save

PROMPT = torch.randint(3, VOCAB, (23,), generator=torch.Generator().manual_seed(5)).tolist()


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


def logits(folder: Path, kernels: str = "torch") -> torch.Tensor:
    ops = ON_CPU.ops(kernels)
    runner = ForwardRunner(load_model(identify(folder), ops, torch.float32, ON_CPU.device), ops)
    with torch.inference_mode():
        return PagedRunner(runner, 1, 40, torch.float32, block_size=8).logits([(0, 0, PROMPT)])


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_same_bits_as_floats(kernels: str, tmp_path: Path) -> None:
    floats, packed = write_mxfp4(tmp_path)
    assert torch.equal(logits(packed, kernels), logits(floats, kernels))
    summary, as_floats = summarize_weights(identify(packed)), summarize_weights(identify(floats))
    assert summary.num_parameters == as_floats.num_parameters
    assert set(summary.bytes_by_type) == {"MXFP4", "F32"}


def test_ranks_may_cut_blocks(tmp_path: Path) -> None:
    """An expert's 160 inner values are divided in two: the boundary is in the middle of a block of 32."""
    _, packed = write_mxfp4(tmp_path, num_attention_heads=4, num_key_value_heads=2)

    def compute(rank: Rank) -> torch.Tensor:
        return PagedRunner(rank.forward, 1, 40, torch.float32, block_size=8).logits([(0, 0, PROMPT)])

    (expected,) = on_ranks(1, identify(packed), compute)
    for found in on_ranks(2, identify(packed), compute):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_blocks_without_their_scales_are_refused(tmp_path: Path) -> None:
    _, packed = write_mxfp4(tmp_path)
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, packed / "model.safetensors")
    with pytest.raises(ConfigError, match=r"down_proj_blocks' of the shape .* does not fit scales of"):
        logits(packed)
    del tensors[name]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ConfigError, match="down_proj_scales' is missing"):
        logits(packed)
