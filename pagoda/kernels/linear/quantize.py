"""Quantised weights before packing: codes and scales, made from floats or read from a checkpoint.

These functions define the values of the forms of codes; `dequantize` returns them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from pagoda.kernels.linear.forms import FP8, Q8, Offset, WeightForm, WeightFormat

LARGEST_FP8 = 448.0
"""The largest number of float8_e4m3fn."""

_BY_ROW = ("codes", "scales", "offsets", "units")  # of QuantizedWeight
_PIECE_VALUES = 1 << 18  # quantised at a time, so that float32 copies stay in the caches


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """Codes in groups along `in` that share a scale. Kernels keep scales and minima in float16, zero points exactly.

    codes: uint8 [out, in padded to `group`].   scales: float16 or float32 [out, groups], powers of two if the form
    keeps exponents.
    offsets: as `form.offset` says, minima like scales, zero points uint8 or int16 [out, groups], or None.
    units: float16 [out, groups, 1], or with minima 2: what integer scales and minima are multiplied with, in forms that
        have them: those are int8 or uint8 [out, sub-groups]. None in other forms.
    input_order: int32 [in padded], which element of the input each code is multiplied with, -1 for padding; None if it
        is its own. `in_features` counts the elements of the input.
    """

    form: WeightForm
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    in_features: int
    group: int
    input_order: torch.Tensor | None = None
    units: torch.Tensor | None = None

    @property
    def held_as(self) -> WeightFormat:
        return WeightFormat(self.form, self.group)

    @property
    def out_features(self) -> int:
        return len(self.codes)

    def each(self, made: Callable[[torch.Tensor], torch.Tensor]) -> "QuantizedWeight":
        """Return the weight with what `made` makes of its codes and of all that they have by output feature."""
        parts = {name: None if (of := getattr(self, name)) is None else made(of) for name in _BY_ROW}
        return replace(self, **parts)

    def to(self, device: torch.device) -> "QuantizedWeight":
        return self.each(lambda of: of.to(device))

    def rows(self, first: int, end: int) -> "QuantizedWeight":
        """Return output features first .. end - 1."""
        return self.each(lambda of: of[first:end])

    def reordered(self, head_order: tuple[int, ...] | None) -> "QuantizedWeight":
        """Return the output features of each head in another order; None: the weight itself."""
        if head_order is None:
            return self
        return self.each(lambda of: of.unflatten(0, (-1, len(head_order)))[:, head_order].flatten(0, 1))

    def in_groups_of(self, group: int) -> "QuantizedWeight":
        """Return the same values in smaller groups, which divide its own."""
        groups = -(-self.in_features // group)
        scales, offsets = (
            None if of is None else of.repeat_interleave(self.group // group, dim=1)[:, :groups]
            for of in (self.scales, self.offsets)
        )
        assert scales is not None
        return replace(self, codes=self.codes[:, : groups * group], scales=scales, offsets=offsets, group=group)

    def for_triton(self) -> "QuantizedWeight":
        """Return the same values in the form that Triton's kernels hold (see WeightForm.for_triton)."""
        form = self.form.for_triton
        if form is self.form:
            return self
        if self.units is not None:
            scales, offsets = self.factors()
            offsets = None if offsets is None else offsets.half()
            group, units = self.form.sub_group, None
            return replace(self, form=form, scales=scales.half(), offsets=offsets, group=group, units=units)
        if self.form.levels:
            levels = torch.tensor(self.form.levels, device=self.codes.device).add_(form.middle).to(torch.uint8)
            return replace(self, form=form, codes=levels[self.codes.int()])
        return replace(self, form=form, codes=self.codes + (form.middle - self.form.middle))

    def factors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scales and offsets, float32 [out, (sub-)groups]."""
        scales, offsets = self.scales.float(), None if self.offsets is None else self.offsets.float()
        if self.units is None:
            return scales, offsets
        units = self.units.float().repeat_interleave(self.group // self.form.sub_group, dim=1)
        return scales * units[..., 0], None if offsets is None else offsets * units[..., 1]

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in]."""
        if self.form.levels:
            return self.for_triton().dequantize()
        of_groups, offsets_of_groups = self.factors()
        codes, scales = self.codes.float().unflatten(1, (of_groups.shape[1], -1)), of_groups.unsqueeze(-1)
        offsets = self.form.middle if offsets_of_groups is None else offsets_of_groups.unsqueeze(-1)
        values = codes * scales + offsets if self.form.offset is Offset.MINIMUM else (codes - offsets) * scales
        values = values.flatten(1)
        if self.input_order is None:
            return values[:, : self.in_features]
        stored = self.input_order >= 0
        out = torch.empty(len(values), self.in_features, device=values.device)
        out[:, self.input_order[stored].long()] = values[:, stored]
        return out


