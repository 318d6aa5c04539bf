"""KV pools on a GPU are sized by what the largest steps leave free. Here the GPU, but for one test, is made up."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pagoda.assemble import build_engine_core
from pagoda.base.config import EngineConfig, ParallelConfig
from pagoda.base.errors import CapacityError
from pagoda.worker.devices.cuda import CudaDevice
from pagoda.worker.largest_steps import largest_steps
from tests.engine.driver import write_tiny_llama


class MadeUpGpu(CudaDevice):
    """free: what is left next to a step, or the error that the step raises."""

    def __init__(self, free: int | Exception) -> None:
        self.device, self.threads, self.free = torch.device("cpu"), 1, free
        self.runs = 0

    def prepare(self) -> None:
        pass

    def free_bytes_beside(self, run: Callable[[], object]) -> int:
        self.runs += 1
        run()
        if isinstance(self.free, Exception):
            raise self.free
        return self.free


@pytest.fixture
def engine_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    folder = write_tiny_llama(tmp_path)

    def make(gpu: MadeUpGpu, **options: object):
        monkeypatch.setattr("pagoda.engine_setup._free_bytes", lambda device: 2**30)

        def select(config: ParallelConfig) -> MadeUpGpu:
            assert config.device == "cuda"
            return gpu

        monkeypatch.setattr("pagoda.worker.worker.select_device", select)
        settings = {"device": "cuda", "kernels": "torch", "dtype": "float32", "gpu_memory_utilization": 1.0}
        return build_engine_core(EngineConfig.from_options(model=folder, **settings, **options))

    return make


def test_the_cache_gets_what_the_largest_step_leaves(engine_on) -> None:
    gpu = MadeUpGpu(2**20)
    core = engine_on(gpu, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=100)
    small = core.facts.num_blocks
    core.shutdown()
    twice = engine_on(MadeUpGpu(2**21), max_model_len=64, max_num_seqs=4, max_num_batched_tokens=100)
    assert 2 * small <= twice.facts.num_blocks <= 2 * small + 2
    twice.shutdown()
    assert gpu.runs == 1
    given = MadeUpGpu(2**20)
    engine_on(given, max_model_len=64, kv_cache_memory=2**20).shutdown()
    assert given.runs == 0


def test_too_little_is_refused_with_what_would_fit(engine_on) -> None:
    with pytest.raises(CapacityError, match=r"one sequence of max_model_len=256 .*set max_model_len=\d+ or less"):
        engine_on(MadeUpGpu(2**16), max_model_len=256)
    with pytest.raises(CapacityError, match=r"a step of 99 tokens, or of 3 sequences, .*lower max_num_batched_tokens"):
        engine_on(MadeUpGpu(torch.OutOfMemoryError("full")), max_num_seqs=3, max_num_batched_tokens=99)


def test_largest_steps() -> None:
    prompts, decodes = largest_steps(max_rows=4, max_tokens=100, max_len=40)
    assert prompts.num_new.tolist() == [40, 40, 20]
    assert prompts.start.tolist() == [0, 0, 0]
    assert (decodes.start + decodes.num_new).tolist() == [40] * 4
    prompts, decodes = largest_steps(max_rows=2, max_tokens=100, max_len=40)
    assert prompts.num_new.tolist() == [40, 40]
    _, decodes = largest_steps(max_rows=200, max_tokens=100, max_len=40)
    assert len(decodes.rows) == 100
    assert np.array_equal(decodes.sample_rows, decodes.rows)


@pytest.mark.gpu
def test_a_real_gpu_says_what_a_step_takes() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    gpu = CudaDevice()
    free = gpu.free_bytes()
    left = gpu.free_bytes_beside(lambda: torch.empty(2**28, dtype=torch.uint8, device="cuda").sum())
    assert free - left >= 2**28
