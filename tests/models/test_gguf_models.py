"""A GGUF and the safetensors folder with the same values are the same model, bit for bit."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from pagoda.base.errors import ConfigError
from pagoda.base.model_spec import ModelSpec
from pagoda.kernels.linear.forms import FLOATS, GGUF_TYPES
from pagoda.kernels.linear.packed import PackedWeight
from pagoda.kernels.native.build import NativeUnavailable
from pagoda.kernels.native.library import load as load_library
from pagoda.layers.lora_targets import lora_targets
from pagoda.layers.module import parameters
from pagoda.loading.gguf_file import GGUFFile, open_gguf
from pagoda.loading.loader import load_model
from pagoda.loading.model_config import read_architecture, read_model, summarize_weights
from pagoda.loading.model_files import identify
from pagoda.loading.pieces import check_all_used
from pagoda.worker.forward_runner import ForwardRunner
from tests.device_under_test import DeviceUnderTest
from tests.models.gguf_writer import q4_k_m, write_gguf
from tests.models.paged_runner import PagedRunner
from tests.models.tiny import LONGROPE, VOCAB, WIDE, make_model, save
from tests.models.wide_states import IN_GGUF, WIDE_STATES

PROMPT = torch.randint(3, VOCAB, (23,), generator=torch.Generator().manual_seed(5)).tolist()

CASES = [
    ("llama", Kind.F32),
    ("llama", Kind.Q4_1),
    ("llama-tied-biased", Kind.F16),
    ("llama-mha-wide-heads", Kind.BF16),
    ("mistral", Kind.Q4_0),
    ("qwen2", Kind.Q5_0),
    ("qwen2", Kind.Q5_1),
    ("qwen3", Kind.Q8_0),
    ("mixtral", Kind.Q8_0),
    ("mixtral", Kind.F32),
    ("qwen3-moe-renormalized", Kind.Q4_1),
    ("qwen3-moe-renormalized", Kind.F16),
    ("olmoe", Kind.Q4_0),
    ("gpt2", Kind.F16),
    ("gpt-neox", Kind.Q8_0),
    ("phi", Kind.Q4_0),
    ("phi3", Kind.Q4_1),
    ("starcoder2", Kind.Q8_0),
    ("stablelm", Kind.F16),
    ("cohere", Kind.Q8_0),
    ("gemma3-scale-of-head-dim", Kind.Q8_0),
    ("gemma3-scale-of-head-dim", Kind.F32),
    ("gemma2-scale-of-head-dim", Kind.Q8_0),
    ("olmo2", Kind.Q8_0),
    ("smollm3", Kind.Q8_0),
    ("exaone4-full", Kind.Q8_0),
    ("granite", Kind.Q8_0),
    ("glm4", Kind.Q8_0),
    ("granitemoe", Kind.Q8_0),
    ("seed-oss", Kind.F16),
    ("arcee", Kind.Q8_0),
    ("ernie4.5", Kind.F16),
    ("hunyuan", Kind.F16),
    ("ernie4.5-moe", Kind.F16),
    ("glm4-moe", Kind.F16),
    ("minimax-m2", Kind.F16),
    ("lfm2", Kind.Q8_0),
    ("lfm2-moe", Kind.F16),
    ("mamba2", Kind.Q8_0),
    ("mamba2", Kind.F32),
    ("nemotron-h", Kind.F16),
    ("nemotron-h-latent", Kind.Q8_0),
    ("qwen3-next", Kind.F16),
    ("granite4", Kind.Q8_0),
    ("granite4-dense", Kind.F32),
]


def logits(path: Path, on: DeviceUnderTest) -> torch.Tensor:
    with torch.inference_mode():
        ops = on.ops()
        model = ForwardRunner(load_model(identify(path), ops, torch.float32, on.device), ops)
        return PagedRunner(model, 1, 40, torch.float32, device=on.device).logits([(0, 0, PROMPT)])


@pytest.mark.parametrize(("name", "kind"), CASES, ids=lambda value: getattr(value, "name", value))
def test_same_bits_from_gguf_and_safetensors(name: str, kind: Kind, tmp_path: Path, on: DeviceUnderTest):
    model = make_model(name, **IN_GGUF.get(name, {}))
    write_gguf(model, tmp_path / "model.gguf", kind)
    folder = save(model, tmp_path / "folder")
    assert torch.equal(logits(tmp_path / "model.gguf", on), logits(folder, on))
    spec = read_architecture(identify(tmp_path / "model.gguf"))[1].spec
    other = read_architecture(identify(folder))[1].spec
    assert shapes(spec) == shapes(other)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16], ids=["F32", "F16"])
@pytest.mark.parametrize("name", ["falcon-h1", "qwen3.5", "qwen3.5-attention-last", "qwen3.5-moe"])
def test_what_is_stored_multiplied_or_in_another_order(name: str, kind: Kind, tmp_path: Path, on: DeviceUnderTest):
    """Falcon-H1's weights have its multipliers; heads of Qwen3.5's delta rule, and with them columns, change places."""
    model = make_model(name)
    write_gguf(model, tmp_path / "model.gguf", kind)
    found, expected = logits(tmp_path / "model.gguf", on), logits(save(model, tmp_path / "folder"), on)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    adapted = lora_targets(read_model(identify(tmp_path / "model.gguf")))
    assert not [path for path in adapted if name == "falcon-h1" or path.endswith(("in_proj_qkv", "out_proj"))]


IN_BLOCKS: dict[str, Kind | Callable[[str], Kind]] = {
    **{name: Kind[name] for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")},
    "Q4_K_M": q4_k_m,
}


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_native_kernels_multiply_the_codes_of_a_file(
    name: str, tmp_path: Path, on: DeviceUnderTest, without_native: Callable[[str], NoReturn]
) -> None:
    """Logits and tokens are near those of the dequantised file, which has those of the values, and whose weights are
    floats.
    """
    try:
        load_library()
    except NativeUnavailable as error:
        without_native(str(error))
    forms = {GGUF_TYPES[kind].form.kind for kind in (("Q4_K", "Q6_K") if name == "Q4_K_M" else (name,))}
    found, kinds = of_codes_and_values(make_model("llama-tied-biased", **WIDE), IN_BLOCKS[name], tmp_path, on)
    assert set[int]().union(*kinds["codes"].values()) == forms
    assert set[int]().union(*kinds["dequantised"].values(), *kinds["values"].values()) == {FLOATS["float32"].kind}
    assert torch.equal(found["dequantised"], found["values"])
    # The native kernels round inputs to 8 bits.
    assert 0 < (found["codes"] - found["values"]).norm() < 0.06 * found["values"].norm()
    assert int((found["codes"].argmax(-1) == found["values"].argmax(-1)).sum()) >= 8


@pytest.mark.parametrize("name", ["mamba2", "falcon-h1", "nemotron-h", "qwen3.5", "lfm2"])
def test_native_kernels_multiply_the_codes_of_recurrent_layers(
    name: str, tmp_path: Path, on: DeviceUnderTest, without_native: Callable[[str], NoReturn]
) -> None:
    """Those of what goes into them in Q4_K, of what comes out in Q6_K."""
    try:
        load_library()
    except NativeUnavailable as error:
        without_native(str(error))
    model = make_model(name, **{**IN_GGUF.get(name, {}), **WIDE_STATES[name]})
    found, kinds = of_codes_and_values(model, lambda key: Kind.Q6_K if "out_proj" in key else Kind.Q4_K, tmp_path, on)
    in_codes = {path.rsplit(".", 2)[1]: forms for path, forms in kinds["codes"].items()}
    for projection, kind in (("in_proj", "Q4_K"), ("out_proj", "Q6_K")):
        assert in_codes[projection] == {GGUF_TYPES[kind].form.kind}
    # Falcon-H1's multipliers are divided out, and Qwen3.5's heads are in another order.
    tolerance = 1e-5 * float(found["values"].abs().max()) if name in ("falcon-h1", "qwen3.5") else 0
    torch.testing.assert_close(found["dequantised"], found["values"], rtol=0, atol=tolerance)
    errors = (found["codes"] - found["values"]).norm(dim=-1) / found["values"].norm(dim=-1)
    assert 0 < errors.median() < 0.1
    assert int((found["codes"].argmax(-1) == found["values"].argmax(-1)).sum()) >= 7


def of_codes_and_values(
    model: PreTrainedModel, kind: Kind | Callable[[str], Kind], folder: Path, on: DeviceUnderTest
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, set[int]]]]:
    """Return logits of a file's codes, of the same dequantised, and of a checkpoint with its values; and the forms of
    the weights of each, by path.
    """
    write_gguf(model, folder / "model.gguf", kind)
    ops = on.ops("native")
    found: dict[str, torch.Tensor] = {}
    kinds: dict[str, dict[str, set[int]]] = {}
    for case, path, quantization in (
        ("codes", folder / "model.gguf", None),
        ("dequantised", folder / "model.gguf", "none"),
        ("values", save(model, folder / "folder"), None),
    ):
        loaded = load_model(identify(path), ops, torch.float32, on.device, quantization)
        weights = {path: of.value for path, of in parameters(loaded) if isinstance(of.value, PackedWeight)}
        kinds[case] = {path: {part.record.kind for part in chain_of(weight)} for path, weight in weights.items()}
        with torch.inference_mode():
            runner = PagedRunner(ForwardRunner(loaded, ops), 1, 40, torch.float32, block_size=8)
            found[case] = torch.cat([runner.logits([(0, at, [token])]) for at, token in enumerate(PROMPT[:9])])
    return found, kinds


def chain_of(weight: PackedWeight | None) -> list[PackedWeight]:
    return [] if weight is None else [weight, *chain_of(weight.next)]


def test_gpt_oss_with_experts_in_mxfp4(tmp_path: Path, on: DeviceUnderTest):
    """As published: with YaRN, and without the limit of the experts' activation, which is always the same."""
    model = make_model("gpt-oss", swiglu_limit=7.0)
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 8.0}
    metadata: dict[str, Any] = {f"rope__scaling__{key}": value for key, value in scaling.items()}
    path = tmp_path / "model.gguf"
    write_gguf(model, path, lambda name: Kind.MXFP4 if ".experts." in name else Kind.Q8_0, **metadata)
    assert torch.equal(logits(path, on), logits(save(model, tmp_path / "folder"), on))
    assert {"MXFP4", "Q8_0"} < set(summarize_weights(identify(path)).bytes_by_type)


