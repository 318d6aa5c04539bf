"""Every field of SamplingParams: what is taken, in which form it is kept, and how the rest is refused."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from pagoda.base.errors import RequestError
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams

BIG = 2**31


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "yz"]}, {"stop": ("x", "yz")}),
        ({"stop": None}, {"stop": ()}),
        ({"bad_words": ["a"]}, {"bad_words": ("a",)}),
        ({"stop_token_ids": [1, 2]}, {"stop_token_ids": (1, 2)}),
        ({"stop_token_ids": np.array([1, 2])}, {"stop_token_ids": (1, 2)}),
        ({"allowed_token_ids": range(2)}, {"allowed_token_ids": (0, 1)}),
        ({"logit_bias": {5: 1, 3: -2.5}}, {"logit_bias": ((3, -2.5), (5, 1.0))}),
        ({"logit_bias": {"5": 1}}, {"logit_bias": ((5, 1.0),)}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"temperature": 1e-9}, {"temperature": 0.0}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"max_tokens": None, "min_tokens": 500}, {"max_tokens": None, "min_tokens": 500}),
        ({"max_tokens": np.int64(5)}, {"max_tokens": 5}),
        ({"seed": -1}, {"seed": -1}),
        ({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": -1}),
        ({"bad_words_token_ids": [[1], (2, 3)]}, {"bad_words_token_ids": ((1,), (2, 3))}),
    ],
)
def test_parameters_are_normalised(given: dict[str, object], kept: dict[str, object]) -> None:
    params = SamplingParams(**given)  # type: ignore[arg-type]
    assert {name: getattr(params, name) for name in kept} == kept
    assert dataclasses.replace(params) == params
    later = SamplingParams()
    for name, value in given.items():
        setattr(later, name, value)
    assert later == params == pickle.loads(pickle.dumps(params)) == copy.deepcopy(params)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("n", 0, "at least 1"),
        ("n", 1.5, "an integer"),
        ("n", True, "an integer"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", float("nan"), "finite"),
        ("temperature", float("inf"), "finite"),
        ("temperature", "hot", "finite"),
        ("temperature", 1e39, "as float32"),
        ("top_p", 1e-46, r"\(0, 1\]"),
        ("repetition_penalty", 1e-7, r"\[1e-06, 1e\+06\]"),
        ("top_p", 0, r"\(0, 1\]"),
        ("top_p", 1.01, r"\(0, 1\]"),
        ("top_k", -2, "at least -1"),
        ("top_k", 0.5, "an integer"),
        ("min_p", -0.1, r"\[0, 1\]"),
        ("min_p", 2, r"\[0, 1\]"),
        ("seed", 2**63, r"\[-9223372036854775808, 9223372036854775807\]"),
        ("seed", 1.0, "an integer"),
        ("max_tokens", -1, "at least 0"),
        ("max_tokens", BIG, "2147483647"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 17, "max_tokens, which is 16"),
        ("stop", "", "none of them empty"),
        ("stop", ["a", ""], "none of them empty"),
        ("stop", [1], "strings"),
        ("stop", 3, "strings"),
        ("stop", b"x", "strings"),
        ("stop_token_ids", [-1], "at least 0"),
        ("stop_token_ids", "12", "token ids"),
        ("allowed_token_ids", [], "at least one"),
        ("allowed_token_ids", [0.5], "an integer"),
        ("logit_bias", {1: 101}, r"\[-100, 100\]"),
        ("logit_bias", {-1: 1}, "at least 0"),
        ("logit_bias", {"x": 1}, "an integer"),
        ("logit_bias", {"٣": 1}, "an integer"),
        ("logit_bias", {"9" * 5000: 1}, "an integer"),
        ("logit_bias", [1, 2], "mapping"),
        ("logit_bias", 5, "mapping"),
        ("bad_words", [""], "none of them empty"),
        ("bad_words_token_ids", [[]], "at least one"),
        ("presence_penalty", 2.1, r"\[-2, 2\]"),
        ("frequency_penalty", -2.1, r"\[-2, 2\]"),
        ("repetition_penalty", 0, r"\[1e-06, 1e\+06\]"),
        ("no_repeat_ngram_size", 65, r"\[0, 64\]"),
        ("forced_eos_token_id", -1, "at least 0"),
        ("logprobs", -2, "at least -1"),
        ("prompt_logprobs", 1.5, "an integer"),
        ("truncate_prompt_tokens", 0, "at least 1"),
        ("truncate_prompt_tokens", -2, "at least -1"),
        ("ignore_eos", 1, "True or False"),
        ("skip_special_tokens", None, "True or False"),
    ],
)
def test_invalid_parameters_are_refused_with_name_value_and_range(name: str, value: object, allowed: str) -> None:
    with pytest.raises(RequestError, match=allowed) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name
    assert str(caught.value).startswith(f"{name}=")


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)  # type: ignore[arg-type]


def test_unknown_parameters_are_refused_with_the_closest_name() -> None:
    with pytest.raises(TypeError, match="SamplingParams has no parameter 'max_token'; did you mean 'max_tokens'?"):
        SamplingParams(max_token=2)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="no parameter 'temprature'; did you mean 'temperature'?"):
        SamplingParams().temprature = 2  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="PoolingParams has no parameter 'dimension'; did you mean 'dimensions'?"):
        PoolingParams(dimension=2)  # type: ignore[call-arg]


def test_parameters_of_vllm_with_a_neutral_value_are_accepted() -> None:
    neutral = {"best_of": None, "extra_args": None, "flat_logprobs": False, "logits_processors": []}
    assert SamplingParams(**neutral) == SamplingParams()  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="flat_logprobs of vLLM is not supported"):
        SamplingParams(flat_logprobs=True)  # type: ignore[call-arg]


def test_fields_are_checked_when_they_are_assigned_and_together_when_they_are_used() -> None:
    params = SamplingParams(stop="x", min_tokens=3)
    other = params.clone()
    params.max_tokens = 5
    assert (params.max_tokens, other.max_tokens) == (5, 16)
    with pytest.raises(RequestError, match="top_p=3 is not allowed"):
        params.top_p = 3
    params.max_tokens = 2
    with pytest.raises(RequestError, match="min_tokens=3 is not allowed: it must be at most max_tokens"):
        params.check_together()
    pooling = PoolingParams()
    pooling.dimensions = 3
    with pytest.raises(RequestError, match="dimensions=0"):
        pooling.dimensions = 0


@pytest.mark.parametrize(("name", "value"), [("task", "guess"), ("normalize", 1), ("dimensions", 0)])
def test_pooling_params(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        PoolingParams(**{name: value})  # type: ignore[arg-type]


def test_a_models_defaults_give_way_to_what_is_given() -> None:
    defaults = {"max_tokens": 100, "min_tokens": 40, "top_k": 5}
    assert SamplingParams.of_model(defaults) == SamplingParams(max_tokens=100, min_tokens=40, top_k=5)
    assert SamplingParams.of_model(defaults, max_tokens=10).min_tokens == 10
    assert SamplingParams.of_model(defaults, max_tokens=10, min_tokens=None, top_k=None) == SamplingParams(
        max_tokens=10, min_tokens=10, top_k=5
    )
    assert SamplingParams.of_model({"min_tokens": 40}).min_tokens == 16
    assert SamplingParams.of_model(defaults, max_tokens=None, min_tokens=50).min_tokens == 50
    with pytest.raises(RequestError, match="min_tokens=50"):
        SamplingParams.of_model(defaults, max_tokens=10, min_tokens=50)
