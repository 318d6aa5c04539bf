"""A device is one class: with it and an entry point, engines run on it."""

import logging
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from pagoda.assembly.assemble import build_engine_core
from pagoda.base.config import EngineConfig, ParallelConfig
from pagoda.base.errors import ConfigError
from pagoda.base.sampling_params import SamplingParams
from pagoda.kernels.ops import Ops
from pagoda.worker import devices
from pagoda.worker.devices.device import Capture, HostCopy, OnHost
from tests.engine.driver import drive, request, write_tiny_llama
from tests.worker.recalls import Recalls


class Pretend(devices.Device):
    """A part of the host's memory as its own; results that are late, and graphs that are calls."""

    name: ClassVar[str] = "pretend"
    device = torch.device("cpu")
    num_copies = 0

    def free_bytes(self) -> int:
        return 64 << 20

    def make_capture(self, ops: Ops) -> Capture | None:
        return Recalls()

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        type(self).num_copies += 1
        return _Late([tensor.clone().numpy() for tensor in tensors])


class _Late(OnHost):
    def is_done(self) -> bool:
        return False


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> type[Pretend]:
    entry = EntryPoint("pretend", f"{__name__}:Pretend", devices.GROUP)
    monkeypatch.setattr(devices, "entry_points", lambda group: [entry])
    return Pretend


def test_an_engine_runs_on_a_device_that_is_one_class(
    pretend: type[Pretend], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_tiny_llama(tmp_path)
    requests = [request(i, [5 + i, 6, 7], SamplingParams(temperature=0, max_tokens=12)) for i in range(5)]
    found, pools = [], []
    with caplog.at_level(logging.DEBUG, "pagoda"):
        for name in ("cpu", "pretend"):
            options = {"device": name, "kernels": "torch", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 3}
            core = build_engine_core(EngineConfig.from_options(model=model, **options))
            pools.append(core.sizes.num_blocks)
            found.append(drive(core, requests).tokens)
            core.shutdown()
    assert found[0] == found[1]
    assert pools[1] < pools[0], "sized by the device's own memory"
    assert pretend.num_copies > 12
    assert "captured a graph" in caplog.text


def test_a_device_is_found_by_its_name(pretend: type[Pretend]) -> None:
    assert type(devices.select_device(ParallelConfig(device="pretend"))) is pretend
    assert devices.select_device(ParallelConfig()).name in ("cuda", "pretend")  # the first that is available
    assert devices.device_names() == ("cuda", "pretend", "cpu")
    with pytest.raises(ConfigError, match="unknown device 'pretent'; did you mean 'pretend'"):
        devices.select_device(ParallelConfig(device="pretent"))
