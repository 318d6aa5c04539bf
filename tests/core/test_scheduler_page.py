"""Run the examples of docs/internals/scheduler.md: a preemption, a copy-on-write and a prefix hit."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "scheduler.md"


def test_the_page_shows_what_happens() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert result.attempted > 20
    assert result.failed == 0
