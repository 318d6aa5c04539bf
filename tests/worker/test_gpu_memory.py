"""KV pools on a GPU are sized by what the largest steps leave free. Here the GPU, but for one test, is made up."""

import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.make_random_model import SHAPES, make
from pagoda.assembly.assemble import build_engine_core
from pagoda.assembly.engine_setup import resolve_engine
from pagoda.assembly.sizing import fit_cache, weights_in_memory
from pagoda.base.config import EngineConfig, ParallelConfig
from pagoda.base.errors import CapacityError, ConfigError
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.kernels.batch import ForwardBatch
from pagoda.kernels.torch_ops import TorchOps
from pagoda.worker.batch_rows import Padding
from pagoda.worker.devices import Device
from pagoda.worker.devices.cuda import CudaDevice
from pagoda.worker.dry_runs import LargestSteps, largest_graphs
from pagoda.worker.forward_runner import Computed, ForwardRunner
from pagoda.worker.sampler import Sampler
from tests.engine.driver import drive, request, write_tiny_llama
from tests.fake_cuda import FakeCuda
from tests.models.tiny_encoders import make_encoder, save_encoder


class MadeUpGpu(CudaDevice):
    """free: what is left next to a step, or the error that the step raises; one for each try, then the last."""

    device = torch.device("cpu")
    margin_bytes = 0
    to_host, load, store, check = Device.to_host, Device.load, Device.store, Device.check

    def __init__(self, *free: int | Exception) -> None:
        super().__init__()
        self.free = list(free)
        self.runs = 0

    def free_bytes(self) -> int:
        return 2**30

    def prepare(self) -> None:
        pass

    def free_bytes_beside(self, run: Callable[[], object]) -> int:
        self.runs += 1
        run()
        free = self.free.pop(0) if len(self.free) > 1 else self.free[0]
        if isinstance(free, Exception):
            raise free
        return free


@pytest.fixture
def engine_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    folder = write_tiny_llama(tmp_path)

    def make(gpu: MadeUpGpu, **options: object):
        def select(config: ParallelConfig, index: int = 0) -> MadeUpGpu:
            assert config.device == "cuda"
            return gpu

        for module in ("assembly.engine_setup", "worker.loaded_model"):
            monkeypatch.setattr(f"pagoda.{module}.select_device", select)
        settings = {"device": "cuda", "kernels": "torch", "dtype": "float32", "gpu_memory_utilization": 1.0}
        return build_engine_core(EngineConfig.from_options(**{"model": folder, **settings, **options}))

    return make


def test_the_cache_gets_what_the_largest_step_leaves(engine_on) -> None:
    gpu = MadeUpGpu(2**20)
    core = engine_on(gpu, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=100)
    small = core.sizes.num_blocks
    core.shutdown()
    twice = engine_on(MadeUpGpu(2**21), max_model_len=64, max_num_seqs=4, max_num_batched_tokens=100)
    assert 2 * small <= twice.sizes.num_blocks <= 2 * small + 2
    twice.shutdown()
    assert gpu.runs == 1


def test_a_cache_of_a_given_size_must_fit_next_to_the_largest_step(engine_on) -> None:
    given = MadeUpGpu(2**20)
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 100}
    engine_on(given, **sizes, kv_cache_memory=2**19).shutdown()
    assert given.runs == 1
    left = "the weights and the largest step leave 512.0 KiB; set kv_cache_memory=524288 or less"
    with pytest.raises(CapacityError, match=f"kv_cache_memory=1048576 does not fit .* {re.escape(left)}"):
        engine_on(MadeUpGpu(2**19), **sizes, kv_cache_memory=2**20)


def test_too_little_is_refused_with_what_would_fit(engine_on) -> None:
    with pytest.raises(CapacityError, match=r"one sequence of max_model_len=256 .*set max_model_len=\d+ or less"):
        engine_on(MadeUpGpu(2**16), max_model_len=256, max_num_seqs=4, max_num_batched_tokens=100)
    full = torch.OutOfMemoryError("full")
    with pytest.raises(CapacityError, match=r"no step fits .*max_num_seqs=3 and max_num_batched_tokens=99; .*\(full\)"):
        engine_on(MadeUpGpu(full), max_num_seqs=3, max_num_batched_tokens=99)
    sizes = r"max_num_batched_tokens=4096 and max_num_seqs=16 do not fit .*\(full\); max_num_seqs=8 and "
    with pytest.raises(CapacityError, match=sizes + "max_num_batched_tokens=1024 would fit"):
        engine_on(MadeUpGpu(full, full, 2**20), max_num_seqs=16, max_num_batched_tokens=4096, max_model_len=64)


