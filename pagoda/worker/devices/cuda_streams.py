"""CudaStreams: a CUDA GPU's copies from and to pinned memory, with events; KV blocks move on a stream of their own."""

import weakref
from collections.abc import Sequence

import numpy as np
import torch

from pagoda.base.errors import WorkerDied
from pagoda.worker.devices.streams import HostCopy
from pagoda.worker.host_memory import lazy_zeros


class CudaStreams:
    """See Streams. Computations are what is submitted to the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        on_host: list[torch.Tensor] = []
        for tensor in tensors:
            # torch keeps pinned memory for later, and gives out none whose copy is not complete.
            on_host.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
            on_host[-1].copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _EventCopy(on_host, event)

    def new_host_memory(self, num_bytes: int) -> torch.Tensor:
        # Not torch's pinned memory, which is rounded up to a power of two.
        memory = lazy_zeros((num_bytes,), torch.uint8)
        runtime = torch.cuda.cudart()
        assert runtime is not None, "torch has no CUDA"
        status = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        if status:
            raise MemoryError(f"{num_bytes} bytes of host memory cannot be pinned (CUDA error {status})")
        weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, memory.data_ptr())
        return memory

    def store(self, source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        source.record_stream(self._copies)
        with torch.cuda.stream(self._copies):
            for rows, target in zip(source.split([len(target) for target in targets]), targets, strict=True):
                target.copy_(rows, non_blocking=True)

    def load(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        num_rows = sum(len(source) for source in sources)
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._copies):
            loaded = torch.empty((num_rows, *sources[0].shape[1:]), dtype=sources[0].dtype, device=self._device)
            for rows, source in zip(loaded.split([len(source) for source in sources]), sources, strict=True):
                rows.copy_(source, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        computing.wait_event(arrived)
        loaded.record_stream(computing)
        return loaded

    def check(self) -> None:
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise WorkerDied(f"the GPU failed: {error}") from error


class _EventCopy:
    def __init__(self, tensors: list[torch.Tensor], event: torch.cuda.Event) -> None:
        self._tensors, self._event = tensors, event

    def is_done(self) -> bool:
        try:
            return self._event.query()
        except RuntimeError:  # the GPU failed: `wait` says so
            return True

    def wait(self) -> list[np.ndarray]:
        try:
            self._event.synchronize()
        except RuntimeError as error:  # nothing can be computed any more in this process
            raise WorkerDied(f"the GPU failed: {error}") from error
        return [tensor.numpy() for tensor in self._tensors]
