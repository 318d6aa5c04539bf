"""Attention by a library: the indices it is given, against the reference; and what is refused at the start."""

import inspect
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import attention as torch_attention

from pagoda.assemble import build_engine_core
from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import ConfigError
from pagoda.base.sampling_params import SamplingParams
from pagoda.engine_setup import resolve_engine
from pagoda.kernels import select
from pagoda.kernels.attention.backends import AttentionNeeds, check_needs, make_backend
from pagoda.kernels.attention.flashinfer_attention import FlashInferAttention
from pagoda.kernels.batch import AttentionMetadata, KVLayer, OnHost
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.kernels.torch_ops import TorchOps
from tests.engine.driver import drive, request, write_tiny_llama
from tests.kernels import fake_flashinfer, fake_varlen
from tests.kernels.paged import Geometry, PagedRows, Sequence

CPU = torch.device("cpu")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
REFERENCE: Any = ReferenceOps()


def with_host(metadata: AttentionMetadata) -> AttentionMetadata:
    arrays = (metadata.query_start, metadata.seq_lens, metadata.block_table)
    return replace(metadata, on_host=OnHost(*(tensor.numpy() for tensor in arrays)))


class LibraryOps:
    """The reference with the attention of a backend, which several layers of a step call."""

    def __init__(self, backend: Any, num_layers: int = 1) -> None:
        self.write_kv = REFERENCE.write_kv
        self._backend, self._num_layers = backend, num_layers

    def attention(self, q: torch.Tensor, cache: KVLayer, metadata: AttentionMetadata, *rest: Any) -> torch.Tensor:
        metadata = with_host(metadata)
        results = [self._backend.attention(q, cache, metadata, *rest) for _ in range(self._num_layers)]
        assert all(torch.equal(result, results[0]) for result in results)
        return results[0]


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    for wrapper in (
        fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper,
    ):
        monkeypatch.setattr(wrapper, "made", [])
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(FlashInferAttention, "memory", replace(FlashInferAttention.memory, at_start=1024))
    return fake_flashinfer


def hopper(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> list[str]:
    """A GPU for which `varlen_attn` is as in torch 2.13; return what is activated."""
    activated: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch_attention, "current_flash_attention_impl", lambda: None, raising=False)
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", activated.append, raising=False)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", fake_varlen)  # type: ignore[arg-type]
    return activated


def never(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("this step is the library's")


# heads, KV heads, head size, block size, window, softcap
SHAPES = [
    (3, 1, 64, 24, 0, 0.0),
    (4, 4, 64, 16, 40, 0.0),
    (6, 2, 128, 1, 1, 0.0),
    (4, 2, 64, 8, 33, 0.0),
]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (4, 2, 64, 8, 33, 30.0), (2, 1, 256, 3, 0, 50.0)], ids=str)
def test_flashinfer_gives_what_the_reference_gives(flashinfer: Any, shape: tuple, dtype: torch.dtype) -> None:
    compare(make_backend("flashinfer", never, CPU), shape, dtype)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_varlen_gives_what_the_reference_gives(
    monkeypatch: pytest.MonkeyPatch, shape: tuple, dtype: torch.dtype
) -> None:
    hopper(monkeypatch)
    compare(make_backend("varlen", never, CPU), shape, dtype)


def compare(backend: Any, shape: tuple, dtype: torch.dtype) -> None:
    """Random steps of chunks and decodes, in any order of rows, against the reference."""
    *sizes, window, softcap = shape
    geometry = Geometry(*sizes, dtype=dtype)
    rows = [Sequence.random(geometry, length, seed) for seed, length in enumerate((1, 9, 60, 33))]
    ours, theirs = PagedRows(LibraryOps(backend), geometry, rows), PagedRows(REFERENCE, geometry, rows, seed=1)
    rng = random.Random(sum(sizes))
    while any(left := [len(row.q) - done for row, done in zip(rows, ours.computed, strict=True)]):
        most = rng.choice((1, 1, 8, 24))
        step = [(row, rng.randint(1, min(most, left[row]))) for row in rng.sample(range(4), rng.randint(1, 4))
                if left[row]]  # fmt: skip
        if step:
            got, want = (paged.step(step, 0.1, window, softcap) for paged in (ours, theirs))
            torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)


