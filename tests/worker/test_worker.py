import logging
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.config import ParallelConfig
from pagoda.base.errors import CapacityError, ConfigError, WorkerDied
from pagoda.kernels.native_ops import NativeOps
from pagoda.loading.loader import load_model
from pagoda.loading.model_files import identify
from pagoda.worker.loaded_model import WorkerConfig
from pagoda.worker.worker import Worker
from tests.engine.driver import write_tiny_llama
from tests.worker.hand_made import row_init, step


def config(folder: Path, **changes: object) -> WorkerConfig:
    settings: dict[str, object] = {
        "files": identify(folder),
        "dtype": "float32",
        "quantization": None,
        "kv_dtype": "float32",
        "block_size": 8,
        "max_rows": 4,
        "max_model_len": 64,
        "max_drafts": 0,
        "parallel": ParallelConfig(device="cpu", threads=1, kernels="torch"),
    }
    return WorkerConfig(**{**settings, **changes})  # type: ignore[arg-type]


def test_it_runs_between_set_pools_and_shutdown(tmp_path: Path) -> None:
    worker = Worker(config(write_tiny_llama(tmp_path)))
    first = step(1, [(0, 0, 3)], admitted=(row_init(0, [5, 6, 7], [1]),))
    with pytest.raises(WorkerDied):
        worker.launch(first).result()
    worker.load()
    capacity = worker.measure([])
    assert capacity.free_bytes > 2**20
    assert (capacity.memory.startswith("host of "), capacity.num_too_large) == (True, 0)
    assert capacity.block_bytes == (2 * 2 * 8 * 2 * 16 * 4,)  # K and V, layers, tokens, heads, elements, float32
    with pytest.raises(WorkerDied):
        worker.launch(first).result()
    worker.set_pools(10, 0)
    assert worker.launch(first).result().num_sampled.tolist() == [1]
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(WorkerDied):
        worker.launch(first).result()


def test_unsupported_settings_of_the_kernels_are_an_error_at_start(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    with pytest.raises(ConfigError, match="quantization"):
        Worker(config(folder, quantization="nonsense")).load()
    with pytest.raises(ConfigError, match="device"):
        Worker(config(folder, parallel=ParallelConfig(device="abacus"))).load()


def test_a_pool_that_cannot_be_allocated_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    worker = Worker(config(write_tiny_llama(tmp_path)))
    worker.load()
    with pytest.raises(CapacityError, match="kv_cache_memory"):
        worker.set_pools(np.iinfo(np.int32).max * 1000, 0)


@pytest.mark.parametrize("pin", [True, False])
def test_only_an_engine_told_to_pins_its_threads(
    pin: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before weights are written: their memory is near the thread that does."""
    asked: list[object] = []
    loaded = "pagoda.worker.loaded_model.load_model"
    monkeypatch.setattr(loaded, lambda *args: asked.append("load") or load_model(*args))
    monkeypatch.setattr("pagoda.worker.loaded_model.cores_to_pin", lambda threads: [(0,)] * threads)
    monkeypatch.setattr(NativeOps, "pin_threads", lambda self, cores: asked.append(cores))  # None: it did not work
    monkeypatch.setattr("pagoda.worker.loaded_model.openmp_runtimes", lambda: ["/a/libgomp.so.1", "/b/libiomp5.so"])
    with caplog.at_level(logging.WARNING, logger="pagoda"):
        Worker(
            config(write_tiny_llama(tmp_path), parallel=ParallelConfig(device="cpu", threads=2), pin_threads=pin)
        ).load()
    assert asked == ([[(0,), (0,)], "load"] if pin else ["load"])
    assert ("could not be pinned" in caplog.text) == bool(pin)
    assert "/b/libiomp5.so" in caplog.text
