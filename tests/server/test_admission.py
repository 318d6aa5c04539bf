"""Limits: what is over them is refused at once, with the reason; what leaves makes room."""

import contextlib
from collections.abc import Iterator

import pytest

from pagoda.base.errors import RequestError
from pagoda.server.admission import Admission, AdmissionLimits, Refusal


@contextlib.contextmanager
def admitted(admission: Admission, requests: int, tokens: int, key: str = "") -> Iterator[None]:
    with admission.admit(requests, key), admission.admit_tokens(tokens):
        yield


def refuse(admission: Admission, requests: int, tokens: int, key: str = "") -> str:
    with pytest.raises(Refusal) as caught, admitted(admission, requests, tokens, key):
        pass
    assert caught.value.retry_after_s >= 1
    return caught.value.reason


def test_requests_and_tokens_are_bounded_and_released() -> None:
    admission = Admission(AdmissionLimits(max_requests=2, max_tokens=100))
    with admitted(admission, 1, 60, ""):
        assert refuse(admission, 1, 41) == "tokens"
        with admitted(admission, 1, 40, ""):
            assert refuse(admission, 1, 0) == "requests"
        assert (admission.num_requests, admission.num_tokens) == (1, 60)
    assert (admission.num_requests, admission.num_tokens) == (0, 0)


def test_a_place_is_released_after_an_error() -> None:
    admission = Admission(AdmissionLimits(max_requests=1))
    with pytest.raises(KeyError), admitted(admission, 1, 1, ""):
        raise KeyError
    with admitted(admission, 1, 1, ""):
        pass


def test_one_request_larger_than_the_token_limit_runs_alone() -> None:
    admission = Admission(AdmissionLimits(max_tokens=10))
    with admitted(admission, 1, 50, ""):
        assert refuse(admission, 1, 1) == "tokens"


def test_keys_have_their_own_limits() -> None:
    admission = Admission(AdmissionLimits(max_requests_per_key=1))
    with admitted(admission, 1, 1, "a"):
        assert refuse(admission, 1, 1, "a") == "key_concurrency"
        with admitted(admission, 1, 1, "b"):
            pass


def test_the_rate_limit_of_a_key_names_the_time_to_retry() -> None:
    admission = Admission(AdmissionLimits(requests_per_minute_per_key=2))
    for _ in range(2):
        with admitted(admission, 1, 1, "a"):
            pass
    with pytest.raises(Refusal) as caught, admitted(admission, 1, 1, "a"):
        pass
    assert caught.value.reason == "key_rate"
    assert 1 <= caught.value.retry_after_s <= 30
    with admitted(admission, 1, 1, "b"):
        pass


@pytest.mark.parametrize("limit", ["max_requests", "max_requests_per_key", "requests_per_minute_per_key"])
def test_a_request_that_can_never_fit_is_an_error_not_a_refusal(limit: str) -> None:
    admission = Admission(AdmissionLimits(**{limit: 3}))
    with admission.admit(3, ""), pytest.raises(RequestError, match="4 outputs"), admission.admit(4, ""):
        pass
