"""Whole models on Triton's kernels, with quantised weights and pages, have the logits that torch's kernels compute.

In Triton's interpreter where there is no GPU, and therefore with tiny models. In float32, so that little hides a
mistake.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from pagoda.kernels.linear.quantize import CodedWeight, Fp8Weight, codes_of
from pagoda.kernels.linear.triton_forms import TritonWeight
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.kernels.torch_ops import TorchOps
from pagoda.layers.module import parameters
from pagoda.loading.loader import load_model
from pagoda.loading.model_files import identify
from pagoda.ops.tensor import LinearWeight
from pagoda.worker.forward_runner import ForwardRunner
from tests.device_under_test import DeviceUnderTest
from tests.models.gguf_writer import write_gguf
from tests.models.packed_writer import Packing, write_packed
from tests.models.paged_runner import PagedRunner
from tests.models.tiny import VOCAB, make_model, save

pytestmark = pytest.mark.usefixtures("one_thread")

F32, BF16 = torch.float32, torch.bfloat16
PROMPT = torch.randint(3, VOCAB, (12,), generator=torch.Generator().manual_seed(5)).tolist()
STEPS = ((0, 7), (7, 11), (11, 12))  # two chunks of the prompt, and a token


def mixed_kinds(name: str) -> Kind:
    """As in a Q4_K_M file: q, k and v, which are fused, are not of one type."""
    return Kind.Q6_K if any(part in name for part in ("v_proj", "down_proj", "embed", "head")) else Kind.Q4_K


LAYER = {"num_hidden_layers": 1}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}  # K-quants' blocks
STORED: dict[str, tuple[dict[str, object], Kind | Callable[[str], Kind] | Packing | None]] = {
    "floats": (LAYER, None),
    "experts": ({**LAYER, "num_experts": 4, "num_experts_per_tok": 2}, None),
    "Q8_0": ({"num_hidden_layers": 2}, Kind.Q8_0),
    "Q4_0": ({"num_hidden_layers": 2}, Kind.Q4_0),
    "Q4_K": ({**LAYER, **WIDE}, Kind.Q4_K),
    "Q6_K": ({**LAYER, **WIDE}, Kind.Q6_K),
    "mixed": ({**LAYER, **WIDE}, mixed_kinds),
    "awq 64": (LAYER, Packing("awq", group=64)),
    "awq 128": ({**LAYER, "intermediate_size": 192}, Packing("awq", group=128)),
    "gptq": (LAYER, Packing("gptq", group=128)),
    "gptq, symmetric": (LAYER, Packing("gptq", group=64, symmetric=True)),
}


@dataclass(frozen=True)
class Case:
    """kinds: the forms that the weights are expected in.   close: the largest difference of the logits of a step,
    relative to their norm.   widened: 8-bit floats are not multiplied as such.   pages: the dtype of the KV cache.
    """

    stored: str
    kinds: set[str]
    close: float
    quantization: str | None = None
    widened: bool = False
    dtype: torch.dtype = F32
    pages: torch.dtype = F32


# Measured in the interpreter: 1.5e-6 at most, Q6_K 1e-3, bfloat16 8e-3.
EXACT = 1e-5  # the same numbers, summed in another order
ROUNDED_SCALES = 3e-3  # of Q6_K: they are held in float16
# A number halfway between two codes may get the other one on another device. Without codes at all, logits differ by
OTHER_PAGES = 2e-3  # 2e-2 (int8) and 8e-2 (fp8)
OTHER_INPUTS = 1e-2  # 0.15, of experts 0.4
CASES = {
    "gguf, Q8_0": Case("Q8_0", {"int8"}, EXACT, "gguf"),
    "gguf, Q4_0": Case("Q4_0", {"int4"}, EXACT, "gguf"),
    "gguf, Q4_K": Case("Q4_K", {"int4"}, EXACT, "gguf"),
    "gguf, Q6_K": Case("Q6_K", {"int6"}, ROUNDED_SCALES, "gguf"),
    "gguf, mixed": Case("mixed", {"int4", "int6", "int8"}, ROUNDED_SCALES, "gguf"),
    "awq 64": Case("awq 64", {"int4"}, EXACT),
    "awq 128": Case("awq 128", {"int4"}, EXACT),
    "gptq": Case("gptq", {"int4"}, EXACT),
    "gptq, symmetric": Case("gptq, symmetric", {"int4"}, EXACT),
    "int8": Case("floats", {"int8"}, EXACT, "int8"),
    "int8, bfloat16": Case("floats", {"int8"}, 3e-2, "int8", dtype=BF16, pages=BF16),
    "fp8": Case("floats", {"fp8"}, OTHER_INPUTS, "fp8"),
    "widened fp8": Case("floats", {"fp8"}, EXACT, "fp8", widened=True),
    "experts, int8": Case("experts", {"int8"}, EXACT, "int8"),
    "experts, fp8": Case("experts", {"fp8"}, OTHER_INPUTS, "fp8"),
    "experts, widened fp8": Case("experts", {"fp8"}, EXACT, "fp8", widened=True),
    "int8, pages of int8": Case("floats", {"int8"}, OTHER_PAGES, "int8", pages=torch.int8),
    "int8, pages of fp8": Case("floats", {"int8"}, OTHER_PAGES, "int8", pages=torch.float8_e4m3fn),
}
QUICK = {"gptq, symmetric", "fp8", "experts, widened fp8", "int8, pages of int8"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name -> the checkpoint, made when first asked for."""

    @cache
    def made(name: str) -> Path:
        changes, form = STORED[name]
        folder = tmp_path_factory.mktemp("stored")
        model = make_model("qwen3-moe-renormalized" if name == "experts" else "llama", **changes)
        if isinstance(form, Packing):
            write_packed(save(model, folder / "floats"), form, folder / "packed", folder / "values")
            return folder / "packed"
        if form is None:
            return save(model, folder / "floats")
        write_gguf(model, folder / "model.gguf", form)
        return folder / "model.gguf"

    return made


