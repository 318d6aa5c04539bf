import pytest

from pagoda.engine.clients import engine_link
from tests.engine.clients.hurried_clock import HurriedClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HurriedClock:
    """The clock by which engines are found to hang."""
    found = HurriedClock()
    monkeypatch.setattr(engine_link, "time", found)
    return found
