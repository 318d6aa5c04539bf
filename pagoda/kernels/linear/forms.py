"""The table of weight forms: how the elements of a linear weight are held in memory. Does not import torch.

What else knows forms takes them from here: loading (which form the codes of a checkpoint have), the estimate of memory,
the header of the native kernels (native/abi.py), and what packs weights for them (packed.py) and for Triton's kernels
(triton_forms.py). To add one: its entry here, what reads its codes from a checkpoint (of a GGUF type its entry in
BLOCK_TYPES), what multiplies it, if no kernel does yet, and a test.
"""

from dataclasses import dataclass
from enum import IntEnum
from math import gcd

PANEL = 32
"""Output columns of a weight for the native kernels that are stored together."""

K_SEGMENT = 2048
"""Elements along K that are summed in one chain: linear/reference.py."""

X_GROUP = 128
"""Elements of an input that share a scale, for forms with integer scales: more cost accuracy, fewer time."""


class Offset(IntEnum):
    """What makes a value of a code, besides the scale of its group."""

    NONE = 0  # floats
    MIDDLE = 1  # scale * (code - 2^(bits - 1))
    MINIMUM = 2  # scale * code + minimum: a float16 per group
    ZERO_POINT = 3  # scale * (code - zero point): an integer per group, 0 to 2^bits


@dataclass(frozen=True, slots=True)
class WeightForm:
    """One form.

    bits: per element.   offset: of codes; NONE for floats.
    native_groups: how many elements along a row the native kernels take together: those that share a scale; of floats,
        those that are stored side by side. Empty where they have no such kernel.
    levels: what each code stands for, int8, in place of the code less the middle.
    scale_bits: 16 for a float16; 8 for e, where the scale is 2^(e - 128).
    sub_group: of a group that has one float16, or with minima two: how many elements share an integer of `scale_bits`
        that counts it, and a minimum of as many bits. 0: a group shares its scale.
    """

    name: str
    bits: int
    offset: Offset = Offset.NONE
    native_groups: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()
    scale_bits: int = 16
    sub_group: int = 0

    @property
    def kind(self) -> int:
        """Return the number by which the native kernels know the form."""
        return NATIVE_FORMS.index(self)

    @property
    def middle(self) -> int:
        """Return what Offset.MIDDLE takes off: a code; of levels, what makes all of them positive."""
        if self.offset is not Offset.MIDDLE:
            return 0
        return max(map(abs, self.levels)) if self.levels else 1 << (self.bits - 1)

    @property
    def for_triton(self) -> "WeightForm":
        """Return the form in which Triton's kernels hold the values: 8 bits in place of levels and of 5, 4 of 2.

        Integer scales become float16.
        """
        return _FOR_TRITON.get(self, self)

    @property
    def groups_per_record(self) -> int:
        """Return how many groups Triton's kernels have side by side, so that their codes fill whole bytes."""
        return 8 // gcd(8, self.bits)

    def record_bytes(self, group: int) -> int:
        """Return the bytes of a group and of what it shares, for the native kernels: see packed.h."""
        if self.sub_group:
            of_each = 2 if self.offset is Offset.MINIMUM else 1
            return of_each * (2 + group // self.sub_group * self.scale_bits // 8) + group * self.bits // 8
        scale, second = self.scale_bits // 8, 0 if self.offset is Offset.MIDDLE else 2
        return (0 if self.offset is Offset.NONE else scale + second) + group * self.bits // 8


FLOAT32 = WeightForm("F32", 32, native_groups=(1,))
BFLOAT16 = WeightForm("BF16", 16, native_groups=(2,))
FLOAT16 = WeightForm("F16", 16, native_groups=(1,))
Q8 = WeightForm("Q8", 8, Offset.MIDDLE, (32, 64))
Q8_MIN = WeightForm("Q8_MIN", 8, Offset.MINIMUM, (32,))
Q8_ZERO = WeightForm("Q8_ZERO", 8, Offset.ZERO_POINT, (32,))
Q6 = WeightForm("Q6", 6, Offset.MIDDLE)
Q6_K = WeightForm("Q6_K", 6, Offset.MIDDLE, (256,), scale_bits=8, sub_group=16)
Q5_K = WeightForm("Q5_K", 5, Offset.MINIMUM, (256,), scale_bits=6, sub_group=32)
Q4_K = WeightForm("Q4_K", 4, Offset.MINIMUM, (256,), scale_bits=6, sub_group=32)
"""Scales of Q6_K are signed, those of the others and their minima are not."""
Q5 = WeightForm("Q5", 5, Offset.MIDDLE, (32,))
Q5_MIN = WeightForm("Q5_MIN", 5, Offset.MINIMUM, (32,))
Q4 = WeightForm("Q4", 4, Offset.MIDDLE, (16, 32))
Q4_MIN = WeightForm("Q4_MIN", 4, Offset.MINIMUM, (16, 32))
Q4_ZERO = WeightForm("Q4_ZERO", 4, Offset.ZERO_POINT, (32,))
Q2_MIN = WeightForm("Q2_MIN", 2, Offset.MINIMUM, (16,))
_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4 = WeightForm("IQ4", 4, Offset.MIDDLE, (32,), _IQ4_LEVELS)
"""Codes of levels that are closer together near 0, as of GGUF's IQ4_NL."""
_E2M1_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12)
MXFP4 = WeightForm("MXFP4", 4, Offset.MIDDLE, (32,), (*_E2M1_LEVELS, *(-level for level in _E2M1_LEVELS)), 8)
"""4-bit floats (e2m1), of which the levels are twice the values, and an exponent (e8m0) per group."""
FP8 = WeightForm("FP8", 8)
"""8-bit floats (e4m3) with a float32 scale per output feature."""

