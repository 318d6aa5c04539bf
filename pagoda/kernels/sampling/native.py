"""Sampling and log-probabilities by the compiled kernels."""

from ctypes import c_int, c_int64, c_void_p

import numpy as np
import torch

from pagoda.core.scheduler_output import LogprobColumns
from pagoda.kernels.native.library import NativeLibrary

_PTR, _LONG = c_void_p, c_int64


class NativeSampling:
    """`sample` as reference.sample defines it, and the argmax it starts from, on `threads` threads."""

    def __init__(self, library: NativeLibrary, threads: int) -> None:
        self._threads = threads
        self._best = library.functions.pagoda_best_tokens
        self._best.argtypes = (_PTR, _LONG, _LONG, _LONG, _PTR, _PTR, c_int)
        self._sample = library.functions.pagoda_sample
        self._sample.argtypes = (_PTR, _LONG, _LONG, _LONG, *(_PTR,) * 8, c_int)
        self._top_logprobs = library.functions.pagoda_top_logprobs
        self._top_logprobs.argtypes = (_PTR, _LONG, _LONG, _LONG, _PTR, _LONG, *(_PTR,) * 3, c_int)
        self._best.restype = self._sample.restype = self._top_logprobs.restype = None

    def best_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(largest logit float32 [S], its lowest id int64 [S]) of float32 [S, V]; NaN where a row has one."""
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        rows, vocab = logits.shape
        values, ids = logits.new_empty(rows), torch.empty(rows, dtype=torch.int64)
        self._best(
            logits.data_ptr(), logits.stride(0), rows, vocab, values.data_ptr(), ids.data_ptr(), self._threads
        )  # fmt: skip
        return values, ids

    def sample(
        self,
        logits: torch.Tensor,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        uniform: np.ndarray,
        best: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See reference.sample. best: (values, ids) of `best_tokens` where the caller has them already."""
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        values, ids = self.best_tokens(logits) if best is None else best
        rows, vocab = logits.shape
        columns = (
            np.ascontiguousarray(temperature, np.float32),
            np.ascontiguousarray(top_k, np.int32),
            np.ascontiguousarray(top_p, np.float32),
            np.ascontiguousarray(min_p, np.float32),
            np.ascontiguousarray(uniform, np.float64),
        )
        tokens = torch.empty(rows, dtype=torch.int64)
        self._sample(
            logits.data_ptr(), logits.stride(0), rows, vocab, values.data_ptr(), ids.data_ptr(),
            *(column.ctypes.data for column in columns), tokens.data_ptr(), self._threads,
        )  # fmt: skip
        return tokens

    def top_logprobs(self, logits: torch.Tensor, chosen: np.ndarray, k: int) -> LogprobColumns:
        """See logprobs.top_logprobs; among equals the lower id stands first."""
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        rows, vocab = logits.shape
        k = min(k, vocab)
        found = LogprobColumns(
            np.empty((rows, 1 + k), np.int32), np.empty((rows, 1 + k), np.float32), np.empty(rows, np.int32)
        )
        chosen = np.ascontiguousarray(chosen, np.int64)
        self._top_logprobs(
            logits.data_ptr(), logits.stride(0), rows, vocab, chosen.ctypes.data, k,
            found.token_ids.ctypes.data, found.logprobs.ctypes.data, found.ranks.ctypes.data, self._threads,
        )  # fmt: skip
        return found
