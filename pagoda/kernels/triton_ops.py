"""TritonOps: the Triton kernels, with torch's own where there is no faster one.

The kernels run on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1), on any device, slowly.
"""

import logging
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

import torch
from triton import knobs

from pagoda.kernels.attention.triton_attention import PagedAttention, split_tokens_of
from pagoda.kernels.attention.triton_bidirectional import bidirectional_attention
from pagoda.kernels.kv_cache.triton_blocks import TritonDeviceBlocks
from pagoda.kernels.linear import triton_forms
from pagoda.kernels.linear.library import LibraryLinear
from pagoda.kernels.linear.quantize import CodedWeight, Fp8Weight, codes_of
from pagoda.kernels.linear.triton_forms import TritonWeight
from pagoda.kernels.linear.triton_linear import TritonLinear
from pagoda.kernels.low_rank.triton_low_rank import StackedLowRank
from pagoda.kernels.moe.triton_moe import TritonMoE
from pagoda.kernels.reference_ops import implementation
from pagoda.kernels.sampling import triton_constraints, triton_logprobs, triton_sampling
from pagoda.kernels.torch_ops import TorchOps
from pagoda.kernels.triton_support import fix_interpreter
from pagoda.ops.forward import FORWARD_OPS
from pagoda.ops.tensor import LinearWeight

logger = logging.getLogger("pagoda")


def is_interpreted() -> bool:
    """Return whether the kernels run in Triton's interpreter instead of on a GPU."""
    return bool(knobs.runtime.interpret)


class TritonOps(TorchOps):
    """`Ops` on a GPU.

    max_model_len: longest sequence; it decides how the context of a decode is split.
    batch_invariant: give a row the same bits in any batch and in chunks of any length. Linear layers are then
    multiplied by our own kernel, and attention has the same tiles in decode and prefill.
    multiplies_fp8: see TritonLinear; None asks the GPU.
    """

    name = "triton"

    constrain = staticmethod(triton_constraints.constrain)
    sample = staticmethod(triton_sampling.sample)
    mask_logits = staticmethod(triton_sampling.mask_logits)
    top_logprobs = staticmethod(triton_logprobs.top_logprobs)
    make_low_rank_table = StackedLowRank
    make_device_blocks = TritonDeviceBlocks

    def __init__(
        self, max_model_len: int = 8192, batch_invariant: bool = False, multiplies_fp8: bool | None = None
    ) -> None:
        super().__init__()
        self._has_widened = False
        if multiplies_fp8 is None:
            # The first GPUs with products of 8-bit floats have 8.9.
            multiplies_fp8 = is_interpreted() or torch.cuda.get_device_capability() >= (8, 9)
        if is_interpreted():
            fix_interpreter()
        for op in FORWARD_OPS.values():
            name = f"pagoda.kernels.{op.folder}.triton_{op.folder}"
            module = import_module(name) if find_spec(name) is not None else None
            if hasattr(module, op.name):
                assert module is not None
                setattr(self, op.name, implementation(op, module))
        self.attention = PagedAttention(split_tokens_of(max_model_len), batch_invariant).attention
        self.bidirectional_attention = bidirectional_attention
        multiply = TritonLinear(batch_invariant, multiplies_fp8)
        self.linear, self.logits = multiply.linear, multiply.logits
        self.moe = TritonMoE(multiplies_fp8).moe

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return LibraryLinear(weight, bias, *weight.shape, packed=False)

    def prepare_quantized_linear(
        self, weight: CodedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None, in_pairs: bool = False
    ) -> LinearWeight:
        if isinstance(weight, Fp8Weight):
            return triton_forms.prepare(weight, bias)
        weight = codes_of(weight)
        if triton_forms.has_kernel(weight):
            return triton_forms.prepare(weight, bias)  # the kernel turns codes into floats of the dtype of its rows
        if not self._has_widened:
            why = "groups in the order of activations" if weight.input_order is not None else "8 bits and zero points"
            logger.warning(
                "weights with %s are held as floats, as they have no kernel on a GPU; quantization='int8' halves them",
                why,
            )
            self._has_widened = True
        return self.prepare_linear(weight.dequantize().to(dtype), bias)

    def best_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return triton_sampling.best_tokens(logits)

    def prepare_experts(self, experts: Sequence[LinearWeight]) -> TritonWeight:
        return triton_forms.stack(experts)
