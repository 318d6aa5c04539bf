"""Quantised weights before packing: codes and scales, made from floats or read from a checkpoint.

These functions define the values of the packed kinds; `dequantize` returns them.
"""

from dataclasses import dataclass, replace

import torch

_PIECE_ROWS = 4096  # rows quantised at a time, so that the float32 copy stays small


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """codes: uint8 [out, in padded to `group`].   scales, minima: float16 or float32 [out, groups].

    Values are scale * (code - zero), or with minima scale * code + minimum.   bits: 8, 6 or 4, all a code takes.
    zeros: of 4-bit codes without minima, uint8 [out, groups], the zero of each group, 0 to 16; None if all are the
        middle of the codes.
    Kernels keep scales and minima in float16, and zeros exactly.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    in_features: int
    group: int
    bits: int
    zeros: torch.Tensor | None = None

    @property
    def zero(self) -> int:
        """The zero of all codes, where there are no `zeros`."""
        return 0 if self.minima is not None else 1 << (self.bits - 1)

    def to(self, device: torch.device) -> "QuantizedWeight":
        scales, minima, zeros = (None if of is None else of.to(device) for of in (self.scales, self.minima, self.zeros))
        assert scales is not None
        return replace(self, codes=self.codes.to(device), scales=scales, minima=minima, zeros=zeros)

    def rows(self, first: int, end: int) -> "QuantizedWeight":
        """Return output features first .. end - 1."""
        scales, minima, zeros = (None if of is None else of[first:end] for of in (self.scales, self.minima, self.zeros))
        assert scales is not None
        return replace(self, codes=self.codes[first:end], scales=scales, minima=minima, zeros=zeros)

    def in_groups_of(self, group: int) -> "QuantizedWeight":
        """Return the same values in smaller groups, which divide its own."""
        groups = -(-self.in_features // group)
        scales, minima, zeros = (
            None if of is None else of.repeat_interleave(self.group // group, dim=1)[:, :groups]
            for of in (self.scales, self.minima, self.zeros)
        )
        assert scales is not None
        codes = self.codes[:, : groups * group]
        return replace(self, codes=codes, scales=scales, minima=minima, zeros=zeros, group=group)

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in]."""
        codes = self.codes.float().unflatten(1, (-1, self.group))
        zero = self.zero if self.zeros is None else self.zeros.float().unsqueeze(-1)
        values = (codes - zero) * self.scales.float().unsqueeze(-1)
        if self.minima is not None:
            values += self.minima.float().unsqueeze(-1)
        return values.flatten(1)[:, : self.in_features]


def quantize(weight: torch.Tensor, group: int = 64) -> QuantizedWeight:
    """Quantise weight [out, in], any float dtype, to 8 bits: symmetric, one scale per `group` elements along `in`."""
    pieces = [_quantize(piece, group) for piece in weight.split(_PIECE_ROWS)]
    codes = torch.cat([codes for codes, _ in pieces])
    scales = torch.cat([scales for _, scales in pieces])
    return QuantizedWeight(codes, scales, None, weight.shape[1], group, 8)


def _quantize(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    padding = -weight.shape[1] % group
    groups = torch.nn.functional.pad(weight.float(), (0, padding)).unflatten(1, (-1, group))
    scales = (groups.abs().amax(-1) / 127).half()
    inverse = torch.where(scales > 0, 1 / scales.float(), 0)
    # Round the scale first, so that the codes compensate for its rounding.
    codes = (groups * inverse.unsqueeze(-1)).round_().clamp_(-127, 127).add_(128)
    return codes.flatten(1).to(torch.uint8), scales


def quantize_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the input as the kernels do: int8 [T, in padded] and float32 scales [T, groups]."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    limit = groups.abs().amax(-1)
    # Divide a tensor: for a Python number torch multiplies with the reciprocal, which rounds twice.
    inverse = torch.where(limit > 0, torch.tensor(127.0) / limit, 0)
    return (groups * inverse.unsqueeze(-1)).round_().flatten(1).to(torch.int8), limit / 127