class SameCodes(TorchOps):
    """Torch's kernels with the values of the codes that Triton's hold: of parts of different forms, 8 bits."""

    def prepare_quantized_linear(
        self, weight: CodedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None, in_pairs: bool = False
    ) -> LinearWeight:
        held = weight if isinstance(weight, Fp8Weight) else codes_of(weight).for_triton()
        return super().prepare_quantized_linear(held, dtype, bias)


def logits(path: Path, ops: Any, case: Case, device: torch.device) -> tuple[torch.Tensor, set[str]]:
    """Return those of all steps, and the forms of the weights."""
    with torch.inference_mode():
        model = load_model(identify(path), ops, case.dtype, device, case.quantization)
        runner = PagedRunner(ForwardRunner(model, ops), 1, 16, case.pages, block_size=8, device=device)
        found = torch.cat([runner.logits([(0, first, PROMPT[first:end])]) for first, end in STEPS])
    held = {each.value.form for _, each in parameters(model) if isinstance(each.value, TritonWeight)}
    return found, held


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_logits(
    case: str,
    stored: Callable[[str], Path],
    without_triton: Callable[[str], NoReturn],
    device_under_test: DeviceUnderTest,
) -> None:
    """Next to torch's kernels with the values of the same codes; 8-bit floats that are multiplied as such, next to the
    reference, which rounds inputs too.
    """
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    from pagoda.kernels.triton_ops import TritonOps

    about, device = CASES[case], device_under_test.device
    rounds_inputs = about.quantization == "fp8" and not about.widened
    path = stored(about.stored)
    ours, held = logits(path, TritonOps(multiplies_fp8=rounds_inputs), about, device)
    theirs, _ = logits(path, ReferenceOps() if rounds_inputs else SameCodes(), about, device)
    assert held == about.kinds
    differences = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert differences.max() < about.close, differences
