"""Choose the Ops of a device: the only place that chooses between the native, Triton, torch and reference kernels."""

import logging
from importlib.util import find_spec
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

NAMES = ("auto", "native", "triton", "torch", "reference")


def select_ops(
    name: str,
    device: torch.device,
    threads: int,
    max_model_len: int = 8192,
    batch_invariant: bool = False,
) -> Ops:
    """Return the kernels called `name` (one of NAMES) for `device`.

    threads: of the native kernels.   max_model_len, batch_invariant: see TritonOps.
    "auto" is native on a CPU if it compiles, and Triton on a GPU if it is installed, otherwise torch with one warning
    that says what to install. The casts turn opaque tensors into torch's: these classes take torch.Tensor where
    ForwardOps says Tensor. Raises ConfigError for an unknown name, and for kernels that are not available.
    """
    if name not in NAMES:
        raise ConfigError(f"unknown kernels {name!r}{nearest(name, list(NAMES))}")
    if name == "reference":
        return cast(Ops, ReferenceOps())
    if name == "torch":
        return cast(Ops, TorchOps())
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        return _triton_ops(name, device, max_model_len, batch_invariant)
    if device.type != "cpu":
        if name == "auto":
            return cast(Ops, TorchOps())
        raise ConfigError(f"kernels='native' run on a CPU, not on {device}; take 'auto'")
    try:
        return cast(Ops, NativeOps(load(), threads))
    except NativeUnavailable as error:
        if name == "native" or batch_invariant:
            raise ConfigError(f"{'kernels=native' if name == 'native' else 'batch_invariant'}: {error}") from error
        logger.warning("running on torch's kernels, slower than the native ones: %s", error)
        return cast(Ops, TorchOps())


def _triton_ops(name: str, device: torch.device, max_model_len: int, batch_invariant: bool) -> Ops:
    """Return TritonOps; for "auto" without Triton, TorchOps with a warning."""
    if find_spec("triton") is None:
        remedy = "Triton is not installed; pip install 'pagoda-llm[cuda]'"
        if name == "triton" or batch_invariant:
            raise ConfigError(f"{'batch_invariant' if batch_invariant else 'kernels=triton'}: {remedy}")
        logger.warning("running on torch's kernels, slower than those in Triton: %s", remedy)
        return cast(Ops, TorchOps())
    from pagoda.kernels.triton_ops import TritonOps, is_interpreted

    if device.type != "cuda" and not is_interpreted():
        raise ConfigError(
            f"kernels='triton' run on a GPU, not on {device}; take 'auto', or set TRITON_INTERPRET=1 to run them in "
            "Triton's interpreter, very slowly"
        )
    return cast(Ops, TritonOps(max_model_len, batch_invariant))