def test_the_memory_of_a_step_that_did_not_fit_is_free_for_the_next_try(
    engine_on, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def fails_once(*args: Any, **kwargs: Any) -> None:
        alive.extend(ref() is not None for ref in kept)
        if not kept:
            large = torch.zeros(1000)
            kept.append(weakref.ref(large))
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(Sampler, "draw", fails_once)
    engine_on(MadeUpGpu(2**20), max_model_len=64).shutdown()
    assert alive
    assert not any(alive)


def test_the_largest_steps_have_all_that_a_step_may_need(engine_on, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of some rows, prompt logprobs, penalties, drafts; and a graph is captured."""
    found: dict[str, list[tuple[int, ...]]] = {"index_select": [], "constrain": [], "top_logprobs": []}
    ops: Any = TorchOps

    def noted(name: str, real: Any):
        def call(*args: Any) -> Any:
            found[name].append(tuple(args[0].shape))
            return real(*args)

        return staticmethod(call)

    for name in ("constrain", "top_logprobs"):
        monkeypatch.setattr(ops, name, noted(name, getattr(ops, name)))
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 100}
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    engine_on(MadeUpGpu(2**21), **sizes, **drafts).shutdown()
    rows = [shape[0] for shape in found["constrain"]]
    assert rows == [2, 4, 4 * 4]
    # Two prompts of which the first reports, and its prompt; a chunk next to three decodes; drafts of four rows.
    assert [shape[0] for shape in found["top_logprobs"]] == [1, 63, 3, 12]


def test_steps_that_do_not_fit_are_made_smaller(engine_on, caplog: pytest.LogCaptureFixture) -> None:
    full = torch.OutOfMemoryError("full")
    engine_on(MadeUpGpu(full, full, 2**20), max_model_len=64).shutdown()
    assert "they are lowered to max_num_seqs=256 and max_num_batched_tokens=2048" in caplog.text
    core = engine_on(MadeUpGpu(full, full, full, full, 2**20), max_model_len=64)
    assert "they are lowered to max_num_seqs=64 and max_num_batched_tokens=512" in caplog.text
    core.add_request(request(0, [5, 6, 7], SamplingParams(temperature=0, max_tokens=3)))
    tokens = []
    while core.has_unfinished_requests():
        for outputs in core.step().values():
            tokens += outputs.token_ids.tolist()
    assert len(tokens) == 3
    assert core._scheduler.max_rows == 2 * 64  # two steps at once
    core.shutdown()


def test_a_draft_model_is_loaded_and_drafts_before_the_cache_is_sized(
    engine_on, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So what it takes is not subtracted from what is left."""
    steps: list[tuple[int, int, int]] = []
    real = ForwardRunner.run

    def noted(self: ForwardRunner, batch: ForwardBatch, *args: Any) -> Computed:
        first = batch.metadata[0]
        steps.append((self.model.spec.num_layers, first.seq_lens.shape[0], batch.token_ids.shape[0]))
        return real(self, batch, *args)

    monkeypatch.setattr(ForwardRunner, "run", noted)
    make(replace(SHAPES["tiny"], vocab_size=160, num_hidden_layers=1), tmp_path / "draft", seed=1)
    drafting = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    gpu, sizes = MadeUpGpu(2**20), {"max_model_len": 300, "max_num_seqs": 4, "max_num_batched_tokens": 2000}
    with_draft = engine_on(gpu, **sizes, speculative_config=drafting)
    # A whole chunk of a prompt, one next to other sequences, and all sequences at once.
    assert [step[1:] for step in steps if step[0] == 1][:3] == [(1, 256), (4, 256), (4, 8)]
    plain = engine_on(MadeUpGpu(2**20), **sizes)
    assert with_draft.sizes.num_blocks == plain.sizes.num_blocks
    for core in (with_draft, plain):
        core.shutdown()
    full = torch.OutOfMemoryError("full")
    with pytest.raises(CapacityError, match="no step fits"):
        engine_on(MadeUpGpu(full), **sizes, speculative_config=drafting)


def test_a_gpu_without_bfloat16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FakeCuda(monkeypatch, capability=(7, 5))
    make(SHAPES["tiny"], tmp_path, seed=1)

    def dtype_of(**options: object) -> str:
        return resolve_engine(EngineConfig.from_options(model=tmp_path, device="cuda", **options)).dtype

    assert dtype_of() == "float16"
    assert "dtype is float16 in place of the model's bfloat16, which this GPU does not have" in caplog.text
    assert dtype_of(dtype="float32") == "float32"
    with pytest.raises(ConfigError, match=r"dtype='bfloat16' needs .* 8.0 or later \(this one has 7.5\); take"):
        dtype_of(dtype="bfloat16")
    FakeCuda(monkeypatch, capability=(8, 0))
    assert dtype_of() == "bfloat16"


def test_what_is_planned_leaves_the_margin_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = FakeCuda(monkeypatch, total=8 << 30)
    card.free = 1 << 30
    options = {"model": write_tiny_llama(tmp_path), "device": "cuda", "max_model_len": 64}
    setup = resolve_engine(EngineConfig.from_options(**options, gpu_memory_utilization=1.0))
    _, capacity = fit_cache(setup)
    left = (1 << 30) - int((8 << 30) * 0.02) - weights_in_memory(setup)
    assert left - 2 * capacity.block_bytes < capacity.pool_bytes <= left


def test_a_model_without_kv_tries_its_largest_step(
    monkeypatch: pytest.MonkeyPatch, engine_on, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_encoder(make_encoder("bert"), tmp_path / "bert")
    gpu = MadeUpGpu(2**20)
    engine_on(gpu, model=folder).shutdown()
    assert gpu.runs == 1
    full = torch.OutOfMemoryError("full")
    core = engine_on(MadeUpGpu(full, 2**20), model=folder)
    assert "they are lowered to " in caplog.text
    answers = drive(core, [request(0, [5, 6, 7], PoolingParams(task="embed"))])
    assert len(answers.pooled["r0"]) == 96
    core.shutdown()


def test_largest_steps() -> None:
    def steps(max_rows: int, **changes: int):
        return LargestSteps(**{"max_rows": max_rows, "max_tokens": 100, "max_len": 40, "vocab_size": 30, **changes})

    prompts, mixed, decodes = steps(4)
    assert prompts.num_new.tolist() == [40, 40, 20]
    assert prompts.start.tolist() == [0, 0, 0]
    assert mixed.num_new.tolist() == [1, 1, 1, 40]
    assert mixed.start.tolist() == [39, 39, 39, 0]
    assert (decodes.start + decodes.num_new).tolist() == [40] * 4
    assert not decodes.drafts
    assert all(init.token_ids.max() == 29 for init in (*mixed.admitted, *decodes.admitted))
    prompts, mixed, decodes = steps(2, max_len=400)
    assert prompts.num_new.tolist() == [100]
    assert mixed.num_new.tolist() == [1, 99]
    assert (mixed.start + mixed.num_new).tolist() == [400, 400]
    _, mixed, decodes = steps(200)
    assert len(decodes.rows) == 100
    assert np.array_equal(decodes.sample_rows, decodes.rows)
    assert mixed.num_new.sum() <= 100
    *_, decodes = steps(30, num_drafts=3)
    assert decodes.total_num_scheduled_tokens == decodes.num_new.sum() <= 100
    assert {len(drafts) for drafts in decodes.drafts.values()} == {2}
    assert (decodes.start + decodes.num_new).tolist() == [40] * 30
    (only,) = steps(4, samples=False)
    assert all(init.sampling is None for init in only.admitted)


@pytest.mark.parametrize(
    ("max_rows", "max_tokens", "num_drafts", "found"),
    [
        (512, 8192, 0, {(512, 0)}),
        (512, 8192, 4, {(512, 0), (102, 4)}),
        (256, 500, 4, {(256, 0), (100, 4)}),  # padded to 512 tokens
        (4, 100, 2, {(4, 0), (4, 2)}),
        (1000, 8192, 1, {(512, 0), (256, 1)}),
    ],
)
def test_the_largest_graphs(max_rows: int, max_tokens: int, num_drafts: int, found: set[tuple[int, int]]) -> None:
    """Those with most rows, and with most tokens: the memory of a graph is its own."""
    steps = LargestSteps(max_rows, max_tokens, 4096, 30, 1, num_drafts)
    assert largest_graphs(steps, Padding(max_rows, 4096, 1 + num_drafts)) == found


def test_a_device_keeps_free_what_a_step_takes_and_a_margin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card = FakeCuda(monkeypatch, total=1000 << 20)
    gpu = CudaDevice()
    card.free -= 100 << 20  # of another process
    card.allocate(300 << 20)

    def run() -> None:
        card.allocate(200 << 20)
        card.allocate(-(150 << 20))  # the rest stays: workspaces of libraries
        card.hold(30 << 20)

    with caplog.at_level("INFO", logger="pagoda"):
        left = gpu.free_bytes_beside(run)
    assert left == (1000 - 100 - 300 - 200 - 30 - 20) << 20
    assert (
        "has 1000 MiB: 300 for weights, 200 for the largest step, 30 for graphs, 20 kept free, 100 held by others, 350 "
        "left" in caplog.text
    )
    assert card.calls[-2:] == ["empty_cache", "get_device_name"]


@pytest.mark.gpu
def test_a_real_gpu_says_what_a_step_takes() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    gpu = CudaDevice()
    free = gpu.free_bytes()
    left = gpu.free_bytes_beside(lambda: torch.empty(2**28, dtype=torch.uint8, device="cuda").sum())
    assert free - left >= 2**28
