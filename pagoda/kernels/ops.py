"""Ops: the whole vocabulary a model may use, as one object given to it.

Models call nothing of torch in `forward` but what stands here, so that the same declarative model runs on the reference
kernels, on the native CPU ones, on Triton, or is recorded once and replayed; `kernels.select.select_ops` picks one.

Shapes: T tokens, H query heads, K KV heads, D head size, S rows that want logits. x may be float32, bfloat16 or
float16; sums are in float32. Unless it says "in place", an op returns a new tensor. Every op gives each row the same
bits whatever rows stand beside it (the native kernels; the torch versions as far as torch's own library does).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pagoda.core.scheduler_output import LogprobColumns
from pagoda.kernels.batch import AttentionMetadata
from pagoda.kernels.linear.quantize import QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class KVLayer:
    """One layer's paged cache: `k` and `v`, [num_blocks + 1, K, block_size, D]; block 0 is the null block.

    Only kernels look inside; everything else moves whole blocks along dimension 0.
    k_scale, v_scale: float32 [num_blocks + 1, K, block_size], for an int8 cache, else None.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class LinearWeight(Protocol):
    """A weight [out_features, in_features] prepared for `linear` (packed, quantised, ...), with its bias."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...


class SamplingOps(Protocol):
    """From logits to tokens: what the sampler uses. The definition is `kernels/sampling/reference.py`."""

    def best_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [S, V] -> (largest logit float32 [S], an id int64 [S] that has it); NaN where a row has one."""
        ...

    def sample(
        self,
        logits: torch.Tensor,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        uniform: np.ndarray,
        best: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """One token a row, int64 [S]; best: what `best_tokens` gave for these logits. The rest as reference.sample."""
        ...

    def top_logprobs(self, logits: torch.Tensor, chosen: np.ndarray, k: int) -> LogprobColumns:
        """Log-softmax of float32 [S, V] at the chosen ids (int [S]) and at the k best, with the chosen ones' ranks."""
        ...


class Ops(SamplingOps, Protocol):
    """See the module's page. Each method's reference is `kernels/<op>/reference.py`."""

    name: str

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        """Pack once at load. weight [out, in] in compute dtype, bias [out] or None. May keep or drop the original."""
        ...

    def prepare_quantized_linear(
        self, weight: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> LinearWeight:
        """Pack codes and scales once at load. The native kernels multiply them as they are, and quantise their input by
        the same groups; the others dequantise to `dtype`, the compute dtype.
        """
        ...

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """[T, in] -> [T, out] = x @ weight.T + bias, in x's dtype."""
        ...

    def logits(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """[S, in] -> float32 [S, vocab]."""
        ...

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """int32 [T], [vocab, hidden] -> [T, hidden]; scale is rounded to the table's dtype first (Gemma does)."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
        """x [..., D] / rms(x) * weight [D], over the last dimension; unit_offset: * (1 + weight)."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual); the sum is rounded to x's dtype before it is normed."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor: ...

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q [T, H, D] and k [T, K, D] (NeoX halves). cos, sin float32 [max_position, D / 2]."""
        ...

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVLayer, metadata: AttentionMetadata) -> None:
        """Put k, v [T, K, D] at slot_mapping."""
        ...

    def rotary_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """`rotary` and `write_kv` in one: writes the rotated k and v, returns the rotated q."""
        ...

    def copy_blocks(self, cache: KVLayer, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) of one layer, one pair after the other."""
        ...

    def attention(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Causal paged attention, q [T, H, D] -> [T, H * D].

        window: the last `window` tokens, itself included (0: all). softcap: scores become
        softcap * tanh(score / softcap) (0: off). Reads the pages in place.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 I] (gate then up) -> silu(gate) * up, [T, I]."""
        ...

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 I] (gate then up) -> gelu_tanh(gate) * up, [T, I]."""
        ...

    def split_qkv(
        self, qkv: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, (H + 2 K) D] -> q [T, H, D], k [T, K, D], v [T, K, D]; views where possible."""
        ...

    def select_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """[T, hidden], int64 [S] -> [S, hidden]."""
        ...

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(x / cap)."""
        ...
