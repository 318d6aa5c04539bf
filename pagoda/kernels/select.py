"""Choose the Ops of a device: the only place that chooses between the native, Triton, torch and reference kernels."""

import logging
from importlib.util import find_spec
from typing import ClassVar, Protocol, cast

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


class RunsKernels(Protocol):
    """A device, as far as kernels are chosen for it.

    name: in the settings.   kernels: names of those that run there, the one that "auto" takes first.
    threads: of the native kernels.
    """

    name: ClassVar[str]
    kernels: ClassVar[tuple[str, ...]]
    threads: int


def select_ops(name: str, device: RunsKernels, max_model_len: int = 8192, batch_invariant: bool = False) -> Ops:
    """Return the kernels called `name` (one of NAMES) for `device`.

    max_model_len, batch_invariant: see TritonOps.
    "auto" is what the device lists first. If native kernels do not compile or Triton is not installed, it is torch,
    with one warning that says what to install. The casts turn opaque tensors into torch's: these classes take
    torch.Tensor where ForwardOps says Tensor. Raises ConfigError for an unknown name, and for kernels that are not
    available.
    """
    if name not in NAMES:
        raise ConfigError(f"unknown kernels {name!r}{nearest(name, list(NAMES))}")
    chosen = device.kernels[0] if name == "auto" else name
    if chosen == "triton":
        return _triton_ops(name, device, max_model_len, batch_invariant)
    if chosen not in device.kernels:
        raise ConfigError(f"kernels={chosen!r} do not run on device {device.name!r}; take 'auto'")
    if chosen == "reference":
        return cast(Ops, ReferenceOps())
    if chosen == "torch":
        return cast(Ops, TorchOps())
    try:
        library = load()
        logger.info("kernels: native for %s, %d threads", library.isa, device.threads)
        return cast(Ops, NativeOps(library, device.threads))
    except NativeUnavailable as error:
        if name == "native" or batch_invariant:
            raise ConfigError(f"{'kernels=native' if name == 'native' else 'batch_invariant'}: {error}") from error
        logger.warning("running on torch's kernels, slower than the native ones: %s", error)
        return cast(Ops, TorchOps())


def _triton_ops(name: str, device: RunsKernels, max_model_len: int, batch_invariant: bool) -> Ops:
    """Return TritonOps; for "auto" without Triton, TorchOps with a warning."""
    if find_spec("triton") is None:
        remedy = "Triton is not installed; pip install triton"
        if name == "triton" or batch_invariant:
            raise ConfigError(f"{'batch_invariant' if batch_invariant else 'kernels=triton'}: {remedy}")
        logger.warning("running on torch's kernels, slower than those in Triton: %s", remedy)
        return cast(Ops, TorchOps())
    from pagoda.kernels.triton_ops import TritonOps, is_interpreted

    if "triton" not in device.kernels and not is_interpreted():
        raise ConfigError(
            f"kernels='triton' do not run on device {device.name!r}; take 'auto', or set TRITON_INTERPRET=1 to run "
            "them in Triton's interpreter, very slowly"
        )
    return cast(Ops, TritonOps(max_model_len, batch_invariant))