_FOR_TRITON = {
    Q5: Q8,
    Q5_MIN: Q8_MIN,
    Q2_MIN: Q4_MIN,
    IQ4: Q8,
    MXFP4: Q8,
    Q4_K: Q4_MIN,
    Q5_K: Q8_MIN,
    Q6_K: Q6,
}
_FLOATS = (FLOAT32, BFLOAT16, FLOAT16)
_EIGHTS = (Q8, Q8_MIN, Q8_ZERO, FP8)
FORMS = (*_FLOATS, *_EIGHTS, Q6, Q6_K, Q5, Q5_MIN, Q5_K, Q4, Q4_MIN, Q4_ZERO, Q4_K, Q2_MIN, IQ4, MXFP4)
NATIVE_FORMS = tuple(form for form in FORMS if form.native_groups)
NOT_FOR_TRITON = (Q8_ZERO,)
"""Codes that Triton's kernels do not multiply: such weights are held as floats of the compute dtype in their place."""
FLOATS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}
"""By the name of the compute dtype."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A form and its group: elements along a row that share a scale; 0 for floats, and for a scale per output."""

    form: WeightForm
    group: int = 0

    @property
    def x_group(self) -> int:
        """Return how many elements of an input share a scale when the native kernels quantise it."""
        return X_GROUP if self.form.sub_group else self.group

    def native(self) -> "WeightFormat":
        """Return what the native kernels hold in its place: the same, or smaller groups.

        Raises ValueError where they have nothing.
        """
        form = self.form
        if form in FLOATS.values():
            return self
        fitting = [group for group in form.native_groups if self.group and self.group % group == 0]
        if not fitting:
            known = " or ".join(map(str, form.native_groups)) or "none"
            raise ValueError(
                f"weights of the form {form.name} in groups of {self.group} have no native kernel (groups: {known})"
            )
        return WeightFormat(form, max(fitting))

    def packed_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of a weight's panels, for the native kernels."""
        held = self.native()
        group = held.group or held.form.native_groups[0]
        return -(-out_features // PANEL) * PANEL * -(-in_features // group) * held.form.record_bytes(group)

    def triton_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of a weight for Triton's kernels: its floats, or codes, scales and what is per group."""
        form, group = self.form.for_triton, self.form.sub_group or self.group
        if form in FLOATS.values():
            return out_features * in_features * form.bits // 8
        if not group:
            return out_features * (in_features + 4)
        per_group = {Offset.MIDDLE: 2, Offset.MINIMUM: 4, Offset.ZERO_POINT: 3}[form.offset]
        padded = max(form.groups_per_record, 64 // group)  # see triton_forms
        groups = -(-in_features // (group * padded)) * padded
        return out_features * groups * (group * form.bits // 8 + per_group)


def packed_bias_bytes(out_features: int) -> int:
    """Return the bytes of a bias for the native kernels: float32, padded to whole panels."""
    return -(-out_features // PANEL) * PANEL * 4


ONLINE_FORMS = {"int8": WeightFormat(Q8, 64), "fp8": WeightFormat(FP8)}
"""What the setting `quantization` makes of a matrix of floats; its other words keep the codes of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Plane:
    """Some bits of the numbers of a block: from the byte `at` on, `bits` of each, 1, 2, 4 or 8.

    run: numbers that are in adjacent bytes: first the lowest bits of `run` bytes, then the next bits of the same bytes,
        and after the highest ones the next `run` bytes.
    """

    at: int
    bits: int
    run: int


@dataclass(frozen=True, slots=True)
class BlockType:
    """A block of a file: `num_values` that are next to each other in a row, in `num_bytes`.

    held: how its codes are held.   codes: their bits, lowest first.   added: to each code, modulo 256, to be as those
        of the form are.
    scale, minimum: the byte at which a float16 begins, or an exponent of 8 bits; None if the block has none. Of forms
        with integer scales they are what those count and, negative, what their minima count.
    integers: the byte at which the integers of such a form begin.
    factors: a number per group, less `factor_middle`, that is multiplied with `scale`; then, if there is a `minimum`,
        one per group that its negative is multiplied with. () where groups have all of `scale` and `minimum`.
    """

    held: WeightFormat
    num_values: int
    num_bytes: int
    codes: tuple[Plane, ...]
    scale: int | None = 0
    minimum: int | None = None
    added: int = 0
    integers: int = 0
    factors: tuple[Plane, ...] = ()
    factor_middle: int = 0


BLOCK_TYPES = {
    "Q8_0": BlockType(WeightFormat(Q8, 32), 32, 34, (Plane(2, 8, 32),), added=128),  # which are signed
    "Q5_0": BlockType(WeightFormat(Q5, 32), 32, 22, (Plane(6, 4, 16), Plane(2, 1, 1))),
    "IQ4_NL": BlockType(WeightFormat(IQ4, 32), 32, 18, (Plane(2, 4, 16),)),
    "IQ4_XS": BlockType(
        *(WeightFormat(IQ4, 32), 256, 136, (Plane(8, 4, 16),)),
        factors=(Plane(4, 4, 1), Plane(2, 2, 1)),
        factor_middle=32,
    ),
    "Q5_1": BlockType(WeightFormat(Q5_MIN, 32), 32, 24, (Plane(8, 4, 16), Plane(4, 1, 1)), minimum=2),
    "Q5_K": BlockType(WeightFormat(Q5_K, 256), 256, 176, (Plane(48, 4, 32), Plane(16, 1, 32)), minimum=2, integers=4),
    "Q6_K": BlockType(WeightFormat(Q6_K, 256), 256, 210, (Plane(0, 4, 64), Plane(128, 2, 32)), scale=208, integers=192),
    "Q3_K": BlockType(
        *(WeightFormat(Q4, 16), 256, 110, (Plane(32, 2, 32), Plane(0, 1, 32))),
        scale=108,
        added=4,
        factors=(Plane(96, 4, 8), Plane(104, 2, 4)),
        factor_middle=32,
    ),
    "Q4_0": BlockType(WeightFormat(Q4, 32), 32, 18, (Plane(2, 4, 16),)),
    "Q2_K": BlockType(
        WeightFormat(Q2_MIN, 16), 256, 84, (Plane(16, 2, 32),), scale=80, minimum=82, factors=(Plane(0, 4, 16),)
    ),
    "Q4_1": BlockType(WeightFormat(Q4_MIN, 32), 32, 20, (Plane(4, 4, 16),), minimum=2),
    "Q4_K": BlockType(WeightFormat(Q4_K, 256), 256, 144, (Plane(16, 4, 32),), minimum=2, integers=4),
    "MXFP4": BlockType(WeightFormat(MXFP4, 32), 32, 17, (Plane(1, 4, 16),)),
    "MXFP4_PAIRS": BlockType(WeightFormat(MXFP4, 32), 32, 16, (Plane(0, 4, 1),), scale=None),
}
"""By the names of GGUF types, which the gguf package defines; MXFP4_PAIRS are GPT-OSS's, whose exponents are elsewhere
(loading/mxfp4.py). The native kernels know a type by its place here.
"""

GGUF_TYPES = {name: block.held for name, block in BLOCK_TYPES.items() if block.scale is not None}
"""How the codes of GGUF types are held: with as many bits as they have, or more. Tensors of other types are floats.

Scales that are products (of Q2_K, Q3_K and IQ4_XS) are rounded to float16, nothing else is rounded.
"""
