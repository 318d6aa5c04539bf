"""Steps of every architecture, and what every encoder computes, can be captured as graphs: they never wait.

On a simulated GPU, on Triton's kernels.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from pagoda.kernels.batch import ForwardBatch, KVLayer
from pagoda.kernels.select import select_ops
from pagoda.loading.loader import load_model
from pagoda.loading.model_files import identify
from pagoda.worker.devices.cuda import CudaCapture
from pagoda.worker.forward_runner import Computed, ForwardRunner
from tests.device_under_test import ON_CPU, REFUSED_BY_TRITON, made, moved
from tests.models.paged_runner import PagedRunner
from tests.models.tiny import CONFIGS, make_model, save
from tests.models.tiny_encoders import CONFIGS as ENCODERS
from tests.models.tiny_encoders import batch_of, make_encoder, save_encoder, texts
from tests.simulated_gpu import CUDA, SimulatedGpu, simulated_gpu

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = {"llama-tied-biased", "gemma3-multimodal", "modernbert"}


@pytest.fixture
def gpu(without_triton: Callable[[str], NoReturn]) -> Iterator[SimulatedGpu]:
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    with simulated_gpu() as made:
        yield made


class CapturedForward:
    """A forward whose first step is captured as well, and replayed for what it returns."""

    def __init__(self, forward: ForwardRunner) -> None:
        self._forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def run(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Computed:
        results, replay = CudaCapture()(
            lambda: tuple(each for each in self._forward.run(batch, kv) if each is not None)
        )
        for result in results:
            result.zero_()
        replay()
        return Computed(*results)


def mark_slow_except_quick(names: Iterable[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


RUN = [name for name in CONFIGS if not name.startswith(REFUSED_BY_TRITON)]


@pytest.mark.parametrize("name", mark_slow_except_quick(RUN))
def test_steps(name: str, gpu: SimulatedGpu, tmp_path: Path) -> None:
    files = identify(save(make_model(name), tmp_path))

    def logits(kernels: str, device: torch.device) -> torch.Tensor:
        ops = select_ops(kernels, made(device))
        forward = ForwardRunner(load_model(files, ops, torch.float32, device), ops)
        model = CapturedForward(forward) if device == CUDA else forward
        runner = PagedRunner(model, 3, 8, torch.float32, device=device)
        prompts = runner.logits([(0, 0, [3, 4, 5, 6]), (1, 0, [9]), (2, 0, [8, 7])])
        return torch.cat([prompts, runner.logits([(0, 4, [7]), (1, 1, [2])])])

    with torch.inference_mode():
        torch.testing.assert_close(logits("triton", CUDA), logits("torch", ON_CPU.device), atol=2e-4, rtol=2e-4)
    assert gpu.num_replays == gpu.num_graphs == 2


@pytest.mark.parametrize("name", mark_slow_except_quick(ENCODERS))
def test_encoders(name: str, gpu: SimulatedGpu, tmp_path: Path) -> None:
    """Steps of encoders are not captured in serving; one that could be never makes the host wait."""
    files = identify(save_encoder(make_encoder(name), tmp_path))

    def states(kernels: str, device: torch.device) -> torch.Tensor:
        ops = select_ops(kernels, made(device))
        forward = ForwardRunner(load_model(files, ops, torch.float32, device), ops)
        model = CapturedForward(forward) if device == CUDA else forward
        batch = batch_of(texts(1, 9), forward.model.num_token_types)
        return model.run(moved(batch, device), []).hidden.cpu()

    with torch.inference_mode():
        torch.testing.assert_close(states("triton", CUDA), states("torch", ON_CPU.device), atol=2e-4, rtol=2e-4)
    assert gpu.num_replays == gpu.num_graphs == 1
