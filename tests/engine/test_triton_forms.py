"""Whole models on the Triton kernels, in every form of weights and pages: a request's bits are its own in any schedule.

With --batch-invariant; in Triton's interpreter where there is no GPU, and therefore with tiny models and few requests.
That the values are right is tested with the kernels.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from benchmarks.make_random_model import SHAPES, make
from tests.device_under_test import DeviceUnderTest
from tests.engine.test_batch_invariance import GREEDY, KINDS, VOCAB, check, reference, watched_requests
from tests.models.gguf_writer import write_gguf
from tests.models.packed_writer import Packing, write_packed

FORMS: dict[str, tuple[str, dict[str, object]]] = {
    "fp16": ("llama", {"dtype": "float16"}),
    "fp8": ("llama", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "int8": ("llama", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    "gguf": ("gguf", {"quantization": "gguf"}),
    "awq": ("awq", {}),
    "gptq": ("gptq", {}),
    "experts": ("experts", {}),
    "experts, fp8": ("experts", {"quantization": "fp8"}),
    "experts, int8": ("experts", {"quantization": "int8"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name -> a model, made when it is asked for."""

    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        make(SHAPES["tiny-moe" if name == "experts" else "tiny"], folder / "floats", seed=1)
        if name == "gguf":
            floats = AutoModelForCausalLM.from_pretrained(folder / "floats", dtype=torch.float32)
            write_gguf(floats, folder / "model.gguf", GGMLQuantizationType.Q4_0)
            return folder / "model.gguf"
        if name not in ("awq", "gptq"):
            return folder / "floats"
        packing = Packing("awq", group=32) if name == "awq" else Packing("gptq", group=64, symmetric=True)
        write_packed(folder / "floats", packing, folder / "packed", folder / "values")
        return folder / "packed"

    return made


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_schedules(
    form: str,
    models: Callable[[str], Path],
    without_triton: Callable[[str], NoReturn],
    device_under_test: DeviceUnderTest,
) -> None:
    """The first without drafts, the second with drafts of the model itself."""
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    name, settings = FORMS[form]
    model = models(name)
    options = {**device_under_test.options, "kernels": "triton", "batch_invariant": True, "dtype": "bfloat16"}
    options |= settings
    watched = [replace(each, params=replace(GREEDY, max_tokens=3)) for each in watched_requests(VOCAB, [2, 37, 70])]
    watched[0] = replace(watched[0], params=replace(KINDS[2], max_tokens=3))
    expected = reference(model, watched, options)
    check(model, watched, expected, options, range(950, 951), VOCAB, most_watched=3, most_fillers=2)
    counts = check(
        model, watched, expected, options, range(951, 952), VOCAB, most_watched=3, most_fillers=2, draft_model=model
    )
    assert counts["drafted"] > 0
