"""A batch's logit constraints by the compiled kernel: one call per step."""

from ctypes import byref

import numpy as np
import torch

from pagoda.kernels.constraints.batch import BatchConstraints, TokenLists
from pagoda.kernels.native.abi import LogitConstraints, Shared, TokenRuns
from pagoda.kernels.native.checks import check_logits
from pagoda.kernels.native.library import NativeLibrary


class NativeConstraints:
    """`constrain` as reference.constrain defines it, with the same bits, on `threads` threads."""

    def __init__(self, library: NativeLibrary, threads: int) -> None:
        self._library, self._threads = library, threads

    def constrain(self, logits: torch.Tensor, constraints: BatchConstraints) -> None:
        """See reference.constrain."""
        check_logits(logits)
        constraints.check(*logits.shape)
        rows = np.ascontiguousarray(constraints.rows, np.int64)
        columns = [
            np.ascontiguousarray(column, np.float32)
            for column in (constraints.repetition, constraints.frequency, constraints.presence)
        ]
        masks = constraints.allowed
        allowed = np.array([0 if mask is None else mask.ctypes.data for mask in masks], np.uint64)
        lengths = np.array([0 if mask is None else len(mask) for mask in masks], np.int64)
        record = LogitConstraints(
            rows.ctypes.data,
            len(rows),
            _runs(constraints.bias),
            constraints.bias_values.ctypes.data,
            _runs(constraints.penalized),
            constraints.output_counts.ctypes.data,
            *(column.ctypes.data for column in columns),
            allowed.ctypes.data,
            lengths.ctypes.data,
            _runs(constraints.forbidden),
        )
        self._library["constrain"](
            logits.data_ptr(), logits.stride(0), logits.shape[0], logits.shape[1], byref(record), self._threads
        )


def _runs(lists: TokenLists) -> Shared:
    return TokenRuns(lists.starts.ctypes.data, lists.ids.ctypes.data)
