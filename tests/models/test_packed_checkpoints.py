"""Quantised checkpoints are the models of the values that they stand for."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.forms import FLOAT32, NATIVE_FORMS, Q4, Q4_ZERO, WeightForm
from pagoda.kernels.linear.packed import PackedWeight
from pagoda.kernels.linear.quantize import CodedWeight, Fp8Weight, codes_of, quantize_rows
from pagoda.kernels.linear.reference import PlainLinear
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.kernels.torch_ops import TorchOps
from pagoda.layers.module import parameters
from pagoda.loading.loader import load_model
from pagoda.loading.model_config import summarize_weights
from pagoda.loading.model_files import identify
from pagoda.loading.quantization import resolve_quantization
from pagoda.worker.forward_runner import ForwardRunner
from tests.device_under_test import ON_CPU, DeviceUnderTest
from tests.models.packed_writer import Packing, write_packed
from tests.models.paged_runner import PagedRunner, generate
from tests.models.tiny import VOCAB, make_model, save

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = torch.randint(3, VOCAB, (23,), generator=torch.Generator().manual_seed(5)).tolist()

PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}

CASES = {
    "awq": ("llama", Packing("awq")),
    "awq, a row per group": ("qwen2", Packing("awq", group=-1)),
    "awq, symmetric": ("llama-tied-biased", Packing("awq", symmetric=True)),
    "awq of qwen3": ("qwen3", Packing("awq", settings={"version": "GEMM"})),
    "awq, layers left out": ("llama", Packing("awq", keep=("v_proj", "layers.1.mlp.up_proj", "layers.2.self_attn"))),
    "awq of phi3, whose parts are stored as one": ("phi3", Packing("awq")),
    "gptq of gpt-neox, head by head": ("gpt-neox", Packing("gptq")),
    "gptq": ("llama", Packing("gptq")),
    "gptq, a last group that is partial": ("llama", Packing("gptq", group=64)),
    "gptq of version 2, qwen3": ("qwen3", Packing("gptq", group=128, version=2)),
    "gptq, symmetric": ("qwen3", Packing("gptq", symmetric=True)),
    "gptq, activations' order within one group": (
        "llama",
        Packing("gptq", group=-1, version=2, symmetric=True, settings={"desc_act": True}),
    ),
    "gptq in the order of activations": ("llama", Packing("gptq", ordered=True)),
    "gptq of 8 bits": ("llama", Packing("gptq", bits=8)),
    "gptq of 8 bits, symmetric": ("qwen3", Packing("gptq", bits=8, symmetric=True, ordered=True)),
    "gptq, experts in the order of activations": (
        "qwen3-moe-renormalized",
        Packing("gptq", ordered=True, keep=("mlp.gate",)),
    ),
    "w4a16": ("llama", Packing("compressed-tensors", symmetric=True)),
    "w4a16, asymmetric, in the order of activations": ("qwen3", Packing("compressed-tensors", ordered=True)),
    "w4a16, a scale per row": ("llama", Packing("compressed-tensors", group=-1, symmetric=True)),
    "w8a16": ("llama-tied-biased", Packing("compressed-tensors", bits=8)),
    "w8a8": (
        "llama",
        Packing("compressed-tensors", group=-1, symmetric=True, bits=8, stored="int-quantized", activations=PER_TOKEN),
    ),
    "w8a8, asymmetric": (
        "qwen3",
        Packing("compressed-tensors", group=-1, bits=8, stored="int-quantized", activations=STATIC),
    ),
    "gptq, experts": (
        "qwen3-moe-renormalized",
        Packing("gptq", keep=("mlp.gate",), settings={"dynamic": {"-:.*mlp.gate$": {}}}),
    ),
}

FLOATS = {
    "fp8": Packing("compressed-tensors", symmetric=True, bits=8, stored="float-quantized", activations=FP8),
    "fp8 in blocks": Packing(
        "compressed-tensors", symmetric=True, bits=8, stored="float-quantized", activations=FP8, block=(32, 64)
    ),
    "fp8 in blocks, as DeepSeek has it": Packing("fp8", block=(64, 32), keep=("v_proj",)),
}
"""What becomes floats while loading."""


class Folders(NamedTuple):
    packed: Path
    values: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folders]:
    """case -> the packed checkpoint and the one of its values, made when first asked for."""

    @cache
    def made(case: str) -> Folders:
        name, packing = CASES[case] if case in CASES else ("llama", FLOATS[case])
        folder = tmp_path_factory.mktemp("packed")
        found = Folders(folder / "packed", folder / "values")
        write_packed(save(make_model(name), folder / "floats"), packing, *found)
        return found

    return made


@pytest.mark.parametrize(
    "packing", [Packing("fp8", block=(32, 32), keep=("mlp.gate",)), Packing("gptq", keep=("mlp.gate",))], ids=str
)
def test_latent_attention_reads_its_matrices_by_head(packing: Packing, tmp_path: Path) -> None:
    packed, values = tmp_path / "packed", tmp_path / "values"
    write_packed(save(make_model("deepseek-v3"), tmp_path / "floats"), packing, packed, values)
    torch.testing.assert_close(logits(packed), logits(values), rtol=1e-4, atol=1e-4)


def load(
    folder: Path, kernels: str = "torch", quantization: str | None = None, on: DeviceUnderTest = ON_CPU
) -> ForwardRunner:
    ops = on.ops(kernels)
    return ForwardRunner(load_model(identify(folder), ops, torch.float32, on.device, quantization), ops)


def logits(
    folder: Path, kernels: str = "torch", quantization: str | None = None, on: DeviceUnderTest = ON_CPU
) -> torch.Tensor:
    return run(load(folder, kernels, quantization, on), on)


def run(model: ForwardRunner, on: DeviceUnderTest = ON_CPU) -> torch.Tensor:
    with torch.inference_mode():
        runner = PagedRunner(model, 1, 40, torch.float32, block_size=16, device=on.device)
        return runner.logits([(0, 0, PROMPT)])[0]


def check_values(packed: Path, values: Path, on: DeviceUnderTest) -> None:
    """Two checkpoints have the same bits on kernels that multiply floats, and read scales and zero points exactly.

    A GPU's kernels multiply the codes, and sum in another order than those of floats.
    """
    ours, theirs = logits(packed, on=on), logits(values, on=on)
    if type(on.ops()) is TorchOps:
        assert torch.equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("case", [*CASES, *FLOATS])
def test_same_logits_as_the_values(case: str, folders: Callable[[str], Folders], on: DeviceUnderTest) -> None:
    check_values(*folders(case), on)


@dataclass(frozen=True, slots=True, eq=False)
class RoundedInputs(PlainLinear):
    """The definition of the native kernels' product with 4-bit codes: inputs of 8 bits, in groups of 32."""

    order: torch.Tensor | None = None

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            stored = self.order >= 0
            codes, scales = quantize_rows(torch.where(stored, x[:, self.order.clamp(min=0)], 0), 32)
            rounded = (codes.float().unflatten(1, (-1, 32)) * scales.unsqueeze(-1)).flatten(1)
            return torch.empty_like(x).index_copy(1, self.order[stored].long(), rounded[:, stored])
        codes, scales = quantize_rows(x, 32)
        return (codes.float().unflatten(1, (-1, 32)) * scales.unsqueeze(-1)).flatten(1)[:, : x.shape[1]]


