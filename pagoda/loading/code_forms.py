"""The codes of quantised weights: a GGUF's own types, or 8 bits made from floats. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

GROUP = 32  # values along a row that share a scale, in most forms
INT8_GROUP = 64  # the same, for weights that pagoda quantises


@dataclass(frozen=True, slots=True)
class CodeForm:
    """How values are stored.

    bits: per code.   has_minima: values are scale * code + minimum instead of scale * (code - zero).
    group: values along a row that share a scale.
    """

    bits: int
    has_minima: bool = False
    group: int = GROUP


EIGHT_BITS = CodeForm(8)
_KEPT = {
    GGMLQuantizationType.Q4_0: CodeForm(4),
    GGMLQuantizationType.Q4_1: CodeForm(4, has_minima=True),
    GGMLQuantizationType.Q4_K: CodeForm(4, has_minima=True),
    GGMLQuantizationType.Q5_0: EIGHT_BITS,
    GGMLQuantizationType.Q8_0: EIGHT_BITS,
    GGMLQuantizationType.Q6_K: CodeForm(6, group=16),
}


def code_form(kind: GGMLQuantizationType) -> CodeForm | None:
    """Return the codes of a type; None for plain floats. Types without a form of their own become 8 bits."""
    if kind not in GGML_QUANT_SIZES or GGML_QUANT_SIZES[kind][0] == 1:
        return None
    return _KEPT.get(kind, EIGHT_BITS)


def stacked_form(kinds: Sequence[GGMLQuantizationType]) -> CodeForm | None:
    """Return the codes of a weight with parts of these types: 8 bits if they differ, None if any part is floats."""
    forms = {code_form(kind) for kind in kinds}
    if None in forms:
        return None
    return forms.pop() if len(forms) == 1 else EIGHT_BITS