def test_a_step_is_planned_once_for_all_layers(flashinfer: Any) -> None:
    geometry = Geometry(4, 2, 64, 8, F16)
    rows = [Sequence.random(geometry, 40, 0)]
    paged = PagedRows(LibraryOps(make_backend("flashinfer", never, CPU), num_layers=5), geometry, rows)
    paged.step([(0, 10)], 0.1)
    for _ in range(20):
        paged.step([(0, 1)], 0.1)
    (prefill,) = flashinfer.BatchPrefillWithPagedKVCacheWrapper.made
    assert (prefill.num_plans, prefill.num_runs) == (1, 5)
    # A plan's memory is not written again until seven others were made.
    decodes = flashinfer.BatchDecodeWithPagedKVCacheWrapper.made
    assert sorted(wrapper.num_plans for wrapper in decodes) == [2, 2, 2, 2, 3, 3, 3, 3]
    assert sum(wrapper.num_runs for wrapper in decodes) == 100


def test_flashinfer_takes_the_memory_that_it_declares(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workspace before the first step, and then what its wrappers allocate, however many steps there are."""
    workspaces: list[torch.Tensor] = []
    init = fake_flashinfer._Wrapper.__init__

    def recorded(self: Any, workspace: torch.Tensor, kv_layout: str) -> None:
        workspaces.append(workspace)
        init(self, workspace, kv_layout)

    monkeypatch.setattr(fake_flashinfer._Wrapper, "__init__", recorded)
    backend: Any = make_backend("flashinfer", never, CPU)
    at_start, memory = backend._workspace, FlashInferAttention.memory
    assert at_start.nbytes == memory.at_start
    for num_kv_heads in (2, 4):  # decodes with grouped heads, and those without
        geometry = Geometry(4, num_kv_heads, 64, 8, F16)
        paged = PagedRows(LibraryOps(backend), geometry, [Sequence.random(geometry, 60, 0)])
        for count in [2] * 10 + [1] * 20:
            paged.step([(0, count)], 0.1)
    assert {workspace.data_ptr() for workspace in workspaces} == {at_start.data_ptr()}
    assert len(workspaces) * flashinfer.PLAN_BYTES == memory.later


def test_two_groups_of_layers_share_a_step(flashinfer: Any) -> None:
    """Layers with a window and others take turns: each has a plan of its own."""
    geometry = Geometry(4, 2, 64, 8, F16)
    rows = [Sequence.random(geometry, 60, 0)]
    backend = make_backend("flashinfer", never, CPU)
    paged = PagedRows(LibraryOps(backend), geometry, rows)
    paged.step([(0, 50)], 0.1)
    metadata = with_host(
        AttentionMetadata(
            torch.tensor([0, 1], dtype=torch.int32), torch.tensor([50], dtype=torch.int32),
            torch.tensor(paged.tables, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), 8, 1, 50,
        )
    )  # fmt: skip
    q = rows[0].q[49:50]
    for _ in range(3):
        for window in (0, 7):
            got = backend.attention(q, paged.cache, metadata, 0.1, window)
            want = REFERENCE.attention(q, paged.cache, metadata, 0.1, window)
            torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    decodes = flashinfer.BatchDecodeWithPagedKVCacheWrapper.made
    assert [(wrapper.num_plans, wrapper.num_runs) for wrapper in decodes] == [(1, 3), (1, 3)]


def test_a_recorded_step_is_left_to_our_kernels(flashinfer: Any) -> None:
    geometry = Geometry(4, 2, 64, 8, F16)
    own = REFERENCE
    ops = SimpleNamespace(write_kv=own.write_kv, attention=make_backend("flashinfer", own.attention, CPU).attention)
    PagedRows(ops, geometry, [Sequence.random(geometry, 4, 0)]).step([(0, 4)], 0.1)
    assert not flashinfer.BatchPrefillWithPagedKVCacheWrapper.made


def test_the_stand_in_has_the_signature_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    real = inspect.signature(varlen.varlen_attn).parameters
    if "block_table" not in real:
        pytest.skip(f"torch {torch.__version__} takes no block tables")
    ours = inspect.signature(fake_varlen.varlen_attn).parameters
    assert [(item.name, item.kind) for item in ours.values()] == [(item.name, item.kind) for item in real.values()]


def test_an_engine_computes_the_same_with_a_library(
    flashinfer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The arrays on the host are right in all steps: chunks, decodes, both at once, two KV groups, and the tail."""
    write_tiny_llama(tmp_path, window=11, mixed=True)
    prompts = [[5, 9, 2] * 9, [7], [4, 4, 8, 1] * 5, [3, 6]]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    requests = [request(number, prompt, params) for number, prompt in enumerate(prompts)]
    options = {"dtype": "float32", "kernels": "torch", "device": "cpu", "max_num_batched_tokens": 16}
    tokens = []
    for library in (False, True):
        ops: Any = TorchOps()
        ops.attention = REFERENCE.attention
        if library:
            ops.attention = make_backend("flashinfer", never, CPU).attention
        monkeypatch.setattr("pagoda.worker.loaded_model.select_ops", lambda *_, ops=ops: ops)
        core = build_engine_core(resolve_engine(EngineConfig.from_options(model=str(tmp_path), **options)))
        tokens.append(drive(core, requests).tokens)
    assert tokens[0] == tokens[1]
    assert flashinfer.BatchPrefillWithPagedKVCacheWrapper.made
    assert flashinfer.BatchDecodeWithPagedKVCacheWrapper.made


def test_an_engine_whose_model_a_library_cannot_compute_does_not_start(
    flashinfer: Any, make_triton_ops: Any, tmp_path: Path
) -> None:
    options = {"attention_backend": "flashinfer", "kernels": "triton", "dtype": "bfloat16"}
    setup = resolve_engine(EngineConfig.from_options(model=str(write_tiny_llama(tmp_path)), **options))
    with pytest.raises(ConfigError, match="attention_backend='flashinfer' has no heads of size 16"):
        build_engine_core(setup)


NEEDS = AttentionNeeds(frozenset((128,)), False, BF16, BF16)


@pytest.mark.parametrize(
    ("backend", "changes", "refusal"),
    [
        ("flashinfer", {}, ""),
        ("flashinfer", {"has_softcap": True}, ""),
        ("varlen", {}, ""),
        ("varlen", {"head_dims": frozenset((80, 256))}, ""),
        ("auto", {"head_dims": frozenset((77,)), "dtype": F32}, ""),
        ("varlen", {"has_softcap": True}, "no soft cap of attention scores, which this model has; take.*='auto'"),
        ("varlen", {"head_dims": frozenset((128, 500))}, "no heads of size 500.*multiples of 8 up to 256"),
        ("flashinfer", {"head_dims": frozenset((80,))}, "no heads of size 80, which this model has .*64, 128, 256"),
        ("flashinfer", {"dtype": F32, "kv_dtype": F32}, "no kernels for float32 .bfloat16 and float16 are possible"),
        ("flashinfer", {"kv_dtype": torch.int8}, "no KV cache of int8 next to queries of bfloat16"),
        ("varlen", {"kv_dtype": torch.float8_e4m3fn}, "no KV cache of float8_e4m3fn"),
    ],
)
def test_what_a_backend_has_not_got_is_refused(backend: str, changes: dict[str, Any], refusal: str) -> None:
    needs = replace(NEEDS, **changes)
    if not refusal:
        check_needs(backend, needs)
        return
    with pytest.raises(ConfigError, match=f"attention_backend='{backend}' has {refusal}"):
        check_needs(backend, needs)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"batch_invariant": True}, "batch_invariant does not go with attention_backend='varlen'"),
        ({"kernels": "torch"}, "goes with the Triton kernels on a GPU, not with kernels='torch'; leave"),
        ({"device": "cpu"}, "not with device='cpu'; leave attention_backend or device out"),
        ({"attention_backend": "flashinfr"}, "did you mean 'flashinfer'"),
    ],
)
def test_settings_that_do_not_go_together(options: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        check_settings(EngineConfig.from_options(**{"attention_backend": "varlen", **options}))


def test_a_machine_without_a_gpu_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="attention_backend='varlen' needs a GPU"):
        select.select_ops("auto", CPU, 1, attention_backend="varlen")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"pip install 'pagoda-llm\[flashinfer\]', or take attention_backend='auto'"):
        make_backend("flashinfer", never, CPU)