def shapes(spec: ModelSpec) -> tuple[object, ...]:
    """What must not depend on the format (a Mistral in a GGUF calls itself llama)."""
    return (
        *(
            spec.vocab_size,
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_layers,
            spec.num_heads,
            spec.num_kv_heads,
        ),
        *(spec.head_dim, spec.max_position, spec.layer_windows, spec.eos_token_ids, spec.tie_embeddings),
    )


def test_llama3_rope_from_frequency_factors(tmp_path: Path, on: DeviceUnderTest):
    """llama.cpp stores Llama 3's scaling as a tensor of divisors."""
    model = make_model("llama-rope-llama3")
    folder = save(model, tmp_path / "folder")
    plain = 1.0 / 500.0 ** (torch.arange(0, 32, 2).float() / 32)
    factors = plain / model.model.rotary_emb.inv_freq
    write_gguf(model, tmp_path / "model.gguf", Kind.F32, factors=factors.numpy())
    torch.testing.assert_close(logits(tmp_path / "model.gguf", on), logits(folder, on), rtol=1e-5, atol=1e-5)


YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 16,
    "rope__scaling__yarn_beta_fast": 8.0,
}


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        ("llama-rope-linear", {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}),
        ("llama-rope-yarn", YARN),
        ("olmo3", YARN),  # of layers without a window
    ],
)
def test_rope_scaling_from_metadata(name: str, metadata: dict[str, Any], tmp_path: Path, on: DeviceUnderTest):
    model = make_model(name)
    folder = save(model, tmp_path / "folder")
    write_gguf(model, tmp_path / "model.gguf", Kind.F32, **metadata)
    assert torch.equal(logits(tmp_path / "model.gguf", on), logits(folder, on))


