"""Selection: which requests, steps and times of a recording are compared. All of it is replayed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pagoda.base.errors import ConfigError
from pagoda.engine.recording.format import Line

FILTERS = "request=r3, client=0, adapter=NAME, step=10-20 or time=1.5-3 (in seconds from the start)"
_Range = tuple[float, float]
_EVERYTHING: _Range = (0, float("inf"))


@dataclass(slots=True)
class Selection:
    """What is compared. Without a filter of a kind, all of that kind; several of one kind select either.

    steps, times: from, to.   _keys: client and handle of the selected requests that were added so far.
    """

    requests: set[str] = field(default_factory=set[str])
    clients: set[str] = field(default_factory=set[str])
    adapters: set[str] = field(default_factory=set[str])
    steps: _Range = _EVERYTHING
    times: _Range = _EVERYTHING
    begin_s: float = 0.0
    _keys: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    _labels: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, filters: Iterable[str]) -> "Selection":
        """Read filters such as "client=0" or "step=10-20". Raises ConfigError."""
        found = cls()
        words = {"request": found.requests, "client": found.clients, "adapter": found.adapters}
        for text in filters:
            name, _, value = text.partition("=")
            if name in words and value:
                words[name].add(value)
            elif name in ("step", "time"):
                setattr(found, f"{name}s", _range_of(text, value))
            else:
                raise ConfigError(f"--filter {text}: no such filter; write {FILTERS}")
        return found

    @property
    def selects_requests(self) -> bool:
        return bool(self.requests or self.clients or self.adapters)

    def add(self, line: Line) -> None:
        """Take a request that is added."""
        of_line = {line["id"]: self.requests, str(line["client_index"]): self.clients}
        of_line[line["lora"][0] if line["lora"] else ""] = self.adapters
        if all(not chosen or value in chosen for value, chosen in of_line.items()):
            self._keys.add((line["client_index"], line["handle"]))
            self._labels.add(line["id"])

    def has_request(self, label: str) -> bool:
        return label in self._labels

    def has(self, line: Line, step: int) -> bool:
        """Whether a call is compared.   step: planned last."""
        (first, last), (begin, end) = self.steps, self.times
        return first <= line.get("step", step) <= last and begin <= line["at"] - self.begin_s <= end

    def of_call(self, entries: list[Any]) -> list[Any]:
        """Return what is compared of a call's counts and events."""
        if not self.selects_requests:
            return entries
        return [one for one in entries if isinstance(one[0], str) and self._has_event(one[1])]

    def _has_event(self, fields: dict[str, Any]) -> bool:
        if "handles" in fields:
            return any((fields["client"], handle) in self._keys for handle in fields["handles"])
        return (fields.get("client"), fields.get("handle")) in self._keys


def _range_of(text: str, value: str) -> _Range:
    first, dash, last = value.partition("-")
    try:
        return (float(first or 0), float(last) if last else float("inf") if dash else float(first))
    except ValueError:
        raise ConfigError(f"--filter {text}: expected a number, or two with a dash, as in {FILTERS}") from None
