"""Copies of a CudaDevice on a made-up CUDA: what each stream does and waits for. Its memory is the host's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pagoda.base.errors import WorkerDied
from pagoda.worker.devices.cuda import CudaDevice

CPU = torch.device("cpu")


class Copying(CudaDevice):
    device = CPU


class FakeStream:
    """Notes what it is asked in `log`, as (stream, what, of which other)."""

    def __init__(self, name: str, log: list[tuple[str, ...]]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: "FakeStream") -> None:
        self._log.append((self.name, "waits for", other.name))

    def wait_event(self, event: "FakeEvent") -> None:
        self._log.append((self.name, "waits for", event.recorded_on))


class FakeEvent:
    """Recorded on the current stream of `cuda`."""

    def __init__(self, cuda: "FakeRuntime") -> None:
        self._cuda = cuda
        self.recorded_on = ""
        self.is_complete = False

    def record(self) -> None:
        self.recorded_on = self._cuda.current.name
        self._cuda.log.append((self.recorded_on, "records", "event"))

    def query(self) -> bool:
        return self.is_complete

    def synchronize(self) -> None:
        self._cuda.log.append(("host", "waits for", self.recorded_on))
        self.is_complete = True


class FakeRuntime:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, ...]] = []
        self.computing, self.copying = FakeStream("computations", self.log), FakeStream("copies", self.log)
        self.current = self.computing
        self.registered: dict[int, int] = {}
        self.status = 0
        real_empty = torch.empty

        def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            if pin_memory:
                self.log.append((self.current.name, "allocates", "pinned"))
            return real_empty(*args, **kwargs)

        def register(pointer: int, num_bytes: int, flags: int) -> int:
            self.registered[pointer] = num_bytes
            return self.status

        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.copying)
        monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._stream)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.log.append((stream.name, "uses", "tensor"))
        )
        self.cudaHostRegister = register
        self.cudaHostUnregister = self.registered.pop

    @contextmanager
    def _stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    return FakeRuntime(monkeypatch)


def test_results_are_copied_to_pinned_memory_and_only_a_wait_waits(cuda: FakeRuntime) -> None:
    copy = Copying().to_host([torch.arange(3), torch.tensor([True, False])])
    assert not copy.is_done()
    assert cuda.log == [("computations", "allocates", "pinned")] * 2 + [("computations", "records", "event")]
    tokens, finite = copy.wait()
    assert (tokens.tolist(), finite.tolist()) == ([0, 1, 2], [True, False])
    assert cuda.log[-1] == ("host", "waits for", "computations")
    assert copy.is_done()


def test_computations_wait_for_blocks_that_come_in_and_not_for_those_that_go_out(cuda: FakeRuntime) -> None:
    device = Copying()
    memory = device.new_host_memory(64).view(8, 8)
    assert list(cuda.registered.values()) == [64]
    blocks = torch.arange(24, dtype=torch.uint8).view(3, 8)
    device.store(blocks, [memory[2:4], memory[7:8]])
    assert cuda.log == [("copies", "waits for", "computations"), ("copies", "uses", "tensor")]
    assert torch.equal(memory[[2, 3, 7]], blocks)
    cuda.log.clear()
    assert torch.equal(device.load([memory[7:8], memory[2:4]]), blocks[[2, 0, 1]])
    assert cuda.log == [
        ("copies", "records", "event"),
        ("computations", "waits for", "copies"),
        ("computations", "uses", "tensor"),
    ]


def test_a_gpu_that_fails_ends_the_worker(cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Copying().to_host([torch.arange(3)])

    def fails(event: FakeEvent) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(FakeEvent, "synchronize", fails)
    with pytest.raises(WorkerDied, match="the GPU failed: an illegal memory access"):
        copy.wait()


def test_a_failed_gpu_is_found_by_asking_it(cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = Copying(), list[object]()
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    device.check()
    assert asked == [CPU]
    copy = device.to_host([torch.arange(3)])

    def fails(*_: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    monkeypatch.setattr(FakeEvent, "query", fails)
    monkeypatch.setattr(FakeEvent, "synchronize", fails)
    with pytest.raises(WorkerDied, match="the GPU failed: an illegal memory access"):
        device.check()
    assert copy.is_done()  # so that who asks goes on to `wait`
    with pytest.raises(WorkerDied):
        copy.wait()


def test_memory_that_cannot_be_pinned_is_an_error(cuda: FakeRuntime) -> None:
    cuda.status = 2
    with pytest.raises(MemoryError, match=r"64 bytes .*CUDA error 2"):
        Copying().new_host_memory(64)


def test_memory_is_no_longer_pinned_once_nothing_uses_it(cuda: FakeRuntime) -> None:
    memory = Copying().new_host_memory(64)
    view = memory.view(8, 8)
    del memory
    assert cuda.registered
    del view
    assert not cuda.registered