def test_longrope_from_tensors(tmp_path: Path, on: DeviceUnderTest):
    model = make_model("phi3", **LONGROPE)
    folder = save(model, tmp_path / "folder")
    factors = {
        f"rope_factors_{kind}": np.array(LONGROPE["rope_parameters"][f"{kind}_factor"], np.float32)
        for kind in ("short", "long")
    }
    attention_factor = {"rope__scaling__attn_factor": math.sqrt(1.5)}  # 1 + log(64 / 16) / log(16)
    settings: dict[str, Any] = {"rope__scaling__original_context_length": 16, **attention_factor, **factors}
    write_gguf(model, tmp_path / "model.gguf", Kind.F32, **settings)
    torch.testing.assert_close(logits(tmp_path / "model.gguf", on), logits(folder, on), rtol=1e-5, atol=1e-5)


def test_the_memory_of_weights_is_known_without_reading_them(tmp_path: Path):
    model = make_model("llama")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    folder = identify(save(model, tmp_path / "folder"))
    assert summarize_weights(folder).num_bytes == 4 * num_parameters
    assert summarize_weights(folder).bytes_by_type == {"F32": 4 * num_parameters}
    write_gguf(model, tmp_path / "model.gguf", Kind.Q8_0)
    summary = summarize_weights(identify(tmp_path / "model.gguf"))
    assert summary.num_parameters == num_parameters
    assert list(summary.bytes_by_type) == ["Q8_0", "F32"]
    matrices = num_parameters - summary.bytes_by_type["F32"] // 4
    assert summary.bytes_by_type["Q8_0"] == matrices // 32 * 34


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3-moe", "olmoe"])
def test_a_models_class_is_named_after_its_architecture(name: str, tmp_path: Path):
    architecture, config = read_architecture(identify(save(make_model(name), tmp_path)))
    assert config.spec.architecture == architecture.name == name.replace("-", "_")


