"""Which Ops a device gets: the one place that chooses between the native, torch and reference kernels."""

import logging
from typing import cast

import torch

from pagoda.base.errors import ConfigError
from pagoda.base.registry import nearest
from pagoda.kernels.native.build import NativeUnavailable
from pagoda.kernels.native.library import load
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.kernels.torch_ops import TorchOps

logger = logging.getLogger("pagoda")

NAMES = ("auto", "native", "torch", "reference")


def select_ops(name: str, device: torch.device, threads: int) -> Ops:
    """The kernels called `name` ("auto", "native", "torch", "reference") for `device`.

    threads: how many the native kernels may use. "auto" is native where it compiles, else torch with one warning that
    says what to install. The casts are where opaque tensors become torch's: these classes take torch.Tensor where
    ForwardOps says Tensor. Raises ConfigError for an unknown name, and for "native" where it cannot be had.
    """
    if name == "reference":
        return cast(Ops, ReferenceOps())
    if name == "torch" or (name == "auto" and device.type != "cpu"):
        return cast(Ops, TorchOps())
    if name not in NAMES:
        raise ConfigError(f"unknown kernels {name!r}{nearest(name, list(NAMES))}")
    if device.type != "cpu":
        raise ConfigError(f"kernels='native' run on a CPU, not on {device}; take 'auto'")
    try:
        return cast(Ops, NativeOps(load(), threads))
    except NativeUnavailable as error:
        if name == "native":
            raise ConfigError(f"kernels='native': {error}") from error
        logger.warning("running on torch's kernels, slower than the native ones: %s", error)
        return cast(Ops, TorchOps())
