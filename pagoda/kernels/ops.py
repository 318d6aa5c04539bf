"""The interface of the kernels, one protocol per user: loading prepares weights, a forward computes, the worker moves
cache blocks and samples.

`ForwardOps` does not need torch and is declared in `pagoda.ops.forward`; the other protocols are for packages that use
torch. `kernels.select.select_ops` chooses an implementation of all of them.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from pagoda.kernels.kv_cache.device_blocks import DeviceBlocks
from pagoda.kernels.linear.quantize import CodedWeight
from pagoda.kernels.low_rank.table import FillableLowRank
from pagoda.kernels.sampling.batch import BatchConstraints, DrawParams
from pagoda.kernels.sampling.reference import LogprobTensors
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import ExpertWeights, LinearWeight, Tensor


class PrepareOps(Protocol):
    """Prepare loaded weights for `linear`, `logits` and `moe`; used once, while loading.

    packs_weights: weights are copied into a layout of the kernels' own, where `table_of` finds rows of codes, too. Else
        they may be kept, so they must not be views of a file.
    """

    packs_weights: bool

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        """Pack weight [out, in] in compute dtype, bias [out] or None. May keep or drop the original."""
        ...

    def prepare_stacked(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None, in_pairs: bool = False
    ) -> LinearWeight:
        """As `prepare_linear` of the parts, stacked row-wise; kernels that pack do not need them to be adjacent.

        in_pairs: the first half of the outputs are gates of the second; the native kernels put the memory of both where
        they are multiplied.
        """
        ...

    def prepare_quantized_linear(
        self, weight: CodedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None, in_pairs: bool = False
    ) -> LinearWeight:
        """Pack codes and scales. in_pairs: see prepare_stacked.

        The native kernels multiply codes with an input that they quantise by the same groups, Triton's turn them into
        floats tile by tile, and the others into a matrix of `dtype`, the compute dtype; Triton's do so with codes that
        they have no kernel for (forms.NOT_FOR_TRITON, and those in an order of their own). The input of 8-bit floats is
        quantised by the reference, and by Triton's kernels where the GPU multiplies such. Raises ConfigError for codes
        that the kernels cannot multiply.
        """
        ...

    def table_of(self, weight: LinearWeight) -> Tensor | None:
        """Return the rows of a prepared weight as a table for `embedding`, in the same memory.

        None where `embedding` cannot read rows of the prepared form.
        """
        ...

    def prepare_experts(self, experts: Sequence[LinearWeight]) -> ExpertWeights:
        """The prepared weights of all experts, of one shape and form, as one argument of `moe`. Triton's kernels
        take none with a bias.

        Give each expert to `prepare_linear` or `prepare_quantized_linear` first: so only one is loaded at a time.
        """
        ...

    def make_low_rank_table(
        self, num_slots: int, out_features: int, in_features: int, dtype: torch.dtype
    ) -> FillableLowRank:
        """Return an empty table of a layer's adapters. dtype: the compute dtype, in which weights are kept."""
        ...


class CacheOps(Protocol):
    """Moving whole blocks of the KV cache, and reading keys where a kernel's layout is not known."""

    def make_device_blocks(self, planes: Sequence[torch.Tensor]) -> DeviceBlocks:
        """Return what moves the blocks of these planes, [num_blocks, elements per block] each."""
        ...

    def plain_keys(self, pages: torch.Tensor) -> torch.Tensor:
        """Return pages of K, [n, K, block_size, D], with each element where the shape says that it is."""
        ...


class SamplingOps(Protocol):
    """From logits to tokens. The definitions are in `kernels/sampling/reference.py`."""

    def constrain(self, logits: torch.Tensor, constraints: BatchConstraints) -> None:
        """Apply bias, penalties, allowed and forbidden tokens to float32 [S, V] in place."""
        ...

    def best_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [S, V] -> (largest logit float32 [S], an id int64 [S] that has it); NaN for a row with a NaN."""
        ...

    def sample(self, logits: torch.Tensor, params: DrawParams, best: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """One token per row of float32 [S, V], int64 [S]; best: what `best_tokens` gave for these logits.

        A row whose best logit is not finite gets any token.
        """
        ...

    def process_logits(self, logits: torch.Tensor, params: DrawParams, best: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Divide float32 [S, V] by the temperatures and set what `sample` cannot choose to -inf, in place.

        best: what `best_tokens` gave for these logits. Greedy rows, and those whose best logit is not finite, stay.
        """
        ...

    def mask_logits(self, logits: torch.Tensor, draws: np.ndarray, bits: np.ndarray) -> None:
        """Set logits that a mask forbids to -inf, in place, in rows `draws` (int64 [m]) of float32 [S, V].

        bits: int32 [m, ceil(V / 32)], one bit per token, lowest first: 1 where the logit stays.
        """
        ...

    def top_logprobs(self, logits: torch.Tensor, chosen: torch.Tensor, k: int) -> LogprobTensors:
        """Log-softmax of float32 [S, V] at the chosen ids, int64 [S], and at the k best; ranks of the chosen."""
        ...


class Ops(ForwardOps, PrepareOps, CacheOps, SamplingOps, Protocol):
    """All ops that a device provides."""

    name: str
