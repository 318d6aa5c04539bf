"""The simulated GPU refuses what a GPU refuses, and computes what a CPU computes."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import NoReturn

import numpy as np
import pytest
import torch

from pagoda.kernels.transfer import bulk_copy
from pagoda.worker.devices.cuda import CudaCapture, CudaDevice
from tests.simulated_gpu import simulated_gpu

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def gpu(without_triton: Callable[[str], NoReturn]) -> Iterator[None]:
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    with simulated_gpu():
        yield


def test_values_and_memory_are_a_cpus() -> None:
    made = torch.arange(6, device=CUDA).view(2, 3)
    row = made[1]
    row += 10
    assert made.device == torch.device("cuda:0")
    assert made.is_cuda
    assert made.tolist() == [[0, 1, 2], [13, 14, 15]]
    values, index = made.float().max(dim=1)
    assert (values.device.type, index.tolist()) == ("cuda", [2, 2])
    assert made.cpu().device.type == "cpu"
    assert torch.ones(2).to("cuda", torch.float16).dtype == torch.float16
    assert torch.ones(2, device=CUDA).to("cpu", None, False, True).tolist() == [1, 1]
    assert torch.empty(2, device="meta").device.type == "meta"  # how transformers sets a model up
    assert torch.empty_like(values).isnan().all()
    made[0, [0, 2]] = torch.tensor([7, 8], device=CUDA)
    made[1] = torch.tensor([4, 5, 6])
    assert made.tolist() == [[7, 1, 8], [4, 5, 6]]
    out = torch.empty(2, device="cuda")
    assert torch.add(values, values, out=out) is out
    assert out.tolist() == [4, 30]


def test_devices_are_not_mixed() -> None:
    ours, hosts = torch.ones(3, device=CUDA), torch.ones(3)
    for mix in (
        lambda: ours + hosts,
        lambda: torch.cat([hosts, ours]),
        lambda: ours[torch.tensor([0])],
        lambda: hosts.index_select(0, torch.tensor([0], device=CUDA)),
        lambda: torch.equal(ours, hosts),
        lambda: torch.add(hosts, hosts, out=ours),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mix()
    assert (ours * torch.tensor(2.0)).tolist() == [2, 2, 2]  # a number goes along
    with pytest.raises(TypeError, match="cpu"):
        ours.numpy()
    with pytest.raises(TypeError, match="cpu"):
        np.asarray(ours)


def test_a_copy_that_is_not_waited_for_needs_pinned_memory() -> None:
    ours = torch.zeros(3, device=CUDA)
    with pytest.raises(AssertionError, match="pinned"):
        ours.copy_(torch.ones(3), non_blocking=True)
    ours.copy_(torch.ones(3, pin_memory=True), non_blocking=True)
    (moved,) = bulk_copy([np.arange(3, dtype=np.int32)], CUDA)
    streams = CudaDevice()
    memory = streams.new_host_memory(12)
    streams.store(moved.view(torch.uint8)[None], [memory[None]])
    assert streams.load([memory[None]]).view(torch.int32).tolist() == [[0, 1, 2]]
    assert streams.to_host([ours]).wait()[0].tolist() == [1, 1, 1]


def test_a_graph_is_not_captured_of_what_needs_the_host() -> None:
    ours = torch.ones(3, device=CUDA)
    (out,), replay = CudaCapture()(lambda: (ours * 2,))
    ours += 1
    assert out.tolist() == [2, 2, 2]
    replay()
    assert out.tolist() == [4, 4, 4]
    for waits in (
        lambda: ours * ours.sum().item(),
        lambda: ours + torch.ones(3).to(CUDA),
        lambda: ours * torch.tensor(2.0, device=CUDA),
        lambda: ours.cpu(),
        lambda: ours[ours.nonzero()[0]],
    ):
        with pytest.raises(RuntimeError, match="capturing"):
            CudaCapture()(waits)


def test_kernels_read_only_the_gpus_memory() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def doubled(out, source, size: tl.constexpr):
        at = tl.arange(0, size)
        tl.store(out + at, tl.load(source + at) * 2)

    ours, out = torch.arange(4, device=CUDA), torch.empty(4, dtype=torch.long, device=CUDA)
    doubled[(1,)](out, ours, 4)
    assert out.tolist() == [0, 2, 4, 6]
    with pytest.raises(ValueError, match="cannot be accessed"):
        doubled[(1,)](out, torch.arange(4), 4)
