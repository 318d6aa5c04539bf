"""Devices that a worker can run on.

A device is one class, a subclass of `Device` (device.py): it has what depends on the device: memory, copies to and from
the host, kernels and graphs. Otherwise only a few places in kernels/ test where torch has a tensor, each for a reason
that is next to the test.

device.py   Device, with what suits any device that torch knows; HostCopy and Capture, which it returns
cpu.py      CpuDevice: the host itself
cuda.py     CudaDevice: pinned memory, a stream for KV blocks, CUDA graphs, and what `pagoda doctor` says of GPUs

Other packages bring more of them by the entry-point group `pagoda.devices` (docs/howto/add-a-device.md).
`select_device` makes the device that the settings ask for. torch is imported only for a device whose driver is there.
"""

import logging
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol, cast

from pagoda.base.config import ParallelConfig
from pagoda.base.errors import ConfigError
from pagoda.base.registry import Registry
from pagoda.worker.devices.device import Device

__all__ = ["Device", "device_names", "device_type", "is_available", "select_device"]

logger = logging.getLogger("pagoda")

GROUP = "pagoda.devices"
"""The entry points of other packages: a device's name, and its class."""


class _Known(Protocol):
    """A device whose class is not imported yet."""

    def load(self) -> type[Device]: ...

    def is_available(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Own:
    """Where the class of a device of this package is.

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


@dataclass(frozen=True, slots=True)
class _PlugIn:
    """A device of another package."""

    entry: EntryPoint

    @property
    def _origin(self) -> str:
        package = self.entry.dist.name if self.entry.dist is not None else "?"
        return f"device {self.entry.name!r} of the package {package!r} ({self.entry.value})"

    def load(self) -> type[Device]:
        """Raises ConfigError that names the package if its class cannot be had."""
        try:
            found = self.entry.load()
        except Exception as error:  # whatever the package does when it is imported
            raise ConfigError(f"{self._origin} cannot be loaded: {type(error).__name__}: {error}") from error
        if not (isinstance(found, type) and issubclass(found, Device)) or found.name != self.entry.name:
            raise ConfigError(f"{self._origin} is no subclass of pagoda.worker.devices.Device with that name")
        return found

    def is_available(self) -> bool:
        """A package that cannot be loaded has no device: it must not keep others from being used."""
        try:
            return self.load().is_available()
        except ConfigError as error:
            logger.warning("%s", error)
            return False


_OWN: dict[str, _Known] = {
    "cuda": _Own(
        "pagoda.worker.devices.cuda",
        "CudaDevice",
        # On Linux, in Windows' subsystem for it (WSL 2), on Tegra.
        ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap"),
    ),
    "cpu": _Own("pagoda.worker.devices.cpu", "CpuDevice"),
}


def _known(name: str = "") -> Registry[_Known]:
    """Return all devices, in the order in which "auto" takes them: those of other packages before the CPU.

    name: of the only one that will be looked up; other packages are asked only if it may be theirs.
    """
    if name in _OWN:
        return Registry("device", _OWN)
    found = {entry.name: _PlugIn(entry) for entry in entry_points(group=GROUP)}
    return Registry("device", {"cuda": _OWN["cuda"], **found, "cpu": _OWN["cpu"]} | _OWN)


def device_names() -> tuple[str, ...]:
    """Return the names of all devices, in the order in which "auto" takes them."""
    return tuple(_known())


def device_type(name: str) -> type[Device]:
    """Return the class of the device called `name`. Raises ConfigError if there is none."""
    return _known(name)[name].load()


def is_available(name: str) -> bool:
    """Return whether this machine has the device called `name`."""
    return _known(name)[name].is_available()


def select_device(config: ParallelConfig, index: int = 0) -> Device:
    """Return the device called `config.device`; "auto" is the first that is available.

    index: which of several of its kind. Raises ConfigError for an unknown name. That the device is there is checked
    when it is first used.
    """
    name = config.device
    if name == "auto":
        known = _known()
        name = next(each for each in known if known[each].is_available())
    return device_type(name)(config.threads, index)
