"""Which codes weights become: a GGUF's types when they are kept as they are, and floats in 8 bits. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

GROUP = 32  # values along a row that share a scale
INT8_GROUP = 64  # the same where pagoda itself quantises


@dataclass(frozen=True, slots=True)
class CodeForm:
    """bits: that a code takes.   has_minima: values are scale * code + minimum instead of scale * (code - zero)."""

    bits: int
    has_minima: bool = False


EIGHT_BITS = CodeForm(8)
_KEPT = {
    GGMLQuantizationType.Q4_0: CodeForm(4),
    GGMLQuantizationType.Q4_1: CodeForm(4, has_minima=True),
    GGMLQuantizationType.Q4_K: CodeForm(4, has_minima=True),
    GGMLQuantizationType.Q5_0: EIGHT_BITS,
    GGMLQuantizationType.Q8_0: EIGHT_BITS,
}


def code_form(kind: GGMLQuantizationType) -> CodeForm | None:
    """The codes of a type; None for plain floats. Types without a kernel of their own become 8 bits."""
    if kind not in GGML_QUANT_SIZES or GGML_QUANT_SIZES[kind][0] == 1:
        return None
    return _KEPT.get(kind, EIGHT_BITS)


def stacked_form(kinds: Sequence[GGMLQuantizationType]) -> CodeForm | None:
    """The codes of a weight whose parts are stored so: 8 bits if they differ, None if any part is plain floats."""
    forms = {code_form(kind) for kind in kinds}
    if None in forms:
        return None
    return forms.pop() if len(forms) == 1 else EIGHT_BITS
