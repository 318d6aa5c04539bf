"""Weights and activations in 8-bit floats (e4m3): one scale per output feature and one per token.

These functions are the definition of the form; kernels of the GPU multiply the codes as they are.
"""

from dataclasses import dataclass

import torch

LARGEST = 448.0
"""The largest number of float8_e4m3fn."""

_PIECE_ROWS = 4096  # rows quantised at a time, so that the float32 copy stays small


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """codes: float8_e4m3fn [out, in].   scales: float32 [out]. Values are scale * code."""

    codes: torch.Tensor
    scales: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in]."""
        return self.codes.float() * self.scales.unsqueeze(-1)


def quantize_fp8(weight: torch.Tensor) -> Fp8Weight:
    """Quantise weight [out, in], any float dtype: the largest magnitude of a row becomes 448, ties to even."""
    pieces = [quantize_vectors(piece) for piece in weight.split(_PIECE_ROWS)]
    return Fp8Weight(torch.cat([codes for codes, _ in pieces]), torch.cat([scales for _, scales in pieces]))


def quantize_vectors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D] -> (float8_e4m3fn [..., D], float32 scales [...]); a vector with NaN has the scale NaN."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1)
    # Divide by tensors, and tensors: with a number torch may multiply with the reciprocal, which rounds twice.
    limit = torch.full_like(largest, LARGEST)
    inverse = torch.where(largest > 0, limit / largest, 0)
    codes = (wide * inverse.unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    return codes.to(torch.float8_e4m3fn), largest / limit
