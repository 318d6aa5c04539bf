"""What tests of engines share."""

import pytest

from tests.device_under_test import DeviceUnderTest
from tests.engine import random_schedules


@pytest.fixture
def on_the_device(device_under_test: DeviceUnderTest, monkeypatch: pytest.MonkeyPatch) -> DeviceUnderTest:
    """Engines of random schedules are on the device that is tested, where their bits are held to each other, too."""
    if device_under_test.device.type != "cpu":
        for name, value in device_under_test.options.items():
            monkeypatch.setitem(random_schedules.ENGINE, name, value)
    return device_under_test
