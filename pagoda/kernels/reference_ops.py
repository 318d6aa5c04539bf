"""ReferenceOps: every op as its reference defines it."""

from collections.abc import Sequence

import numpy as np
import torch

from pagoda.kernels.activation import reference as activation
from pagoda.kernels.attention import reference as attention
from pagoda.kernels.embedding import reference as embedding
from pagoda.kernels.kv_cache import reference as kv_cache
from pagoda.kernels.linear import reference as linear
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.kernels.moe import reference as moe
from pagoda.kernels.norm import reference as norm
from pagoda.kernels.rotary import reference as rotary
from pagoda.kernels.rows import reference as rows
from pagoda.kernels.sampling import logprobs
from pagoda.kernels.sampling import reference as sampling
from pagoda.ops.tensor import ExpertWeights, LinearWeight


class ReferenceOps:
    """The definition of `Ops`: plain torch on any device, slow and obvious."""

    name = "reference"

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return linear.PlainLinear(weight, bias)

    def prepare_quantized_linear(
        self, weight: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> LinearWeight:
        return linear.PlainLinear(weight.dequantize().to(dtype), bias)

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, linear.PlainLinear)
        return linear.linear(x, weight)

    def logits(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, linear.PlainLinear)
        return linear.logits(x, weight)

    def prepare_experts(self, experts: Sequence[LinearWeight]) -> ExpertWeights:
        return moe.ExpertList(tuple(experts))

    moe = staticmethod(moe.moe)
    embedding = staticmethod(embedding.embedding)
    rms_norm = staticmethod(norm.rms_norm)
    add_rms_norm = staticmethod(norm.add_rms_norm)
    add = staticmethod(rows.add)
    rotary = staticmethod(rotary.rotary)
    write_kv = staticmethod(kv_cache.write_kv)
    rotary_write_kv = staticmethod(kv_cache.rotary_write_kv)
    copy_blocks = staticmethod(kv_cache.copy_blocks)
    attention = staticmethod(attention.attention)
    silu_mul = staticmethod(activation.silu_mul)
    gelu_tanh_mul = staticmethod(activation.gelu_tanh_mul)
    split_qkv = staticmethod(rows.split_qkv)
    select_rows = staticmethod(rows.select_rows)
    softcap = staticmethod(activation.softcap)

    top_logprobs = staticmethod(logprobs.top_logprobs)

    def best_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = logits.max(-1)
        return best.values, best.indices

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
        del best  # the definition finds it itself
        return sampling.sample(logits, temperature, top_k, top_p, min_p, uniform)
