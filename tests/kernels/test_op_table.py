"""The op table: what disagrees with a declaration cannot be imported, compiled or loaded, nor called."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pagoda.base.errors import InvariantBroken
from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.native import build, header, library
from pagoda.kernels.native.abi import STRUCTS
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps, implementation
from pagoda.kernels.torch_ops import TorchOps
from pagoda.ops.declare import Activation, DType, Rows, Table, declared_ops, like, op
from pagoda.ops.forward import FORWARD_OPS, OP_TABLE
from tests.device_under_test import DeviceUnderTest
from tests.kernels.paged import Geometry, make_metadata


def test_every_implementation_has_every_op(native: NativeOps) -> None:
    for ops in (ReferenceOps(), TorchOps(), native):
        assert all(callable(getattr(ops, name)) for name in FORWARD_OPS)


def test_a_declaration_must_name_its_parameters() -> None:
    def scaled(self: object, x: object, weight: object) -> object: ...

    with pytest.raises(TypeError, match=r"declares the arguments \['x'\], its signature has \['x', 'weight'\]"):
        op("rows", x=Rows(), out=like("x"))(scaled)
    with pytest.raises(TypeError, match="like='y' is not an argument"):
        op("rows", x=Rows(), weight=Rows(like="y"), out=like("x"))(scaled)
    with pytest.raises(TypeError, match="rows of 'y'"):
        op("rows", x=Rows(), weight=Table(), out=like("y"))(scaled)

    class Owner:
        def undeclared(self, x: object) -> object: ...

    with pytest.raises(TypeError, match="undeclared is not declared an op"):
        declared_ops(Owner)


def test_an_implementation_must_take_what_the_table_declares() -> None:
    module = ModuleType("other")
    module.softcap = lambda x, limit: x  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="other.softcap takes"):
        implementation(FORWARD_OPS["softcap"], module)


def test_a_struct_has_its_fields_only() -> None:
    """A misspelled field would otherwise be an attribute in Python, and null in the kernel."""
    for struct in STRUCTS.values():
        with pytest.raises(AttributeError, match="no attribute 'no_field'"):
            struct().no_field = 1


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A kernels folder of one op and what it needs; returns the op's source."""
    kernels = tmp_path / "kernels"
    for name in (
        "native/info.cpp",
        "native/pool.cpp",
        "native/parallel.h",
        "native/lanes.h",
        "native/simd.h",
        "native/elementwise.h",
    ):
        (kernels / name).parent.mkdir(parents=True, exist_ok=True)
        (kernels / name).write_bytes((build.KERNELS / name).read_bytes())
    (kernels / "rows").mkdir()
    (kernels / "rows" / "cpu.cpp").write_bytes((build.KERNELS / "rows" / "cpu.cpp").read_bytes())
    monkeypatch.setattr(build, "KERNELS", kernels)
    return kernels / "rows" / "cpu.cpp"


@pytest.fixture
def compile_one(compiler: build.Compiler, tmp_path: Path) -> Callable[[], Path]:
    return lambda: build.build(tmp_path / "cache", compiler, extra_flags=("-O0",))


@pytest.mark.parametrize(
    ("find", "replace", "said"),
    [
        ("const AddArgs* a, int32_t threads", "const AddArgs* a, int64_t threads", "pagoda_add"),  # another prototype
        ("a->residual", "a->other", "no member named"),  # a field that the op does not have
        ("const SelectRowsArgs* a", "const AddArgs* a", "pagoda_select_rows"),  # another op's arguments
    ],
)
def test_a_kernel_that_disagrees_does_not_compile(
    one_kernel: Path, compile_one: Callable[[], Path], find: str, replace: str, said: str
) -> None:
    source = one_kernel.read_text()
    assert find in source
    one_kernel.write_text(source.replace(find, replace))
    with pytest.raises(build.NativeUnavailable, match=said):
        compile_one()


