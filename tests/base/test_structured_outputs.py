"""StructuredOutputsParams: what is taken, and how the rest is refused."""

from typing import Any

import pytest

from pagoda.base.errors import RequestError
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    ("given", "kind", "kept"),
    [
        ({"json": {"type": "object"}}, "json", '{"type": "object"}'),
        ({"json": '{"type": "object"}'}, "json", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["a", "b", "a"]}, "choice", ("a", "b")),
        ({"grammar": "start: A"}, "grammar", "start: A"),
        ({"json_object": True}, "json_object", True),
        ({"json": None, "json_object": False, "regex": "x"}, "regex", "x"),
    ],
)
def test_parameters_are_normalised(given: dict[str, Any], kind: str, kept: object) -> None:
    params = StructuredOutputsParams(**given)
    assert (params.kind, getattr(params, kind)) == (kind, kept)
    hash(params)
    assert SamplingParams(structured_outputs=given).structured_outputs == params  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "exactly one of json, regex"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"regex": ""}, "not empty"),
        ({"regex": 5}, "a string"),
        ({"choice": []}, "at least one string"),
        ({"choice": "ab"}, "a list of strings"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"json": 5}, "a JSON object"),
        ({"json": {"a": {1, 2}}}, "cannot be written as JSON"),
        ({"json_object": "yes"}, "true or false"),
        ({"regex": "a", "disable_any_whitespace": 1}, "true or false"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"regexp": "a"}, "did you mean 'regex'"),
    ],
)
def test_the_rest_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        SamplingParams(structured_outputs=given)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="mapping of its fields"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]
