"""Whole models on the Triton kernels, in every form of weights and pages: a request's bits are its own in any schedule.

With --batch-invariant; in Triton's interpreter where there is no GPU, and therefore with tiny models and few requests.
That the values are right is tested with the kernels.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from benchmarks.make_random_model import SHAPES, make
from pagoda.base.sampling_params import SamplingParams
from tests.device_under_test import DeviceUnderTest
from tests.engine.lora_adapters import EVERYTHING, write_adapter
from tests.engine.random_schedules import Script, Watched, differences, make_engine, play
from tests.engine.test_batch_invariance import GREEDY, KINDS, LORA, VOCAB, check, reference, watched_requests
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


def options_on(device_under_test: DeviceUnderTest) -> dict[str, object]:
    return {**device_under_test.options, "kernels": "triton", "batch_invariant": True, "dtype": "bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_small_pool(
    form: str,
    models: Callable[[str], Path],
    tmp_path: Path,
    without_triton: Callable[[str], NoReturn],
    device_under_test: DeviceUnderTest,
) -> None:
    """Prompts in chunks, preempted and begun again, and found in the prefix cache; with an adapter and without."""
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    name, settings = FORMS[form]
    model = models(name)
    options = {**options_on(device_under_test), **settings}
    adapter = None
    if name == "llama":
        adapter = write_adapter(tmp_path, model, 5, 1, EVERYTHING)
        options |= LORA
    head, *tails = (np.random.default_rng(4).integers(3, VOCAB, length).tolist() for length in (16, 5, 6))
    params = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True)
    watched = [Watched(head + tail, params, 10 * i) for i, tail in enumerate(tails)]
    watched.append(Watched(tails[0], params, 100, adapter))
    expected = reference(model, watched, options)
    counts: Counter[str] = Counter()
    pool = {"max_model_len": 48, "block_size": 8, "num_blocks": 7, "max_num_batched_tokens": 11, "max_num_seqs": 4}
    core, trace = make_engine(model, counts, {**options, **pool})
    play(core, trace, Script(watched, [0, 0, 2], {}, set()))
    stats = core.make_stats()
    core.shutdown()
    assert not differences(expected, trace, watched)
    assert counts["chunks"] > 3
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0


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
    options = {**options_on(device_under_test), **settings}
    watched = [replace(each, params=replace(GREEDY, max_tokens=3)) for each in watched_requests(VOCAB, [2, 37, 70])]
    watched[0] = replace(watched[0], params=replace(KINDS[2], max_tokens=3))
    expected = reference(model, watched, options)
    check(model, watched, expected, options, range(950, 951), VOCAB, most_watched=3, most_fillers=2)
    counts = check(
        model, watched, expected, options, range(954, 955), VOCAB, most_watched=3, most_fillers=2, draft_model=model
    )
    assert counts["drafted"] > 0
