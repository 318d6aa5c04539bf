"""A made-up CUDA card, as far as torch.cuda is asked about it: it has memory, and computes nothing."""

from types import SimpleNamespace

import pytest
import torch


class FakeCuda:
    """One card.   total, free, allocated, peak, held: bytes; free is the
    driver's, held what torch can neither use nor give back.   calls: functions that were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int = 80 << 30, capability: tuple[int, int] = (9, 0)):
        self.total = self.free = total
        self.allocated = self.peak = self.held = 0
        self.calls: list[str] = []
        known = SimpleNamespace(
            name="NVIDIA Made-Up 80GB", total_memory=total, major=capability[0], minor=capability[1],
            multi_processor_count=132,
        )  # fmt: skip
        answers: dict[str, object] = {
            "is_available": True,
            "device_count": 1,
            "get_device_name": known.name,
            "get_device_properties": known,
            "get_device_capability": capability,
            "set_device": None,
            "synchronize": None,
            "empty_cache": None,
            "current_device": 0,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, self._called(name, answer))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (self.free, self.total))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: self.allocated)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: self.allocated + self.held)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset_peak)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: SimpleNamespace(device=device))
        monkeypatch.setattr(torch.version, "cuda", "13.0")

    def allocate(self, num_bytes: int) -> None:
        """Take memory, or give it back."""
        self.allocated += num_bytes
        self.free -= num_bytes
        self.peak = max(self.peak, self.allocated)

    def hold(self, num_bytes: int) -> None:
        """Take memory as a CUDA graph does."""
        self.held += num_bytes
        self.free -= num_bytes

    def _called(self, name: str, answer: object):
        def called(*_: object, **__: object) -> object:
            self.calls.append(name)
            return answer

        return called

    def _reset_peak(self, device: object = None) -> None:
        self.peak = self.allocated
