"""Registry: a lookup table by name that suggests the nearest known name for an unknown one."""

import difflib
from collections.abc import Iterator
from typing import Generic, TypeVar

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError

T = TypeVar("T")

_MOST_SHOWN = 40
_LONGEST_COMPARED = 200  # characters: comparing strings takes time proportional to the product of their lengths


def nearest(name: str, known: list[str]) -> str:
    """Return a hint for an unknown name: "; did you mean 'x'?", or known names. Empty if there are none."""
    if (close := closest(name, known)) or not known:
        return close
    shown = sorted(known)[:_MOST_SHOWN]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    return f"; known: {', '.join(shown)}{more}"


def closest(name: str, known: list[str]) -> str:
    """Return "; did you mean 'x'?" for an unknown name that is much like a known one; else nothing."""
    close = difflib.get_close_matches(name, known, n=1) if len(name) <= _LONGEST_COMPARED else []
    return f"; did you mean {close[0]!r}?" if close else ""


class Registry(Generic[T]):
    """Entries by name. `kind` is the noun used in errors."""

    def __init__(self, kind: str, entries: dict[str, T]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> T:
        """Return the entry. Raises ConfigError that suggests the nearest known name."""
        if name not in self._entries:
            raise ConfigError(f"unknown {self.kind} {abbreviate(name)}{nearest(name, list(self._entries))}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
