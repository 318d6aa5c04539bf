"""TorchOps: decent speed wherever torch runs, with nothing to compile."""

from collections.abc import Sequence

import torch

from pagoda.kernels.activation import reference as activation
from pagoda.kernels.attention import chunked
from pagoda.kernels.embedding import reference as embedding
from pagoda.kernels.kv_cache import reference as kv_cache
from pagoda.kernels.linear import library
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.kernels.moe import by_expert
from pagoda.kernels.moe.reference import ExpertList
from pagoda.kernels.norm import reference as norm
from pagoda.kernels.rotary import reference as rotary
from pagoda.kernels.rows import reference as rows
from pagoda.kernels.sampling import batched as sampling
from pagoda.kernels.sampling import logprobs
from pagoda.ops.tensor import ExpertWeights, LinearWeight


class TorchOps:
    """`Ops` on torch's own kernels. Where the reference is already a few whole-tensor calls, it is the fast version."""

    name = "torch"

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return library.prepare(weight, bias)

    def prepare_quantized_linear(
        self, weight: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> LinearWeight:
        return library.prepare(weight.dequantize().to(dtype), bias)

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, library.LibraryLinear)
        return library.linear(x, weight)

    def logits(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, library.LibraryLinear)
        return library.logits(x, weight)

    def prepare_experts(self, experts: Sequence[LinearWeight]) -> ExpertWeights:
        return ExpertList(tuple(experts))

    def moe(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        top_k: int,
        renormalize: bool,
    ) -> torch.Tensor:
        assert isinstance(gate_up, ExpertList)
        assert isinstance(down, ExpertList)
        return by_expert.moe(x, router_logits, gate_up, down, top_k, renormalize, self.linear, self.silu_mul)

    embedding = staticmethod(embedding.embedding)
    rms_norm = staticmethod(norm.rms_norm)
    add_rms_norm = staticmethod(norm.add_rms_norm)
    add = staticmethod(rows.add)
    rotary = staticmethod(rotary.rotary)
    write_kv = staticmethod(kv_cache.write_kv)
    rotary_write_kv = staticmethod(kv_cache.rotary_write_kv)
    copy_blocks = staticmethod(kv_cache.copy_blocks)
    attention = staticmethod(chunked.attention)
    silu_mul = staticmethod(activation.silu_mul)
    gelu_tanh_mul = staticmethod(activation.gelu_tanh_mul)
    split_qkv = staticmethod(rows.split_qkv)
    select_rows = staticmethod(rows.select_rows)
    softcap = staticmethod(activation.softcap)
    sample = staticmethod(sampling.sample)

    top_logprobs = staticmethod(logprobs.top_logprobs)

    def best_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = logits.max(-1)
        return best.values, best.indices
