from pathlib import Path

import pytest

from pagoda.engine.clients import engine_link
from tests.engine.clients.hurried_clock import HurriedClock
from tests.engine.steps import Steps


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HurriedClock:
    """The clock by which engines are found to hang."""
    found = HurriedClock()
    monkeypatch.setattr(engine_link, "time", found)
    return found


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """How many steps the engines of this test may compute, as many as they want at first. It suits some modules."""
    monkeypatch.setenv("ENGINE_STEPS", str(tmp_path / "steps"))
    return Steps(tmp_path / "steps")
