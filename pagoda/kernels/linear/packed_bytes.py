"""Bytes of weights packed for the native kernels, computed without loading them. The definition is packed.h."""

from enum import Enum

from pagoda.kernels.native.abi import PANEL


class Form(Enum):
    """The elements of a packed weight: floats of the compute dtype, or codes with scales per group."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    Q8 = "q8"
    Q4 = "q4"
    Q4_MIN = "q4_min"


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
        case Form.Q4:
            record = 2 * PANEL + group * PANEL // 2
        case Form.Q4_MIN:
            record = 4 * PANEL + group * PANEL // 2
    return -(-in_features // group) * record