def scales_of(exponents: torch.Tensor) -> torch.Tensor:
    """Return the scales of uint8 exponents (WeightForm.scale_bits = 8): float32, exact."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 128)


def exponents_of(scales: torch.Tensor) -> torch.Tensor:
    """Return the uint8 exponents of float32 scales that are powers of two."""
    return (torch.frexp(scales).exponent + 127).to(torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """8-bit floats (e4m3). Values are scale * code.

    codes: float8_e4m3fn [out, in].   scales: float32 [out].
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in]."""
        return self.codes.float() * self.scales.unsqueeze(-1)


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """Rows of blocks as a file has them.

    type: its name in BLOCK_TYPES.   data: uint8 [rows, bytes of a row], rows any distance apart, in the mapped file.
    head_order: in which the rows of a head are taken; None: as they are.
    exponents: uint8 [rows, blocks] of MXFP4_PAIRS, in the mapped file (loading/mxfp4.py).
    """

    type: str
    data: np.ndarray
    head_order: tuple[int, ...] | None = None
    exponents: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True, eq=False)
class CodeRows:
    """Rows of codes as AWQ, GPTQ and compressed-tensors have them (loading/packed_codes.py), in the mapped file.

    codes: int32 words of `bits` along `in`, of AWQ along `out`, [out, in]; or int8, code - 128.
    scales: floats [out, groups].   zeros: int32 words along `out` or int8, code - 128, [out, groups]; `zero` is added
        to them; None if the form has none. Dimensions of 1 are shared by all.
    groups: int32, the column of scales and zeros of each 32 elements that are held.
    first, rows: which rows are meant.   head_order: in which those of a head are taken; None: as they are.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    zero: int
    bits: int
    is_awq: bool
    groups: torch.Tensor
    first: int
    rows: int
    head_order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A weight in a file whose pieces are held alike: the native kernels pack it straight from there.

    pieces: stacked row-wise, of one class.   read: returns their codes, for other kernels.
    input_order: see QuantizedWeight.
    """

    held_as: WeightFormat
    pieces: Sequence[BlockRows | CodeRows]
    in_features: int
    read: Callable[[], QuantizedWeight]
    input_order: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return sum(piece.rows for piece in self.pieces)


UnstackedWeight: TypeAlias = QuantizedWeight | BlockWeight


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeight:
    """Weights that are stacked row-wise and held in different forms."""

    parts: tuple[UnstackedWeight, ...]


CodedWeight: TypeAlias = UnstackedWeight | Fp8Weight | StackedWeight


def stack(parts: Sequence[UnstackedWeight], device: torch.device) -> CodedWeight:
    """Stack parts row-wise, on `device`; neighbours in one form become one."""
    runs: list[list[UnstackedWeight]] = []
    for part in parts:
        if runs and _is_alike(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    joined = tuple(_join(run, device) for run in runs)
    return joined[0] if len(joined) == 1 else StackedWeight(joined)


def _is_alike(one: UnstackedWeight, other: UnstackedWeight) -> bool:
    if one.held_as != other.held_as or type(one) is not type(other):
        return False
    if one.input_order is None or other.input_order is None:
        return one.input_order is other.input_order
    return torch.equal(one.input_order, other.input_order)


def _join(parts: Sequence[UnstackedWeight], device: torch.device) -> UnstackedWeight:
    def read() -> QuantizedWeight:
        return stack_codes([codes_of(part) for part in parts]).to(device)

    first, pieces = parts[0], [piece for part in parts if isinstance(part, BlockWeight) for piece in part.pieces]
    return BlockWeight(first.held_as, pieces, first.in_features, read, first.input_order) if pieces else read()


def codes_of(weight: UnstackedWeight | StackedWeight) -> QuantizedWeight:
    """Return a weight's codes in memory; of parts of different forms, 8 bits in groups of 32."""
    match weight:
        case StackedWeight(parts):
            return stack_codes([codes_of(part) for part in parts])
        case BlockWeight():
            return weight.read()
        case QuantizedWeight():
            return weight


