"""The bounds on single requests: what they refuse, how they are set, and that the documentation lists them."""

import functools
from pathlib import Path
from typing import Any

import pytest

from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.request_limits import RequestLimits, describe_limits
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.setting import describe_settings
from tests.fake_engine import byte_inputs

LIMITS = RequestLimits()
DEFAULTS = {name: default for name, default, _ in describe_limits()}


def test_the_documentation_is_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "limits.md").read_text()
    set_by_operators = {item.name for item in describe_settings(RequestLimits)}
    rows = [
        f"| `{name}`{' *' if name in set_by_operators else ''} | {default:,} | {what} |"
        for name, default, what in describe_limits()
    ]
    listed = page.partition("|---|---|---|\n")[2].partition("\n\n")[0]
    assert listed.splitlines() == rows


SAMPLING: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("stop_strings", "stop", {"stop": ["a"] * 64}, {"stop": ["a"] * 65}),
    ("stop_chars", "stop", {"stop": "a" * 8192}, {"stop": "a" * 8193}),
    ("stop_token_ids", "stop_token_ids", {"stop_token_ids": [1] * 1024}, {"stop_token_ids": [1] * 1025}),
    ("bad_words", "bad_words", {"bad_words": ["a"] * 1024}, {"bad_words": ["a"] * 1025}),
    ("bad_words_chars", "bad_words", {"bad_words": "a" * 16384}, {"bad_words": "a" * 16385}),
    (
        "bad_words_chars",
        "bad_words_token_ids",
        {"bad_words_token_ids": [[1] * 16384]},
        {"bad_words_token_ids": [[1] * 16385]},
    ),
    ("bad_words", "bad_words_token_ids", {"bad_words_token_ids": [[1]]}, {"bad_words_token_ids": [[1]] * 1025}),
    (
        "logit_bias",
        "logit_bias",
        {"logit_bias": dict.fromkeys(range(100), 1.0)},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    ),
    (
        "allowed_token_ids",
        "allowed_token_ids",
        {"allowed_token_ids": [1] * 65536},
        {"allowed_token_ids": [1] * 65537},
    ),
]


@pytest.mark.parametrize(("limit", "param", "within", "beyond"), SAMPLING)
def test_sampling_parameters_are_bounded_in_python_too(
    limit: str, param: str, within: dict[str, Any], beyond: dict[str, Any]
) -> None:
    inputs = byte_inputs()
    inputs.process("a", [1, 2], SamplingParams(**within), arrival_time_s=0.0)
    with pytest.raises(RequestError, match=rf"more than the limit of {DEFAULTS[limit]} \({limit}\)") as caught:
        inputs.process("a", [1, 2], SamplingParams(**beyond), arrival_time_s=0.0)
    assert caught.value.param == param


def test_log_probabilities_are_bounded_by_their_total_number() -> None:
    inputs = byte_inputs(RequestLimits(logprob_entries=12, prompt_logprob_entries=9))
    inputs.process("a", [1] * 3, SamplingParams(n=4, logprobs=2, prompt_logprobs=2), arrival_time_s=0.0)
    for params, prompt, name in (
        (SamplingParams(n=4, logprobs=3), [1] * 3, "logprobs"),
        (SamplingParams(prompt_logprobs=2), [1] * 4, "prompt_logprobs"),
    ):
        with pytest.raises(RequestError, match="more than the limit of") as caught:
            inputs.process("a", prompt, params, arrival_time_s=0.0)
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("given", "param"),
    [({"cache_salt": "a" * 257}, "cache_salt"), ({"request_id": "a" * 1000}, "request_id")],
)
def test_names_are_bounded(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match="name_chars") as caught:
        byte_inputs().process(given.pop("request_id", "a"), [1], SamplingParams(), arrival_time_s=0.0, **given)
    assert caught.value.param == param


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_values_of_free_form_are_bounded_in_depth_and_number() -> None:
    small = RequestLimits(json_depth=3, json_values=10)
    small.check_values({"a": nested(3), "b": {"x": [1, 2, 3]}, "c": None})
    with pytest.raises(RequestError, match="b: 4 levels of nesting"):
        small.check_values({"a": 1, "b": nested(4)})
    with pytest.raises(RequestError, match="c: 11 values"):
        small.check_values({"a": [1] * 5, "b": [1], "c": [1] * 5})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RequestError, match="json_depth"):
        small.check_values({"a": endless})


def test_at_most_the_allowed_number_of_values_is_scanned() -> None:
    class Counted(list[Any]):
        num_read = 0

        def __iter__(self) -> Any:
            Counted.num_read += len(self)
            return super().__iter__()

    with pytest.raises(RequestError, match="json_values"):
        LIMITS.check_values({"a": Counted([Counted([1] * 120_000), Counted([1] * 120_000)])})
    assert Counted.num_read == 2


def test_operators_set_bounds_by_name() -> None:
    for given in ({"inputs": 3}, '{"inputs": 3}', RequestLimits(inputs=3)):
        config = EngineConfig.from_options(request_limits=given)
        check_settings(config)
        assert config.model.request_limits == RequestLimits(inputs=3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"input": 3}, "did you mean 'inputs'"),
        ({"inputs": -1}, "at least 0"),
        ({"inputs": 3.5}, "must be an integer"),
        ({"inputs": "three"}, "is not an integer"),
        ({"inputs": True}, "must be an integer"),
        ("inputs=1", "not JSON: write --request-limits"),
        (["inputs=1"], "must map names to values"),
        (5, "must map names to values"),
    ],
)
def test_an_invalid_bound_is_an_error_of_the_settings(given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig.from_options(request_limits=given)


@pytest.mark.parametrize(
    "options",
    [{"model": "x\udcff"}, {"served_model_name": ["a", "\ud800"]}, {"api_keys": "\udcff"}, {"host": "\udcff"}],
)
def test_settings_that_are_not_valid_unicode_are_refused_by_name(options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(ConfigError, match=f"{name}.* is not valid UTF-8") as caught:
        EngineConfig.from_options(**options)
    assert ("=" in str(caught.value)) == (name != "api_keys"), "a key is a secret"


def test_a_text_is_bounded_in_bytes() -> None:
    limits = RequestLimits(text_bytes=100)
    for text in ("a" * 100, "é" * 50, "\U0001f600" * 25):
        limits.check_text(text, "prompt")
        with pytest.raises(RequestError, match="more than the limit of 100") as caught:
            limits.check_text(text + "a", "prompt")
        assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("params", "param", "is_refused"),
    [
        (SamplingParams(n=3, max_tokens=10), "max_tokens", True),
        (SamplingParams(n=2, max_tokens=10), "max_tokens", False),
        (SamplingParams(max_tokens=6, logprobs=1), "logprobs", True),
        (SamplingParams(max_tokens=5, logprobs=1), "logprobs", False),
    ],
)
def test_outputs_are_bounded_by_how_long_they_may_get(params: SamplingParams, param: str, is_refused: bool) -> None:
    inputs = byte_inputs(RequestLimits(output_tokens=20, output_logprobs=10))
    ask = functools.partial(inputs.process, "a", "prompt", params, arrival_time_s=0.0)
    if not is_refused:
        assert ask().sampling is not None
        return
    with pytest.raises(RequestError, match=f"{param}: .* `max_tokens`") as caught:
        ask()
    assert caught.value.param == param
