"""What `pagoda plan` says the weights take is what they take."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from pagoda.base.ranks import RankPlace
from pagoda.kernels.linear.forms import GGUF_TYPES
from pagoda.kernels.linear.library import LibraryLinear
from pagoda.kernels.linear.packed import PackedExperts, PackedTable, PackedWeight
from pagoda.kernels.linear.reference import PlainLinear
from pagoda.kernels.linear.triton_forms import TritonWeight
from pagoda.kernels.moe.reference import ExpertList
from pagoda.kernels.native.build import NativeUnavailable
from pagoda.kernels.native.library import load
from pagoda.kernels.select import select_ops
from pagoda.layers.module import parameters
from pagoda.layers.parameter import Matrix
from pagoda.layers.rotary import RotaryTables
from pagoda.layers.sharding import ALONE, RankNumber
from pagoda.loading.loader import load_model
from pagoda.loading.model_files import ModelFiles, identify
from pagoda.loading.weight_memory import PreparedAs, weight_memory
from pagoda.loading.weights import Weights, open_weights
from pagoda.models.base import Model
from pagoda.worker.devices.cpu import CpuDevice
from tests.models.gguf_writer import q4_k_m, write_gguf
from tests.models.packed_writer import Packing, write_packed
from tests.models.tiny import WIDE, make_model, save
from tests.models.tiny_encoders import make_encoder, save_encoder
from tests.models.wide_states import IN_GGUF, WIDE_STATES

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module", autouse=True)
def _native(without_native: Callable[[str], NoReturn]) -> None:
    try:
        load()
    except NativeUnavailable as error:
        without_native(str(error))


def tensors_of(value: Any) -> Iterator[Any]:
    """What a loaded parameter holds."""
    match value:
        case torch.Tensor():
            yield value
        case float():
            pass
        case RotaryTables():
            yield from (value.cos, value.sin)
        case PackedTable():
            yield from tensors_of(value.weight)
        case PackedWeight():
            yield from (value.panels, *(() if value.bias is None else (value.bias,)))
            if value.next is not None:
                yield from tensors_of(value.next)
        case TritonWeight():
            fields = (value.codes, value.scales, value.minima, value.bias)
            yield from (tensor for tensor in fields if tensor is not None)
        case LibraryLinear() | PlainLinear():
            yield from (value.weight, *(() if value.bias is None else (value.bias,)))
        case ExpertList() | PackedExperts():
            for weight in value.weights:
                yield from tensors_of(weight)
        case _:
            raise TypeError(type(value).__name__)


def held(model: Model) -> int:
    """Bytes of all parameters, memory that several of them share counted once."""
    tensors = [tensor for _, parameter in parameters(model) for tensor in tensors_of(parameter.value)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def loaded(files: ModelFiles, kernels: str, prepared: PreparedAs, ranks: RankNumber = ALONE) -> Model:
    ops = select_ops(kernels, CpuDevice(1))
    return load_model(
        files, ops, DTYPES[prepared.dtype], CPU, prepared.quantization, prepared.num_positions, ranks=ranks
    )


SHARES: dict[str, tuple[str, Any, str | None]] = {
    "floats, tied": ("llama-tied-biased", None, None),
    "int8 experts": ("qwen3-moe-some-layers", None, "int8"),
    "gguf": ("gemma3", Kind.Q8_0, "gguf"),
    "awq": ("llama-tied-biased", Packing("awq"), None),
    "gptq": ("llama", Packing("gptq", group=-1), None),
}


@pytest.mark.parametrize("case", SHARES)
def test_a_rank_holds_its_share_and_reads_no_more(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks read together is the file, and a second time only what all of them have."""
    name, how, quantization = SHARES[case]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256}
    model = make_model(name, **heads, **({"moe_intermediate_size": 128} if "moe" in name else {}))
    if isinstance(how, Kind):
        write_gguf(model, tmp_path / "model.gguf", how)
        files = identify(tmp_path / "model.gguf")
    else:
        files = identify(save(model, tmp_path / "floats"))
    if isinstance(how, Packing):
        write_packed(files.path, how, tmp_path / "packed", tmp_path / "values", keep_g_idx=False)
        files = identify(tmp_path / "packed")
    opened: list[Weights] = []
    monkeypatch.setattr(
        "pagoda.loading.loader.open_weights", lambda *args: opened.append(open_weights(*args)) or opened[-1]
    )
    prepared = PreparedAs("float32", quantization, packed=True, num_positions=64)
    whole = loaded(files, "native", prepared)
    for rank in range(2):
        tree = loaded(files, "native", prepared, RankNumber(rank, 2))
        assert weight_memory(files, prepared, (RankPlace(rank, 2),)) == held(tree)
        assert held(tree) < 0.65 * held(whole)
    of_whole, *of_ranks = (weights.bytes_read for weights in opened)
    assert of_whole <= sum(of_ranks) < 1.15 * of_whole
    assert max(of_ranks) < 0.6 * of_whole


