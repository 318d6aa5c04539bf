"""Triton's interpreter as a GPU's memory checker: kernels read and write nothing but the tensors of their launch."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

_IN_TABLES = {"_move_blocks"}  # their addresses are in tables: no launch has the tensors themselves
_is_done = False
_extents: np.ndarray | None = None  # int64 [n, 2] of the running launch: first byte and end, ascending; None: no check


class OutsideMemoryError(IndexError):
    """A kernel's address is in none of its tensors."""


def check_memory() -> None:
    """Check all launches in this process from now on. Idempotent."""
    global _is_done
    if _is_done:
        return
    _is_done = True
    builder: Any = interpreter.InterpreterBuilder
    executor: Any = interpreter.GridExecutor
    launch, load, store = executor.__call__, builder.create_masked_load, builder.create_masked_store

    def checked_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        global _extents
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        _extents = None if self.fn.__name__ in _IN_TABLES else extents_of(tensors)
        try:
            launch(self, *args, **kwargs)
        finally:
            _extents = None

    def checked_load(self: object, pointers: Any, mask: Any, *rest: object) -> Any:
        _check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: object, pointers: Any, value: object, mask: Any, *rest: object) -> Any:
        _check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    executor.__call__ = checked_launch
    # A tensor on the CPU is its own copy on the host; the interpreter would copy its whole storage onto itself.
    executor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    executor._restore_args_dev = lambda self, *args: None
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store


def extents_of(tensors: Iterable[torch.Tensor]) -> np.ndarray:
    """Return [n, 2], the first byte and the end of each tensor's elements; overlapping ones are joined."""
    joined: list[list[int]] = []
    for begin, end in sorted(_extent(tensor) for tensor in tensors if tensor.numel()):
        if joined and begin < joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return np.array(joined, np.int64).reshape(-1, 2)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check(pointers: Any, mask: Any) -> None:
    if _extents is None:
        return
    begin = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.int64)
    end = begin + (pointers.get_element_ty().primitive_bitwidth + 7) // 8
    of = np.searchsorted(_extents[:, 0], begin, side="right") - 1
    is_outside = (of < 0) | (end > _extents[of, 1]) if len(_extents) else np.ones(begin.shape, bool)
    if is_outside.any():
        raise OutsideMemoryError(f"{int(is_outside.sum())} of {is_outside.size} addresses are in no tensor")
