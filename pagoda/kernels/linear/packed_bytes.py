"""Bytes of prepared weights, computed without loading them.

Those of the native kernels are defined by packed.h, Triton's by triton_forms.
"""

from enum import Enum

from pagoda.kernels.native.abi import PANEL


class Form(Enum):
    """The elements of a weight: floats of the compute dtype, or codes with scales per group (FP8: per output)."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    Q8 = "q8"
    Q6 = "q6"
    Q4 = "q4"
    Q4_MIN = "q4_min"
    Q4_ZERO = "q4_zero"
    FP8 = "fp8"


_FLOAT_BYTES = {Form.FLOAT32: 4, Form.BFLOAT16: 2, Form.FLOAT16: 2}
_SMALL_GROUP = 32  # of the native kernels' 4 bits, and of the 8 bits that they make of Q6


def packed_bytes(form: Form, out_features: int, in_features: int, group: int = 0) -> int:
    """Return the bytes of a weight's panels.   group: elements that share a scale, for the quantised forms."""
    return -(-out_features // PANEL) * _panel_bytes(form, in_features, group)


def packed_bias_bytes(out_features: int) -> int:
    """Return the bytes of a bias: float32, padded to whole panels."""
    return -(-out_features // PANEL) * PANEL * 4


def _panel_bytes(form: Form, in_features: int, group: int) -> int:
    match form:
        case Form.FLOAT32:
            return in_features * PANEL * 4
        case Form.BFLOAT16:
            return -(-in_features // 2) * PANEL * 4
        case Form.FLOAT16:
            return in_features * PANEL * 2
        case Form.Q8:
            record = 2 * PANEL + group * PANEL
        case Form.Q6:
            return _panel_bytes(Form.Q8, in_features, _SMALL_GROUP)
        case Form.Q4:
            group = _SMALL_GROUP
            record = 2 * PANEL + group * PANEL // 2
        case Form.Q4_MIN | Form.Q4_ZERO:
            group = _SMALL_GROUP
            record = 4 * PANEL + group * PANEL // 2
        case Form.FP8:
            raise ValueError("the native kernels have no 8-bit floats")
    return -(-in_features // group) * record


def tiled_bytes(form: Form, out_features: int, in_features: int, group: int = 0) -> int:
    """Return the bytes of a weight for Triton's kernels: its floats, or its codes, scales and minima or zero points."""
    if form in _FLOAT_BYTES:
        return out_features * in_features * _FLOAT_BYTES[form]
    if form is Form.FP8:
        return out_features * (in_features + 4)
    bits, scale_bytes, groups_per_record = {
        Form.Q8: (8, 2, max(1, 64 // max(1, group))),
        Form.Q6: (6, 2, 4),
        Form.Q4: (4, 2, 2),
        Form.Q4_MIN: (4, 4, 2),
        Form.Q4_ZERO: (4, 3, 2),
    }[form]
    groups = -(-in_features // (group * groups_per_record)) * groups_per_record
    return out_features * groups * (group * bits // 8 + scale_bytes)
