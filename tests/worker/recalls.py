"""Workers on a CPU that run steps of few tokens as on a GPU: padded, as "graphs", with results that come late."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pagoda.layers.sharding import ALONE
from pagoda.ops.tensor import RankGroup
from pagoda.worker import worker as worker_module
from pagoda.worker.batch_rows import Padding
from pagoda.worker.devices.cpu import CpuDevice
from pagoda.worker.forward_runner import ForwardRunner, Graphs
from pagoda.worker.loaded_model import LoadedModel, WorkerConfig, load
from tests.worker.lagging_device import LaggingDevice


class Recalls:
    """In place of CudaCapture: runs the call again, and writes its results where the first ones were."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(
        self, run: Callable[[], tuple[torch.Tensor, ...]]
    ) -> tuple[tuple[torch.Tensor, ...], Callable[[], object]]:
        results = run()

        def replay() -> None:
            self.replays += 1
            for result, again in zip(results, run(), strict=True):
                result.copy_(again)

        return results, replay


def recall_steps(monkeypatch: pytest.MonkeyPatch) -> Recalls:
    """Make workers that are started from now on run such steps."""
    recalls = Recalls()

    def load_graphed(config: WorkerConfig, ranks: RankGroup = ALONE) -> LoadedModel:
        loaded = load(config, ranks)
        assert isinstance(loaded.device, CpuDevice)
        tables = loaded.store.tables if loaded.store is not None else None
        graphs = Graphs(loaded.ops, Padding(config.max_rows, loaded.max_len, config.max_drafts + 1), recalls, tables)
        forward = ForwardRunner(loaded.model, loaded.ops, loaded.device.device, tables, graphs)
        return replace(loaded, device=LaggingDevice(), forward=forward)

    monkeypatch.setattr(worker_module, "load", load_graphed)
    return recalls