def test_weights_of_a_layer_that_the_model_would_not_read_are_refused(tmp_path: Path) -> None:
    """Command-R+ is a Command-R whose queries and keys are normed; only its tensors say so."""
    path = tmp_path / "model.gguf"
    write_gguf(make_model("cohere"), path, Kind.F32)
    files = identify(path)
    architecture = read_architecture(files)[0]
    stored = [*open_gguf(path).tensors, "blk.0.attn_q_norm.weight", "blk.0.attn_rot_embd.weight"]
    with pytest.raises(ConfigError, match=r"1 tensors of its layers, such as 'blk.0.attn_q_norm.weight', are not"):
        check_all_used(stored, files, architecture.gguf, read_model(files))


def test_weights_of_draft_heads_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_model("glm4-moe"), path, Kind.F32)
    files = identify(path)
    stored = [*open_gguf(path).tensors, "blk.3.attn_q.weight", "blk.3.nextn.eh_proj.weight"]
    check_all_used(stored, files, read_architecture(files)[0].gguf, read_model(files))
    with pytest.raises(ConfigError, match=r"such as 'blk.3.attn_q.weight'"):
        check_all_used(stored[:-1], files, read_architecture(files)[0].gguf, read_model(files))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model in several files."""
    folder = tmp_path_factory.mktemp("parts")
    write_gguf(make_model("llama"), folder / "model.gguf", Kind.Q8_0, tensors_per_file=12)
    found = sorted(folder.iterdir())
    assert len(found) > 2
    assert found[0].name == f"model-00001-of-{len(found):05}.gguf"
    return found


def test_a_model_in_several_files_is_that_in_one(parts: list[Path], tmp_path: Path, on: DeviceUnderTest) -> None:
    """Given the first file or the folder."""
    write_gguf(make_model("llama"), tmp_path / "model.gguf", Kind.Q8_0)
    assert identify(parts[0].parent).path == parts[0]
    assert [*identify(parts[0]).sizes()] == parts
    assert torch.equal(logits(parts[0], on), logits(tmp_path / "model.gguf", on))


def test_parts_that_are_missing_or_not_the_first_are_named(parts: list[Path], tmp_path: Path) -> None:
    count = len(parts)
    with pytest.raises(ConfigError, match=rf"{parts[1].name} is a part of a model in {count} files; name the first, "):
        identify(parts[1])
    for part in parts[:-1]:
        (tmp_path / part.name).symlink_to(part)
    with pytest.raises(ConfigError, match=rf"{parts[-1].name} is missing: the model is in {count} files"):
        identify(tmp_path)
    (tmp_path / parts[-1].name).symlink_to(parts[1])
    with pytest.raises(ConfigError, match=f"{parts[-1].name}: is part 2 of a model in {count} files, whose names must"):
        open_gguf(tmp_path / parts[0].name)
    (tmp_path / "renamed.gguf").symlink_to(parts[0])
    with pytest.raises(ConfigError, match=r"renamed.gguf: is part 1 of a model in .* rename them, and name the first"):
        open_gguf(tmp_path / "renamed.gguf")


def test_a_tensor_in_two_parts_is_refused(parts: list[Path], tmp_path: Path) -> None:
    for part in parts:
        (tmp_path / part.name).write_bytes(part.read_bytes())
    names = [name for name in GGUFFile(parts[1], 1).tensors if name.startswith("blk.1.ffn_")]
    again = tmp_path / parts[1].name
    again.write_bytes(again.read_bytes().replace(names[0].encode(), names[0].replace("blk.1", "blk.0").encode()))
    with pytest.raises(
        ConfigError, match=rf"'blk.0.ffn_\w+.weight' is in {parts[0].name} and in {parts[1].name}; fetch"
    ):
        open_gguf(tmp_path / parts[0].name)
