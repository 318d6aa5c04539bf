"""SyncWatch: refuses what would make a host wait for its device, or copy from memory that is not pinned."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

WAITS = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "cuda",
    "to",
    "nonzero",
    "masked_select",
    "unique",
    "repeat_interleave",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "__array__",
    "equal",
    "allclose",
}


COPIES = {"tensor", "as_tensor"}
"""Functions that make a tensor of the host's numbers, and with a device wait until it is there."""


class SyncWatch(TorchFunctionMode):
    """Within it, calls that would wait raise AssertionError. `allowed()`: what a device does without the host."""

    def __init__(self) -> None:
        super().__init__()
        self._is_paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_cast = name == "to" and all(isinstance(given, torch.dtype) for given in (*args[1:], *kwargs.values()))
        if not self._is_paused and not is_cast:
            assert name not in WAITS, f"{name} waits for the device"
            assert name not in COPIES or kwargs.get("device") is None, f"{name} copies to the device"
            if name in ("__getitem__", "__setitem__"):
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                for part in index:
                    assert not isinstance(part, (np.ndarray, list)), f"{name} copies its index to the device"
                    is_mask = isinstance(part, torch.Tensor) and part.dtype == torch.bool
                    assert not is_mask, f"{name} with a mask waits for the device"
        return func(*args, **kwargs)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def within(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, allowed to do anything."""

        def allowed(*args: Any, **kwargs: Any) -> Any:
            with self.allowed():
                return call(*args, **kwargs)

        return allowed
