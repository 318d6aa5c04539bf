"""Registry: a lookup table by name that suggests the nearest known name for an unknown one."""

import difflib
import re
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
    if len(name) > _LONGEST_COMPARED:
        return ""
    core = _AFFIXES.sub("", name)
    close = difflib.get_close_matches(core, [_AFFIXES.sub("", one) for one in known], n=1, cutoff=_LEAST_ALIKE)
    alike = [one for one in known if close and _AFFIXES.sub("", one) == close[0]]
    best = difflib.get_close_matches(name, alike, n=1, cutoff=0.0)
    return f"; did you mean {best[0]!r}?" if best else ""


_AFFIXES = re.compile(r"^--(no-)?|(For[A-Z]\w*|LMHeadModel|Model)$")
"""What flags, and what names of architectures, have in common; alike they are if the rest is."""
_LEAST_ALIKE = 0.7


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
