"""The table of weight forms, and what is derived from it."""

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from pagoda.base.dtypes import QUANTIZATIONS
from pagoda.kernels.linear.forms import (
    BFLOAT16,
    BLOCK_TYPES,
    FP8,
    GGUF_TYPES,
    NATIVE_FORMS,
    ONLINE_FORMS,
    Q4_ZERO,
    Q6_K,
    Q8,
    Offset,
    WeightFormat,
)
from pagoda.kernels.linear.quantize import quantize_to
from pagoda.kernels.native.header import header


def test_gguf_types_are_held_in_forms_that_the_native_kernels_have() -> None:
    assert set(BLOCK_TYPES) - set(GGUF_TYPES) == {"MXFP4_PAIRS"}
    for name in GGUF_TYPES:
        assert (BLOCK_TYPES[name].num_values, BLOCK_TYPES[name].num_bytes) == GGML_QUANT_SIZES[Kind[name]]
    assert all(held.native() == held for held in GGUF_TYPES.values())


def test_every_setting_is_made_while_loading_or_of_a_checkpoint() -> None:
    assert set(QUANTIZATIONS) - set(ONLINE_FORMS) == {"gguf", "awq", "gptq", "compressed-tensors", "mxfp4"}
    weight = torch.randn(3, 64)
    for held in ONLINE_FORMS.values():
        assert (quantize_to(held, weight).dequantize() - weight).abs().max() < 0.2


def test_what_the_native_kernels_hold() -> None:
    assert WeightFormat(Q8, 64).native() == WeightFormat(Q8, 64)
    assert WeightFormat(Q4_ZERO, 128).native() == WeightFormat(Q4_ZERO, 32)
    assert WeightFormat(Q6_K, 256).native() == WeightFormat(Q6_K, 256)
    assert WeightFormat(BFLOAT16).native() == WeightFormat(BFLOAT16)
    with pytest.raises(ValueError, match=r"Q8 in groups of 48 have no native kernel \(groups: 32 or 64\)"):
        WeightFormat(Q8, 48).native()
    with pytest.raises(ValueError, match=r"FP8 .*groups: none"):
        WeightFormat(FP8).native()


def test_the_header_has_every_form() -> None:
    text = header()
    for form in NATIVE_FORMS:
        assert f"KIND_{form.name} = {form.kind}" in text
        if form.offset is not Offset.NONE:
            assert all(f"{{KIND_{form.name}, {group}}}" in text for group in form.native_groups)
