"""A name -> thing table whose misses say what was meant."""

import difflib
from collections.abc import Iterator
from typing import Generic, TypeVar

from pagoda.base.errors import ConfigError

T = TypeVar("T")


def nearest(name: str, known: list[str]) -> str:
    """A hint for an unknown name: "; did you mean 'x'?", or the names there are. Empty when there are none."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""


class Registry(Generic[T]):
    """Things by name. `kind` is the noun used in errors."""

    def __init__(self, kind: str, entries: dict[str, T]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> T:
        """The entry, or ConfigError that names the nearest known one."""
        if name not in self._entries:
            raise ConfigError(f"unknown {self.kind} {name!r}{nearest(name, list(self._entries))}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
