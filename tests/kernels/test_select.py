"""Which kernels run where, and what is said where those that were asked for cannot."""

import logging
from pathlib import Path

import pytest
import torch

from pagoda.assembly.assemble import build_engine_core
from pagoda.assembly.engine_setup import resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import ConfigError
from pagoda.base.sampling_params import SamplingParams
from pagoda.kernels import select
from pagoda.worker.devices.cpu import CpuDevice
from pagoda.worker.devices.cuda import CudaDevice
from tests.engine.driver import drive, request, write_tiny_llama


def test_a_gpu_gets_triton(make_triton_ops) -> None:
    assert select.select_ops("auto", CudaDevice()).name == "triton"
    assert select.select_ops("torch", CudaDevice()).name == "torch"
    assert select.select_ops("reference", CudaDevice()).name == "reference"
    with pytest.raises(ConfigError, match="kernels='native' do not run on device 'cuda'; take 'auto'"):
        select.select_ops("native", CudaDevice())


def test_without_triton_a_gpu_gets_torch_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert select.select_ops("auto", CudaDevice()).name == "torch"
    assert "pip install triton" in caplog.text
    with pytest.raises(ConfigError, match="kernels=triton: Triton is not installed"):
        select.select_ops("triton", CudaDevice())
    with pytest.raises(ConfigError, match="batch_invariant: Triton is not installed"):
        select.select_ops("auto", CudaDevice(), batch_invariant=True)


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch, make_triton_ops) -> None:
    monkeypatch.setattr("pagoda.kernels.triton_ops.is_interpreted", lambda: False)
    with pytest.raises(ConfigError, match="do not run on device 'cpu'.*TRITON_INTERPRET=1"):
        select.select_ops("triton", CpuDevice(1))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown kernels 'tritn'.*triton"):
        select.select_ops("tritn", CpuDevice(1))


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_batch_invariant_needs_kernels_that_can(kernels: str) -> None:
    with pytest.raises(ConfigError, match=f"batch_invariant does not go with kernels='{kernels}'"):
        check_settings(EngineConfig.from_options(batch_invariant=True, kernels=kernels))


def test_batch_invariant_needs_blocks_that_the_native_kernels_can_hold(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path)
    options = {"model": model, "device": "cpu", "batch_invariant": True}
    with pytest.raises(ConfigError, match="a block_size that is a multiple of 8 .got 12"):
        resolve_engine(EngineConfig.from_options(**options, block_size=12))
    assert resolve_engine(EngineConfig.from_options(**options, block_size=24)).config.parallel.kernels == "auto"


@pytest.mark.slow
def test_an_engine_runs_on_triton(tmp_path: Path, make_triton_ops) -> None:
    """On a GPU or in the interpreter, greedy and seeded tokens are those of the reference.

    Quickly: engines on a simulated GPU run on these kernels, and test_triton.py draws tokens as the reference does.
    """
    folder = write_tiny_llama(tmp_path)
    requests = [
        request(0, [5, 6, 7, 8, 9], SamplingParams(temperature=0, max_tokens=3)),
        request(1, [3, 9], SamplingParams(temperature=1.0, top_p=0.9, top_k=50, max_tokens=2), seed=7),
    ]
    options = {"device": "cuda" if torch.cuda.is_available() else "cpu", "num_blocks": 20, "max_model_len": 64}
    found = []
    for kernels in ("triton", "reference"):
        core = build_engine_core(EngineConfig.from_options(model=folder, kernels=kernels, dtype="float32", **options))
        found.append(drive(core, requests).tokens)
        core.shutdown()
    assert found[0] == found[1]