def test_what_is_converted_counts_as_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = identify(save(make_model("llama-tied-biased"), tmp_path))
    opened: list[Weights] = []
    monkeypatch.setattr(
        "pagoda.loading.loader.open_weights", lambda *args: opened.append(open_weights(*args)) or opened[-1]
    )
    for dtype in ("float32", "bfloat16"):
        loaded(files, "native", PreparedAs(dtype, None, packed=True, num_positions=50))
    as_stored, converted = (weights.bytes_read for weights in opened)
    assert converted == as_stored


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["llama-tied-biased", "gemma3", "gemma4-shared", "qwen3-moe-some-layers", "lfm2", "mamba2", "qwen3-next"]
)
def test_packed(name: str, dtype: str, quantization: str | None, tmp_path: Path) -> None:
    files = identify(save(make_model(name), tmp_path))
    prepared = PreparedAs(dtype, quantization, packed=True, num_positions=50)
    assert weight_memory(files, prepared) == held(loaded(files, "native", prepared))


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["roberta", "modernbert"])
def test_encoders(name: str, quantization: str | None, tmp_path: Path) -> None:
    """Tables without their first rows, norms without a bias in the checkpoint, and a classification head."""
    files = identify(save_encoder(make_encoder(name, "classifier"), tmp_path))
    prepared = PreparedAs("float32", quantization, packed=True, num_positions=50)
    assert weight_memory(files, prepared) == held(loaded(files, "native", prepared))


@pytest.mark.parametrize("kind", [*GGUF_TYPES, "F16", "Q4_K_M"])
@pytest.mark.parametrize("name", ["llama-tied-biased", "mixtral"])
def test_codes_of_a_gguf(name: str, kind: str, tmp_path: Path) -> None:
    """A tied embedding reads its rows from the head's codes."""
    changes = WIDE if kind.endswith(("_K", "_K_M", "_XS")) else {}  # blocks of 256 elements
    write_gguf(make_model(name, **changes), tmp_path / "model.gguf", q4_k_m if kind == "Q4_K_M" else Kind[kind])
    files = identify(tmp_path / "model.gguf")
    prepared = PreparedAs("bfloat16", "gguf", packed=True, num_positions=64)
    model = loaded(files, "native", prepared)
    assert weight_memory(files, prepared) == held(model)
    quantised = [
        parameter.value.dtype is None
        for _, parameter in parameters(model)
        if isinstance(parameter.declared, Matrix) and isinstance(parameter.value, PackedWeight)
    ]
    assert any(quantised) == (kind != "F16")


@pytest.mark.parametrize("name", WIDE_STATES)
def test_a_gguf_whose_fused_matrices_mix_types(name: str, tmp_path: Path) -> None:
    """As files of llama.cpp do; in some, queries and their gates are turns of rows of one tensor."""
    changes = {**IN_GGUF.get(name, {}), **WIDE_STATES[name]}
    write_gguf(make_model(name, **changes), tmp_path / "model.gguf", q4_k_m)
    files = identify(tmp_path / "model.gguf")
    prepared = PreparedAs("bfloat16", "gguf", packed=True, num_positions=64)
    assert weight_memory(files, prepared) == held(loaded(files, "native", prepared))


PACKED = {
    "awq": Packing("awq", keep=("v_proj", "layers.2.mlp")),
    "awq, symmetric": Packing("awq", group=64, symmetric=True),
    "gptq": Packing("gptq", group=-1),
    "gptq of 8 bits": Packing("gptq", group=64, symmetric=True, bits=8),
    "w4a16": Packing("compressed-tensors", group=64),
    "w8a8": Packing("compressed-tensors", group=-1, symmetric=True, bits=8, stored="int-quantized"),
    "fp8": Packing("fp8", block=(64, 32)),
    "gptq of 8 bits with zero points": Packing("gptq", group=64, bits=8),
    "gptq in the order of activations": Packing("gptq", group=64, ordered=True, bits=8, symmetric=True),
}


@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("kernels", ["native", "triton", "torch"])
def test_quantised_checkpoints(
    case: str, kernels: str, tmp_path: Path, without_triton: Callable[[str], NoReturn]
) -> None:
    if kernels == "triton" and find_spec("triton") is None:
        without_triton("Triton is not installed")
    write_packed(
        save(make_model("llama-tied-biased"), tmp_path),
        PACKED[case],
        tmp_path / "packed",
        tmp_path / "values",
    )
    files = identify(tmp_path / "packed")
    prepared = PreparedAs("float32", None, kernels == "native", num_positions=50, for_triton=kernels == "triton")
    assert weight_memory(files, prepared) == held(loaded(files, kernels, prepared))


