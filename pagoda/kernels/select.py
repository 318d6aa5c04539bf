"""Choose the Ops of a device: the only place that chooses between the native, torch and reference kernels."""

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
    """Return the kernels called `name` ("auto", "native", "torch", "reference") for `device`.

    threads: of the native kernels. "auto" is native if it compiles, otherwise torch with one warning that
    says what to install. The casts turn opaque tensors into torch's: these classes take torch.Tensor where
    ForwardOps says Tensor. Raises ConfigError for an unknown name, and for "native" if it is not available.
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
