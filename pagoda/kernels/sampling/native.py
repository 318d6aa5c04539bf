"""Logit constraints, sampling and log-probabilities by the compiled kernels."""

from ctypes import byref

import numpy as np
import torch

from pagoda.base.errors import InvariantBroken
from pagoda.kernels.native.abi import LogitConstraints, Shared, TokenRuns
from pagoda.kernels.native.checks import check_logits
from pagoda.kernels.native.library import NativeLibrary
from pagoda.kernels.sampling.batch import BatchConstraints, DrawParams, TokenLists
from pagoda.kernels.sampling.reference import LogprobTensors, without_nonfinite


class NativeSampling:
    """SamplingOps as reference.py defines them, with its bits where it has them, on `threads` threads."""

    def __init__(self, library: NativeLibrary, threads: int) -> None:
        self._library, self._threads = library, threads

    def _run(self, name: str, logits: torch.Tensor, *args: object) -> None:
        """Call a kernel; arrays among its arguments stay alive until it returns."""
        check_logits(logits)
        pointers = [
            of.ctypes.data if isinstance(of, np.ndarray) else of.data_ptr() if isinstance(of, torch.Tensor) else of
            for of in args
        ]
        self._library[name](logits.data_ptr(), logits.stride(0), *logits.shape, *pointers, self._threads)

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
        self._run("constrain", logits, byref(record))

    def best_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (largest logit float32 [S], its lowest id int64 [S]) of float32 [S, V]; NaN for a row with a NaN."""
        values, ids = logits.new_empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
        self._run("best_tokens", logits, values, ids)
        return values, ids

    def sample(
        self, logits: torch.Tensor, params: DrawParams, best: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """See reference.sample. best: (values, ids) of `best_tokens`, if the caller has them already."""
        check_logits(logits)
        logits, (values, ids) = without_nonfinite(logits, self.best_tokens(logits) if best is None else best)
        tokens = torch.empty(len(logits), dtype=torch.int64)
        self._run("sample", logits, values, ids, *params.columns, tokens)
        return tokens

    def process_logits(
        self, logits: torch.Tensor, params: DrawParams, best: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        """See reference.process_logits. best: as for `sample`."""
        values, _ = self.best_tokens(logits) if best is None else best
        self._run("process_logits", logits, values, *params.columns[:4])

    def mask_logits(self, logits: torch.Tensor, draws: np.ndarray, bits: np.ndarray) -> None:
        """See reference.mask_logits."""
        rows, vocab = logits.shape
        words = -(-vocab // 32)
        draws = np.ascontiguousarray(draws, np.int64)
        bits = np.ascontiguousarray(bits, np.int32)
        if bits.shape != (len(draws), words) or (len(draws) and not 0 <= draws.min() <= draws.max() < rows):
            raise InvariantBroken(
                f"mask_logits: {len(draws)} masks for {rows} rows of {vocab} logits must be [{len(draws)}, {words}], "
                f"not {bits.shape}, for rows below {rows}, not {draws.tolist()}"
            )
        self._run("mask_logits", logits, draws, len(draws), bits)

    def top_logprobs(self, logits: torch.Tensor, chosen: torch.Tensor, k: int) -> LogprobTensors:
        """See reference.top_logprobs; among equals the lower id comes first."""
        rows, vocab = logits.shape
        k = min(k, vocab)
        token_ids, ranks = torch.empty((rows, 1 + k), dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
        values = torch.empty((rows, 1 + k))
        ids = np.ascontiguousarray(chosen.numpy(), np.int64)
        if len(ids) != rows or (rows and (ids.min() < 0 or ids.max() >= vocab)):
            raise InvariantBroken(f"top_logprobs: chosen must be {rows} token ids below {vocab}, not {ids.tolist()}")
        self._run("top_logprobs", logits, ids, k, token_ids, values, ranks)
        return LogprobTensors(token_ids, values, ranks)


def _runs(lists: TokenLists) -> Shared:
    return TokenRuns(lists.starts.ctypes.data, lists.ids.ctypes.data)
