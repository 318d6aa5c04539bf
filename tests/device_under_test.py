"""The device whose numbers are tested, and ops that carry what tests make on the CPU to it and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from pagoda.kernels.low_rank.table import FillableLowRank, LowRankPiece
from pagoda.kernels.ops import Ops
from pagoda.kernels.sampling.reference import LogprobTensors
from pagoda.kernels.select import select_ops
from pagoda.worker.devices import Device
from pagoda.worker.devices.cpu import CpuDevice
from pagoda.worker.devices.cuda import CudaDevice

WITH_STATES = ("lfm2", "mamba2", "granite4", "bamba", "falcon-h1", "nemotron-h", "qwen3-next", "qwen3.5")
"""How the names of models begin that have recurrent layers."""
REFUSED_BY_TRITON = ("deepseek-v", "gpt-oss", "mistral4", "llama4", *WITH_STATES)
"""How the names (in tests/models/tiny.py) of models begin that are refused with Triton's kernels when an engine starts:
with latent attention, attention within chunks, biases of experts, or recurrent layers.
"""


@dataclass(frozen=True, slots=True)
class DeviceUnderTest:
    """name: of the hardware.   dtype, kernels: of an engine there."""

    device: torch.device
    name: str
    dtype: str
    kernels: str

    @property
    def options(self) -> dict[str, Any]:
        """Return the settings of an engine on it, whose bits do not depend on the batch if the kernels can do that."""
        options = {"device": self.device.type, "dtype": self.dtype, "kernels": self.kernels}
        return {**options, "batch_invariant": True} if self._is_invariant else options

    @property
    def _is_invariant(self) -> bool:
        """Whether bits that do not depend on the batch must be asked for, and can be."""
        return self.device.type != "cpu" and self.kernels != "torch"

    def engine(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of an engine on it that on a CPU has these."""
        return dict(options) if self.device.type == "cpu" else {**options, **self.options}

    def must_promise_bits(self) -> None:
        """Skip the test with torch's kernels on a GPU: there, bits depend on the batch."""
        if self.device.type != "cpu" and not self._is_invariant:
            pytest.skip("the bits of torch's kernels depend on the batch")

    @property
    def made(self) -> Device:
        """Return it as workers use it."""
        return made(self.device)

    def must_be_a_cpu(self, why: str) -> None:
        """Skip the test elsewhere."""
        if self.device.type != "cpu":
            pytest.skip(why)

    def must_run(self, kernels: str) -> None:
        """Skip the test if these are the native kernels, and the device is no CPU. It has its own for all others."""
        if kernels == "native":
            self.must_be_a_cpu("the native kernels run on a CPU")

    def must_compute(self, model: str) -> None:
        """Skip the test of a model, by its name in tests/models/tiny.py, that is refused with Triton's kernels."""
        if self._is_invariant and model.startswith(REFUSED_BY_TRITON):
            pytest.skip(f"{model} does not run on Triton's kernels: it is refused when an engine starts")

    def must_check_indices(self) -> None:
        """Skip the test where the host would have to wait for that, and an index that is wrong ends the process."""
        self.must_be_a_cpu("on a GPU, indices are not checked")

    def ops(self, kernels: str = "torch", threads: int = 1) -> Ops:
        """Return ops on it, with bits as `options` says.

        kernels: on the CPU; in place of "torch" and "auto" (native on a CPU), a GPU has its own. Tests of the native
        kernels are skipped there.   threads: of the native kernels.
        """
        if self.device.type == "cpu":
            return select_ops(kernels, CpuDevice(threads))
        self.must_run(kernels)
        chosen = self.kernels if kernels in ("auto", "torch") else kernels
        return select_ops(chosen, self.made, batch_invariant=self._is_invariant)


ON_CPU = DeviceUnderTest(torch.device("cpu"), "CPU", "float32", "auto")


def made(device: torch.device) -> Device:
    """Return the device whose tensors are at `device`."""
    return CpuDevice() if device.type == "cpu" else CudaDevice()


def moved(value: Any, device: torch.device) -> Any:
    """Return a step's input with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    if isinstance(value, Mapping):
        return {name: moved(item, device) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__ == "pagoda.ops.batch":
        return replace(value, **{item.name: moved(getattr(value, item.name), device) for item in fields(value)})
    return value


class CarriedOps:
    """`ops` on a device, for tests whose tensors are on the CPU.

    Tensors in the arguments are copied to the device for each call, and results back; what the call changed in place
    is copied back as well. Other arguments, such as prepared weights, are passed on as they are.
    """

    def __init__(self, ops: Any, device: torch.device) -> None:
        self._ops, self._device = ops, device

    def make_low_rank_table(self, *args: Any, **kwargs: Any) -> FillableLowRank:
        """A table whose weights are on the device."""
        table = self._ops.make_low_rank_table(*args, **kwargs)
        fill = table.fill

        def fill_there(slot: int, pieces: Sequence[LowRankPiece]) -> None:
            fill(slot, [self._piece_there(piece) for piece in pieces])

        table.fill = fill_there
        return table

    def _piece_there(self, piece: LowRankPiece) -> LowRankPiece:
        bias = None if piece.bias is None else piece.bias.to(self._device)
        return replace(piece, a=piece.a.to(self._device), b=piece.b.to(self._device), bias=bias)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._ops, name)
        if not callable(attribute) or isinstance(attribute, type):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            carried: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            there = [self._there(arg, carried) for arg in args]
            named = {key: self._there(arg, carried) for key, arg in kwargs.items()}
            result = attribute(*there, **named)
            for here, moved in carried.values():
                if not name.startswith("prepare_"):
                    here.copy_(moved)
            back = {id(moved): here for here, moved in carried.values()}
            return _back(result, back)

        return call

    def _there(self, value: Any, carried: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in carried:
                carried[id(value)] = value, value.to(self._device, copy=True)
            return carried[id(value)][1]
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(self._there(item, carried) for item in value)
        if isinstance(value, Mapping):
            return {key: self._there(item, carried) for key, item in value.items()}
        if is_dataclass(value) and not isinstance(value, type) and _holds_tensors(value):
            moved = {item.name: self._there(getattr(value, item.name), carried) for item in fields(value) if item.init}
            return replace(value, **moved)
        return value


def _holds_tensors(value: Any) -> bool:
    """Return whether a record is made of tensors, and is not a weight that a kernel prepared."""
    return type(value).__module__ in ("pagoda.ops.batch", "pagoda.kernels.batch") and any(
        isinstance(getattr(value, item.name), (torch.Tensor, tuple)) for item in fields(value)
    )


def _back(result: Any, known: dict[int, torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return known[id(result)] if id(result) in known else result.cpu()
    if isinstance(result, tuple):
        return tuple(_back(item, known) for item in result)
    if isinstance(result, LogprobTensors):
        return replace(result, **{item.name: _back(getattr(result, item.name), known) for item in fields(result)})
    return result