def test_a_struct_with_another_layout_does_not_compile(
    one_kernel: Path, compile_one: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = header.header()
    field = "    Tensor residual;\n"
    assert field in text
    monkeypatch.setattr(header, "header", lambda: text.replace(field, "    int32_t extra;\n" + field, 1))
    with pytest.raises(build.NativeUnavailable, match="AddRmsNormArgs|AddArgs"):
        compile_one()


def test_a_library_without_a_declared_kernel_does_not_load(one_kernel: Path, compile_one: Callable[[], Path]) -> None:
    path = compile_one()
    with pytest.raises((build.NativeUnavailable, AttributeError), match="undefined symbol"):
        library.load(path)


def test_an_added_op_changes_the_library(
    one_kernel: Path, compile_one: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_one()
    text = header.header()
    monkeypatch.setattr(header, "header", lambda: text + "// one op more\n")
    assert compile_one() != first


def test_wrong_arguments_are_refused_by_name(native: NativeOps) -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    packed = native.prepare_linear(torch.randn(8, 64))
    for call, said in (
        (lambda: native.rms_norm(x, weight.bfloat16(), 1e-5), "rms_norm: weight must be of F32"),
        (lambda: native.rms_norm(x, weight[:32].contiguous(), 1e-5), "does not fit x"),
        (lambda: native.add(x, x[:2]), "residual must have the shape of x"),
        (lambda: native.add(torch.randn(3, 65)[:, :64], x), "x of shape .* must be contiguous"),
        (lambda: native.linear(x[:, :32], packed), "multiplies rows of 64"),
        (lambda: native.linear(x.bfloat16(), packed), "multiplies rows of 64"),
        (lambda: native.linear(x, weight), "weight must be a PackedWeight"),
        (lambda: native.embedding(torch.zeros(2), x), "token_ids must be of"),
        (lambda: native.gate(torch.randn(2, 7), Activation.SILU), "has no halves"),
        (lambda: native.softcap([1.0], 3.0), "x must be a tensor"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(TypeError, match="missing a required argument"):
        native.softcap(x)


INT = torch.int32
GEOMETRY = Geometry(4, 2, 32, 8)


def rows(native: NativeOps, heads: int) -> torch.Tensor:
    return torch.randn(20, heads, 32)


def broken(metadata: AttentionMetadata, field: str, at: tuple[int, ...], value: int) -> AttentionMetadata:
    tensor = getattr(metadata, field).clone()
    tensor[at] = value
    return dataclasses.replace(metadata, **{field: tensor})


BROKEN = [
    ("query_start", (0,), 1, "query_start"),
    ("query_start", (1,), 25, "query_start"),
    ("query_start", (2,), 19, "query_start"),
    ("seq_lens", (0,), 3, "seq_lens"),
    ("seq_lens", (0,), 1000, "seq_lens"),
    ("seq_lens", (1,), -5, "seq_lens"),
    ("block_table", (0, 1), 9, "row 0: a block id"),
    ("block_table", (1, 0), -1, "row 1: a block id"),
]


@pytest.mark.parametrize(("field", "at", "value", "said"), BROKEN)
def test_metadata_that_would_read_other_memory_is_refused(
    native: NativeOps, field: str, at: tuple[int, ...], value: int, said: str
) -> None:
    metadata = make_metadata(GEOMETRY, [(3, 9), (0, 11)], [[3, 5], [6, 7]])
    cache = GEOMETRY.new_cache(8)
    native.attention(rows(native, 4), cache, metadata, 0.1)
    with pytest.raises(InvariantBroken, match=said):
        native.attention(rows(native, 4), cache, broken(metadata, field, at, value), 0.1)


@pytest.mark.parametrize("slot", [-1, 9 * 8, 2**40])
def test_slots_outside_the_cache_are_refused_and_nothing_is_written(native: NativeOps, slot: int) -> None:
    metadata = make_metadata(GEOMETRY, [(3, 9), (0, 11)], [[3, 5], [6, 7]])
    cache = GEOMETRY.new_cache(8)
    with pytest.raises(InvariantBroken, match="token 19: slot_mapping"):
        native.write_kv(rows(native, 2), rows(native, 2), cache, broken(metadata, "slot_mapping", (19,), slot))
    assert not cache.k.any()
    assert not cache.v.any()


@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1, -(2**31)])
def test_ids_and_positions_outside_their_tables_are_refused(
    fast: Ops, reference: ReferenceOps, bad: int, device_under_test: DeviceUnderTest
) -> None:
    """The same error from every implementation: torch alone would read a row from the end for -1."""
    device_under_test.must_check_indices()
    table, angles = torch.randn(50, 32), torch.randn(50, 16)
    ids = torch.tensor([0, 49, bad], dtype=INT)
    q, k = torch.randn(3, 4, 32), torch.randn(3, 2, 32)
    for ops in (fast, reference):
        with pytest.raises(InvariantBroken, match=rf"embedding: token_ids: element 2 is {bad}, allowed are 0 to 49"):
            ops.embedding(ids, table)
        with pytest.raises(InvariantBroken, match="rotary: positions: element 2"):
            ops.rotary(q, k, ids, angles, angles)
        with pytest.raises(InvariantBroken, match="select_rows: index: element 2"):
            ops.select_rows(table, ids.long())
        with pytest.raises(InvariantBroken, match=f"select_rows: index: element 5 is {bad}"):
            ops.select_rows(table, torch.stack((ids[[0, 0, 1]], ids), dim=1).long())
        assert ops.embedding(ids[:2], table).equal(table[[0, 49]])


def test_the_table_has_defaults_that_models_rely_on() -> None:
    parameters = OP_TABLE["attention"].signature.parameters
    assert parameters["window"].default == 0
    assert parameters["scale"].default is inspect.Parameter.empty
    assert OP_TABLE["logits"].outputs["out"].dtype is DType.F32
    assert isinstance(KVLayer(torch.zeros(1), torch.zeros(1)), KVLayer)
