"""A device that computes at once and copies as late as it may: what is read too early, or written too late, shows."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pagoda.worker.devices.cpu import CpuDevice
from pagoda.worker.devices.device import HostCopy


class LaggingDevice(CpuDevice):
    """Blocks go to the host when others are loaded; results are there when they are waited for.

    num_waits: how often the host has waited for the device.   most_behind: copies that were open at once.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        """delay_s: how long a wait takes."""
        super().__init__()
        self._stores: list[Callable[[], None]] = []
        self.delay_s = delay_s
        self.num_waits = self.num_copies = self.most_behind = 0

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        self.num_copies += 1
        self.most_behind = max(self.most_behind, self.num_copies - self.num_waits)
        return _LateCopy(self, [tensor.clone() for tensor in tensors])

    def store(self, source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        store = super().store
        self._stores.append(lambda: store(source, targets))

    def load(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        for store in self._stores:
            store()
        self._stores.clear()
        return super().load(sources)


class _LateCopy:
    def __init__(self, device: LaggingDevice, tensors: list[torch.Tensor]) -> None:
        self._device, self._tensors = device, tensors
        self._was_waited_for = False

    def is_done(self) -> bool:
        return self._was_waited_for

    def wait(self) -> list[np.ndarray]:
        if not self._was_waited_for:
            time.sleep(self._device.delay_s)
            self._device.num_waits += not self._was_waited_for
            self._was_waited_for = True
        return [tensor.numpy() for tensor in self._tensors]
