"""--speculative-config: vLLM's names, and errors that say what is allowed."""

import pytest

from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import ConfigError
from pagoda.base.speculative_config import METHODS, SpeculativeConfig, resolve_speculative

VLLM = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'


def of(value: object) -> SpeculativeConfig | None:
    config = EngineConfig.from_options(speculative_config=value)
    check_settings(config)
    return resolve_speculative(config.scheduler.speculative_config)


def test_vllms_speculative_config_is_accepted_as_json_and_as_a_mapping() -> None:
    expected = SpeculativeConfig("ngram", num_speculative_tokens=5, prompt_lookup_max=4, prompt_lookup_min=2)
    assert of(VLLM) == expected
    assert (
        of({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}) == expected
    )
    suffix = of({"method": "suffix", "suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_max_cached_requests": 0})
    assert suffix is not None
    assert suffix.suffix_decoding_max_spec_factor == 2.0
    only_model = of({"model": "org/small", "num_speculative_tokens": 3})
    assert only_model is not None
    assert only_model.method == "draft_model"
    older = of({"model": "[ngram]", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2})
    assert older == expected


def test_speculation_is_off_by_default() -> None:
    assert of({}) is None


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "deepseek_mtp"])
def test_other_methods_are_refused_by_name(method: str) -> None:
    with pytest.raises(ConfigError) as error:
        of({"method": method, "num_speculative_tokens": 2})
    for word in (method, *METHODS):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"num_speculative_tokens": 5}, ("needs a method", "ngram")),
        ({"method": "ngram", "num_speculative_tokens": 0}, ("num_speculative_tokens=0", "at least 1")),
        ({"method": "ngram", "num_speculative_tokens": "five"}, ("num_speculative_tokens", "an integer")),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, ("prompt_lookup_min=5", "lower")),
        ({"method": "draft_model"}, ("draft_model needs a model",)),
        ({"method": "ngram", "model": "x"}, ("no other method takes one",)),
        ({"method": "ngram", "num_draft_layers": 3}, ("layer_skip",)),
        ({"method": "suffix", "prompt_lookup_max": 4}, ("prompt_lookup_max has no effect with method=suffix", "ngram")),
        ({"method": "ngram", "revision": "main"}, ("revision has no effect with method=ngram", "draft_model")),
        ({"method": "ngram", "lookup_max": 3}, ("lookup_max", "prompt_lookup_max")),
        ({"method": "draft_model", "model": "x", "quantization": "fp4"}, ("fp4",)),
        ("not JSON", ("speculative_config",)),
    ],
)
def test_errors_name_the_value_and_the_remedy(value: object, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        of(value)
    for word in words:
        assert word in str(error.value)