def test_shares_of_groups_in_the_order_of_activations_take_at_most_what_is_planned(tmp_path: Path) -> None:
    """Each rank pads its part of every group."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256}
    folder = save(make_model("llama", **heads), tmp_path)
    write_packed(folder, Packing("gptq", ordered=True), tmp_path / "packed", tmp_path / "values")
    files, prepared = identify(tmp_path / "packed"), PreparedAs("float32", None, packed=True, num_positions=50)
    for rank in range(2):
        taken = held(loaded(files, "native", prepared, RankNumber(rank, 2)))
        assert 0.6 * weight_memory(files, prepared, (RankPlace(rank, 2),)) < taken
        assert taken <= weight_memory(files, prepared, (RankPlace(rank, 2),))


@pytest.mark.parametrize("kind", [None, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("name", ["llama-tied-biased", "mixtral"])
def test_tiled(name: str, kind: Kind | None, tmp_path: Path, without_triton: Callable[[str], NoReturn]) -> None:
    """For Triton's kernels; None: what int8 and fp8 make of floats."""
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    if kind is None:
        files = identify(save(make_model(name), tmp_path))
    else:
        write_gguf(make_model(name), tmp_path / "model.gguf", kind)
        files = identify(tmp_path / "model.gguf")
    for quantization in ("int8", "fp8", None) if kind is None else ("gguf",):
        prepared = PreparedAs("bfloat16", quantization, packed=False, num_positions=50, for_triton=True)
        assert weight_memory(files, prepared) == held(loaded(files, "triton", prepared))


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "gpt2"])
def test_dense_in_float32(name: str, tmp_path: Path) -> None:
    files = identify(save(make_model(name), tmp_path))
    prepared = PreparedAs("float32", None, packed=False, num_positions=67)
    assert weight_memory(files, prepared) == held(loaded(files, "torch", prepared))


@pytest.mark.parametrize("kernels", ["native", "torch", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama-tied-biased", "gemma3"])
def test_a_tied_embedding_shares_the_memory_of_the_head(name: str, dtype: str, kernels: str, tmp_path: Path) -> None:
    """Except where torch packs the head in its own layout, and where the head is quantised."""
    files = identify(save(make_model(name), tmp_path))
    ids = torch.tensor([0, 1, 31, 32, 130, 64], dtype=torch.int32)
    rows = {}
    for quantization in (None, "int8"):
        model = loaded(files, kernels, PreparedAs(dtype, quantization, packed=kernels == "native", num_positions=50))
        values = {path: parameter.value for path, parameter in parameters(model)}
        table: Any = values["model.embed_tokens.weight"]
        head = values["lm_head.weight"]
        packed_by_torch = isinstance(head, LibraryLinear) and head.packed
        assert packed_by_torch <= (kernels == "torch" and dtype == "bfloat16")
        shares = not packed_by_torch and {t.data_ptr() for t in tensors_of(table)} <= {
            t.data_ptr() for t in tensors_of(head)
        }
        assert shares == (quantization is None and not packed_by_torch)
        rows[quantization] = select_ops(kernels, CpuDevice(1)).embedding(ids, table, 3.0)
    assert rows[None].equal(rows["int8"])  # the table that is not shared holds the checkpoint's values


def test_plan_needs_no_torch(tmp_path: Path) -> None:
    """From the command line to the last figure, for a dense model, for experts and for a GGUF's codes."""
    save(make_model("gemma3"), tmp_path / "gemma3")
    save(make_model("qwen3-moe"), tmp_path / "moe")
    write_gguf(make_model("llama-tied-biased"), tmp_path / "model.gguf", Kind.Q4_1)
    write_packed(save(make_model("qwen3"), tmp_path / "qwen3"), Packing("awq"), tmp_path / "awq", tmp_path / "values")
    code = (
        "import sys\n"
        "from pagoda.cli.main import main\n"
        "plans = ['gemma3'], ['moe', '--quantization', 'int8'], ['model.gguf', '--quantization', 'gguf'], ['awq']\n"
        "for model, *more in plans:\n"
        "    try:\n"
        "        main(['plan', '--json', '--device', 'cpu', '--model', f'{sys.argv[1]}/{model}', *more])\n"
        "    except SystemExit as ended:\n"
        "        assert not ended.code, ended.code\n"
        "print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    *plans, torch_came = answer.stdout.splitlines()
    assert torch_came == "False"
    assert [json.loads(plan)["architecture"] for plan in plans] == ["gemma3", "qwen3_moe", "llama", "qwen3"]
    assert json.loads(plans[-1])["weights_as"] == "awq"
