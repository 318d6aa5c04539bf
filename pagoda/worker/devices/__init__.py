"""Devices that a worker can run on; `select_device` picks one."""

from collections.abc import Callable
from typing import Protocol

import torch

from pagoda.base.config import ParallelConfig
from pagoda.base.registry import Registry
from pagoda.worker.devices.cpu import CpuDevice
from pagoda.worker.devices.cuda import CudaDevice
from pagoda.worker.devices.streams import Streams


class Device(Protocol):
    """What the worker asks of a device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def threads(self) -> int: ...

    @property
    def streams(self) -> Streams: ...

    def prepare(self) -> None: ...

    def free_bytes(self) -> int: ...


_DEVICES: Registry[Callable[[ParallelConfig], Device]] = Registry(
    "device", {"cpu": lambda config: CpuDevice(config.threads), "cuda": lambda config: CudaDevice()}
)


def select_device(config: ParallelConfig) -> Device:
    """The device called `config.device`; "auto" is the first GPU that torch sees, else the CPU."""
    if config.device == "auto":
        return _DEVICES["cuda" if torch.cuda.is_available() else "cpu"](config)
    return _DEVICES[config.device](config)
