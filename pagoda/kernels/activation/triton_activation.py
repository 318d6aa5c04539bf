"""Activations in Triton, gated and plain: elementwise, in float32, rounded once."""

import torch
import triton
import triton.language as tl

from pagoda.kernels.triton_support import jit
from pagoda.ops.declare import Activation

_BLOCK = 1024


@jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def _gelu_tanh(x):
    # (1 + tanh(u)) / 2 is sigmoid(2 u); u = sqrt(2 / pi) * (x + 0.044715 x^3).
    return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@jit
def _tanh(x):
    # exp(-2 |x|) cannot overflow, and near 0 the series keeps the digits that 1 - exp(-2 |x|) loses.
    size = tl.abs(x)
    decay = tl.exp(-2.0 * size)
    square = x * x
    small = size * (1.0 + square * (-0.3333333333 + square * (0.1333333333 - square * 0.0539682540)))
    positive = tl.where(size < 0.1, small, (1.0 - decay) / (1.0 + decay))
    return tl.where(x < 0, -positive, positive)


@jit
def _activate(x, KIND: tl.constexpr):
    if KIND == "SILU":
        return x * _sigmoid(x)
    elif KIND == "GELU":
        return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "GELU_TANH":
        return _gelu_tanh(x)
    elif KIND == "RELU":
        return tl.where(x < 0, 0.0, x)
    elif KIND == "RELU_SQUARED":
        return tl.where(x < 0, 0.0, x * x)
    elif KIND == "SIGMOID":
        return _sigmoid(x)
    elif KIND == "TANH":
        return _tanh(x)
    else:
        tl.static_assert(KIND == "IDENTITY")
        return x


@jit
def _gated(gate_up, out, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    begin = gate_up + row * 2 * width
    gate = tl.load(begin + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(begin + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (_activate(gate, KIND) * up).to(out.dtype.element_ty), mask=inside)


@jit
def _plain(x, out, num_elements, cap, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (cap * _activate(value / cap, KIND)).to(out.dtype.element_ty), mask=inside)


def activate(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """See reference.activate."""
    return _run_plain(x.contiguous(), kind)


def gate(gate_up: torch.Tensor, kind: Activation) -> torch.Tensor:
    """See reference.gate."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    _gated[(tokens, triton.cdiv(width, _BLOCK))](gate_up, out, width, kind.name, _BLOCK)
    return out


def _run_plain(x: torch.Tensor, kind: Activation, cap: float = 1.0) -> torch.Tensor:
    out = torch.empty_like(x)
    _plain[(triton.cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), cap, kind.name, _BLOCK)
    return out


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """See reference.softcap."""
    return _run_plain(x, Activation.TANH, cap)