def values_of(weight: CodedWeight) -> torch.Tensor:
    """Return the values that codes stand for, float32 [out, in]."""
    match weight:
        case StackedWeight(parts):
            return torch.cat([values_of(part) for part in parts])
        case BlockWeight():
            return weight.read().dequantize()
        case QuantizedWeight() | Fp8Weight():
            return weight.dequantize()


def stack_codes(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Stack parts row-wise; 8 bits in groups of 32 if they are of different forms."""
    if not all(_is_alike(parts[0], part) for part in parts):
        parts = [part.for_triton() for part in parts]
        fits = [part.held_as == WeightFormat(Q8, 32) and part.input_order is None for part in parts]
        parts = [part if fit else quantize(part.dequantize(), 32) for part, fit in zip(parts, fits, strict=True)]
    of_all = {name: [of for part in parts if (of := getattr(part, name)) is not None] for name in _BY_ROW}
    return replace(parts[0], **{name: torch.cat(of) if of else None for name, of in of_all.items()})


def quantize_to(held: WeightFormat, weight: torch.Tensor) -> CodedWeight:
    """Quantise weight [out, in], any float dtype, to one of forms.ONLINE_FORMS."""
    return quantize_fp8(weight) if held.form is FP8 else quantize(weight, held.group)


def quantize(weight: torch.Tensor, group: int = 64) -> QuantizedWeight:
    """Quantise weight [out, in], any float dtype, to 8 bits: symmetric, one scale per `group` elements along `in`."""
    pieces = [_quantize(piece, group) for piece in _in_pieces(weight)]
    codes = torch.cat([codes for codes, _ in pieces])
    scales = torch.cat([scales for _, scales in pieces])
    return QuantizedWeight(Q8, codes, scales, None, weight.shape[1], group)


def _in_pieces(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return weight.split(max(1, _PIECE_VALUES // weight.shape[1]))


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


def quantize_fp8(weight: torch.Tensor) -> Fp8Weight:
    """Quantise weight [out, in], any float dtype: the largest magnitude of a row becomes 448, ties to even."""
    pieces = [quantize_vectors(piece) for piece in _in_pieces(weight)]
    return Fp8Weight(torch.cat([codes for codes, _ in pieces]), torch.cat([scales for _, scales in pieces]))


def quantize_vectors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D] -> (float8_e4m3fn [..., D], float32 scales [...]); a vector with NaN has the scale NaN."""
    values, scales = scaled_to(x, LARGEST_FP8)
    return values.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn), scales


def scaled_to(x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [..., D] with `limit` for the largest magnitude of each vector, but for rounding; and the scales [...].

    float32. A vector of zeros has the scale 0.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1)
    # Divide by tensors, and tensors: with a number torch may multiply with the reciprocal, which rounds twice.
    limits = torch.full_like(largest, limit)
    inverse = torch.where(largest > 0, limits / largest, 0)
    return wide * inverse.unsqueeze(-1), largest / limits