class RoundedInputOps(ReferenceOps):
    def prepare_quantized_linear(
        self, weight: CodedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None, in_pairs: bool = False
    ) -> PlainLinear:
        assert not isinstance(weight, Fp8Weight)
        codes = codes_of(weight)
        return RoundedInputs(codes.dequantize(), bias, codes.input_order)


@pytest.mark.parametrize("case", CASES)
def test_native_products_of_codes(case: str, folders: Callable[[str], Folders]) -> None:
    """They quantise the input to 8 bits: near the values, and nearer to the same model that says so in plain torch.

    From that they differ by no more than a few codes of inputs that are halfway between two.
    """
    packed, values = folders(case)
    ours, exact = logits(packed, "native"), logits(values)
    ops: Any = RoundedInputOps()
    rounded = run(ForwardRunner(load_model(identify(packed), ops, torch.float32, ON_CPU.device), ops))
    assert 0 < (ours - exact).norm() < 0.25 * exact.norm()
    assert (ours - rounded).norm() < 0.05 * rounded.norm()


@pytest.mark.parametrize("case", ["awq", pytest.param("gptq of version 2, qwen3", marks=pytest.mark.slow)])
def test_triton_products_of_codes_are_those_of_the_values(
    case: str, folders: Callable[[str], Folders], without_triton: Callable[[str], NoReturn]
) -> None:
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    packed, values = folders(case)
    torch.testing.assert_close(logits(packed, "triton"), logits(values), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("case", ["awq", "awq of qwen3", "gptq", "gptq, symmetric"])
def test_greedy_tokens_are_those_of_the_values(
    case: str, folders: Callable[[str], Folders], on: DeviceUnderTest
) -> None:
    """In chunks, next to rows that decode; the values on the reference kernels."""
    packed, values = folders(case)
    prompts = [PROMPT[:5], PROMPT[:1], PROMPT]
    with torch.inference_mode():
        ours, theirs = (
            generate(PagedRunner(load(folder, kernels, on=on), 3, 40, torch.float32, device=on.device), prompts, 10, 7)
            for folder, kernels in ((packed, "torch"), (values, "reference"))
        )
    assert ours == theirs


def forms_of(folder: Path, quantization: str | None = None) -> dict[str, WeightForm]:
    return {
        path: NATIVE_FORMS[parameter.value.record.kind]
        for path, parameter in parameters(load(folder, "native", quantization).model)
        if isinstance(parameter.value, PackedWeight)
    }


def test_codes_stay_codes(folders: Callable[[str], Folders]) -> None:
    """Also of fused projections; one with a part of floats is held as floats, and so is the head."""
    held = forms_of(folders("awq").packed)
    assert held.pop("lm_head.weight") is FLOAT32
    assert set(held.values()) == {Q4_ZERO}
    assert set(forms_of(folders("gptq, symmetric").packed).values()) == {Q4, FLOAT32}
    held = forms_of(folders("awq, layers left out").packed)
    floats = {path for path, form in held.items() if form is FLOAT32}
    assert {path for path in held if "qkv" in path} < floats
    assert {path for path in floats if ".mlp." in path} == {path for path in held if "1.mlp.gate_up" in path}


@pytest.mark.parametrize("case", ["awq", "gptq"])
def test_the_setting_may_name_the_format_or_ask_for_int8(case: str, folders: Callable[[str], Folders]) -> None:
    packed, values = folders(case)
    assert resolve_quantization(identify(packed), None) == case
    assert torch.equal(logits(packed, "native", case), logits(packed, "native"))
    other = {"awq": "gptq", "gptq": "awq"}[case]
    with pytest.raises(ConfigError, match=f"quantization='{other}' needs a checkpoint quantised by {other.upper()}"):
        load(packed, quantization=other)
    with pytest.raises(ConfigError, match=f"quantization='{case}' needs a checkpoint quantised by {case.upper()}"):
        load(values, quantization=case)
    assert torch.equal(logits(packed, "native", "int8"), logits(values, "native", "int8"))


def test_without_an_order_of_groups(tmp_path: Path, on: DeviceUnderTest) -> None:
    """GPTQ checkpoints may leave g_idx out."""
    floats = save(make_model("llama"), tmp_path / "floats")
    write_packed(floats, Packing("gptq"), tmp_path / "packed", tmp_path / "values", keep_g_idx=False)
    check_values(tmp_path / "packed", tmp_path / "values", on)


def test_a_dense_sparsity_config_says_nothing(folders: Callable[[str], Folders], tmp_path: Path) -> None:
    dense = {"format": "dense", "global_sparsity": 0.1, "ignore": [], "targets": []}
    target = settings_of(folders("w4a16").packed, tmp_path / "model", sparsity_config=dense)
    assert torch.equal(logits(target), logits(folders("w4a16").packed))


def test_summary_counts_codes_as_parameters(folders: Callable[[str], Folders]) -> None:
    packed, values = (summarize_weights(identify(folder)) for folder in folders("gptq"))
    assert packed.num_parameters == values.num_parameters
    assert set(packed.bytes_by_type) == {"GPTQ", "F32"}
    assert sum(packed.bytes_by_type.values()) == packed.num_bytes < values.num_bytes / 2


# ---- what is refused


@pytest.fixture(scope="module")
def gptq_tensors(folders: Callable[[str], Folders]) -> dict[str, torch.Tensor]:
    return load_file(folders("gptq").packed / "model.safetensors")


W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
BROKEN = "model.layers.1.mlp.down_proj"  # [96, 160], in groups of 32


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("qweight", lambda t: None, f"tensor '{BROKEN}.weight' is missing"),
        ("qzeros", lambda t: None, f"tensor '{BROKEN}.qzeros' is missing"),
        ("scales", lambda t: None, f"tensor '{BROKEN}.scales' is missing"),
        ("qweight", lambda t: t[:-1], r"tensor '.*' has the shape"),
        ("qweight", lambda t: t[0], r"a packed matrix has two dimensions"),
        ("qweight", lambda t: t.float(), r"qweight' is F32, expected I32"),
        (
            "scales",
            lambda t: t[:3],
            r"scales' has the shape \(3, 96\), \(5, 96\) is what .* group_size = 32 ask for",
        ),
        ("scales", lambda t: t.int(), r"scales' is I32, expected F16 or BF16 or F32"),
        ("qzeros", lambda t: t[:, :-1], r"qzeros' has the shape \(5, 11\), \(5, 12\) is what"),
        ("g_idx", lambda t: t[:-1], r"g_idx' has the shape \(159,\), \(160,\) is what"),
        (
            "g_idx",
            lambda t: t.flip(0),
            rf"tensor '{BROKEN}.qweight' has groups that are not in order, .*correct desc_act",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    message: str,
    folders: Callable[[str], Folders],
    gptq_tensors: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    changed = change(gptq_tensors[f"{BROKEN}.{part}"])
    tensors = {name: tensor for name, tensor in gptq_tensors.items() if name != f"{BROKEN}.{part}"}
    tensors |= {} if changed is None else {f"{BROKEN}.{part}": changed.contiguous()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders("gptq").packed / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def settings_of(folder: Path, target: Path, **changes: Any) -> Path:
    """Write the same checkpoint with changes of its quantization_config; None removes a setting."""
    target.mkdir()
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    settings = values["quantization_config"] | changes
    values["quantization_config"] = {key: value for key, value in settings.items() if value is not None}
    (target / "config.json").write_text(json.dumps(values))
    return target


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "gptq",
            {"quant_method": "hqq"},
            "'hqq' is not supported; supported: awq, gptq, compressed-tensors, fp8, mxfp4;",
        ),
        ("gptq", {"quant_method": None}, "quant_method None is not supported"),
        ("gptq", {"bits": 3}, r"bits = 3 is not supported; supported: 4, 8; .*quantization='int8'"),
        ("awq", {"bits": 8}, r"bits = 8 is not supported; supported: 4; .*quantization='int8'"),
        ("awq", {"bits": None}, "'bits' is missing"),
        ("awq", {"bits": "4"}, "bits = '4', expected a positive integer"),
        ("gptq", {"group_size": 48}, "group_size = 48 is not supported; supported: -1 and multiples of 32"),
        ("gptq", {"group_size": 0}, "group_size = 0, expected a positive integer"),
        ("awq", {"group_size": None}, "'group_size' is missing"),
        ("awq", {"group_size": 96}, r"scales' has the shape \(3, 96\), \(1, 96\) is .* group_size = 96 ask for"),
        ("awq", {"version": "gemv"}, r"version 'gemv' is not supported; supported: gemm; .*version='GEMM'"),
        ("awq", {"version": "gemv_fast"}, "version 'gemv_fast' is not supported"),
        ("awq", {"zero_point": False}, "says? that it is symmetric .* has a zero point of"),
        ("awq", {"zero_point": 1}, "zero_point = 1, expected true or false"),
        ("gptq", {"sym": True}, "says? that it is symmetric .* has a zero point of"),
        ("gptq, symmetric", {"checkpoint_format": "gptq_v2"}, "has a zero point of 7 instead of 8; correct sym"),
        ("w4a16", {"format": "marlin-24"}, "format 'marlin-24' is not supported; supported: pack-quantized, int-quant"),
        ("w4a16", {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config .* is not supported"),
        ("w4a16", {"config_groups": {}}, "'config_groups' is missing"),
        ("w4a16", {"config_groups": {"a": {}}}, "config_groups: a has no 'weights'"),
        *(
            ("w4a16", {"config_groups": {"a": {"weights": W4 | changes}}}, message)
            for changes, message in (
                ({"num_bits": 2}, "a: weights: num_bits = 2 is not supported; supported: 4, 8"),
                ({"type": "float"}, "num_bits = 4 is not supported; supported: 8"),
                ({"type": "nf4"}, "type 'nf4' is not supported; supported: int, float"),
                ({"strategy": "tensor_group"}, "strategy 'tensor_group' is not supported; supported: tensor, channel"),
                ({"actorder": "up"}, "actorder 'up' is not supported"),
                ({"dynamic": True}, "dynamic True is not supported; supported: false"),
                ({"group_size": 16}, "group_size = 16 is not supported"),
            )
        ),
        (
            "w4a16",
            {"config_groups": {"a": {"weights": W4}, "b": {"weights": W4 | {"num_bits": 8}}}},
            "2 ways to quantise weights in one model are not supported",
        ),
        ("fp8 in blocks, as DeepSeek has it", {"fmt": "e5m2"}, "fmt 'e5m2' is not supported; supported: e4m3"),
        (
            "fp8 in blocks, as DeepSeek has it",
            {"weight_block_size": [128]},
            r"weight_block_size = \[128\], expected two positive integers",
        ),
        (
            "fp8 in blocks, as DeepSeek has it",
            {"weight_block_size": [16, 32]},
            r"weight_scale_inv' has the shape .* ask for",
        ),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format says 'marlin', which is not supported; supported"),
        ("gptq", {"format": "bitblas"}, "format says 'bitblas', which is not supported"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format says 'marlin', which is not supported"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype 'int16' is not supported; supported: int32"),
        ("gptq", {"dynamic": {"+:.*up_proj": {"bits": 8}}}, r"dynamic has settings of its own for '\+:\.\*up_proj'"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)
def test_settings_that_are_refused(
    case: str, changes: dict[str, Any], message: str, folders: Callable[[str], Folders], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(settings_of(folders(case).packed, tmp_path / "model", **changes))
    assert "quantization_config" in str(caught.value) or "tensor '" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_codes_without_settings(folders: Callable[[str], Folders], tmp_path: Path) -> None:
    target = settings_of(folders("awq").packed, tmp_path / "model")
    values = json.loads((target / "config.json").read_text())
    del values["quantization_config"]
    (target / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"there is '.*\.qweight': .* no quantization_config that says how"):
        load(target)