def test_varlen_needs_its_torch_its_gpu_and_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hopper(monkeypatch) == []
    for capability, activated in (((9, 0), ["FA3"]), ((10, 0), ["FA4"])):
        found = hopper(monkeypatch, capability)
        make_backend("varlen", never, CPU)
        assert found == activated
    hopper(monkeypatch, (8, 0))
    with pytest.raises(ConfigError, match="compute capability 9.0 or 10.0 .this one has 8.0.; take"):
        make_backend("varlen", never, CPU)
    hopper(monkeypatch)

    def missing(implementation: str) -> None:
        raise ModuleNotFoundError("No module named 'flash_attn_interface'")

    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", missing, raising=False)
    with pytest.raises(ConfigError, match="needs FlashAttention 3 on this GPU: install .*flash_attn_interface"):
        make_backend("varlen", never, CPU)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=lambda query: query))
    with pytest.raises(ConfigError, match="needs torch 2.12 or later.*pip install --upgrade torch"):
        make_backend("varlen", never, CPU)


def test_the_kernels_for_a_gpu_take_the_backend(flashinfer: Any, make_triton_ops: Any) -> None:
    ops: Any = select.select_ops("triton", CPU, 1, attention_backend="flashinfer")
    assert type(ops.attention.__self__).__name__ == "FlashInferAttention"
    assert type(select.select_ops("triton", CPU, 1).attention.__self__).__name__ == "PagedAttention"  # type: ignore[attr-defined]
