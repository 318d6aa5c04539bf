"""What weights and KV caches of fewer bits cost in perplexity: the text is in the repository."""

import functools

import pytest

from benchmarks.perplexity import TEXT, perplexity
from pagoda.llm import LLM
from tests.cached_models import cached_model
from tests.device_under_test import DeviceUnderTest


@functools.cache
def measured(on: DeviceUnderTest, **options: object) -> float:
    path = str(cached_model("smollm2-135m").path)
    settings = {**on.options, "max_model_len": 513, "num_blocks": 200, "enable_prefix_caching": False, **options}
    with LLM(path, **settings) as llm:
        value, count = perplexity(llm, TEXT.read_text(encoding="utf-8"))
    assert count > 2000
    return value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"dtype": "float32"}, 0.01),
        ({"dtype": "bfloat16", "quantization": "int8"}, 0.01),
        ({"dtype": "bfloat16", "quantization": "gguf"}, 0.005),
        ({"dtype": "bfloat16", "kv_cache_dtype": "int8"}, 0.01),
        ({"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"}, 0.01),
    ],
    ids=["fp32", "int8", "gguf", "int8 KV", "int8 and int8 KV"],
)
def test_near_bf16(options: dict[str, object], most: float, device_under_test: DeviceUnderTest) -> None:
    assert measured(device_under_test, **options) == pytest.approx(
        measured(device_under_test, dtype="bfloat16"), rel=most
    )
