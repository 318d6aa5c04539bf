"""Workers on a CPU that run steps of few tokens as on a GPU: padded, as "graphs", with results that come late."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pagoda.worker import worker as worker_module
from pagoda.worker.devices.cpu import CpuDevice
from pagoda.worker.graphed_forward import GraphedForward
from pagoda.worker.loaded_model import LoadedModel, WorkerConfig, load
from tests.worker.lagging_device import LaggingDevice


class Recalls:
    """In place of CudaCapture: runs the call again, and writes its result where the first one was."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], object]]:
        out = run()

        def replay() -> None:
            self.replays += 1
            out.copy_(run())

        return out, replay


def recall_steps(monkeypatch: pytest.MonkeyPatch) -> Recalls:
    """Make workers that are started from now on run such steps."""
    recalls = Recalls()

    def load_graphed(config: WorkerConfig) -> LoadedModel:
        loaded = load(config)
        assert isinstance(loaded.device, CpuDevice)
        tables = loaded.store.tables if loaded.store is not None else None
        sizes = config.max_rows, loaded.max_len, loaded.device.device
        per_row = config.max_drafts + 1
        forward = GraphedForward(loaded.model, loaded.ops, *sizes, recalls, tables, per_row)
        return replace(loaded, device=LaggingDevice(), forward=forward)

    monkeypatch.setattr(worker_module, "load", load_graphed)
    return recalls
