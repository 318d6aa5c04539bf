"""Devices that a worker can run on.

A device is one class, a subclass of `Device` (device.py): it answers for memory, for copies to and from the host, for
kernels and for graphs. Nothing else asks what kind of device there is.

device.py   Device, with what suits any device that torch knows; HostCopy and Capture, which it gives out
cpu.py      CpuDevice: the host itself
cuda.py     CudaDevice: pinned memory, a stream for KV blocks, CUDA graphs, and what `pagoda doctor` says of GPUs

`select_device` makes the device that the settings ask for. torch is imported only for a device whose driver is there.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from pagoda.base.config import ParallelConfig
from pagoda.base.registry import Registry
from pagoda.worker.devices.device import Device

__all__ = ["Device", "device_names", "device_type", "is_available", "select_device"]


@dataclass(frozen=True, slots=True)
class _Listed:
    """Where a device's class is.

    drivers: files of which one exists where the device can be used, so that its module need not be imported elsewhere;
    none: it must be asked.
    """

    module: str
    class_name: str
    drivers: tuple[str, ...] = ()

    def load(self) -> type[Device]:
        return cast(type[Device], getattr(import_module(self.module), self.class_name))

    def is_available(self) -> bool:
        has_driver = not self.drivers or any(Path(path).exists() for path in self.drivers)
        return has_driver and self.load().is_available()


_DEVICES: Registry[_Listed] = Registry(
    "device",
    {  # "auto" is the first that is available
        "cuda": _Listed(
            "pagoda.worker.devices.cuda",
            "CudaDevice",
            # On Linux, in Windows' subsystem for it (WSL 2), on Tegra.
            ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap"),
        ),
        "cpu": _Listed("pagoda.worker.devices.cpu", "CpuDevice"),
    },
)


def device_names() -> tuple[str, ...]:
    """Return the names of all devices, in the order in which "auto" takes them."""
    return tuple(_DEVICES)


def device_type(name: str) -> type[Device]:
    """Return the class of the device called `name`. Raises ConfigError if there is none."""
    return _DEVICES[name].load()


def is_available(name: str) -> bool:
    """Return whether this machine has the device called `name`."""
    return _DEVICES[name].is_available()


def select_device(config: ParallelConfig) -> Device:
    """Return the device called `config.device`; "auto" is the first that is available.

    Raises ConfigError for an unknown name. That the device is there is checked when it is first used.
    """
    name = config.device
    if name == "auto":
        name = next(each for each in _DEVICES if is_available(each))
    return device_type(name)(config.threads)
