"""Errors that several callers get."""

import pytest

from pagoda.base.errors import RequestError, fresh


class Told(Exception):
    """Its constructor takes other arguments than it has."""

    def __init__(self, status: int, *, told: str) -> None:
        super().__init__(f"{status}: {told}")
        self.told = told


@pytest.mark.parametrize(("error", "field"), [(RequestError("no", "x"), "param"), (Told(503, told="x"), "told")])
def test_a_fresh_error_says_the_same_and_has_no_traceback(error: Exception, field: str) -> None:
    with pytest.raises(type(error)) as raised:
        raise error
    copied = fresh(raised.value)
    assert (type(copied), str(copied), getattr(copied, field)) == (type(error), str(error), "x")
    assert copied.__traceback__ is None
    assert error.__traceback__ is not None
