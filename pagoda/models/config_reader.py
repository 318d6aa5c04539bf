"""ConfigReader: read a checkpoint's settings with their types checked; errors name what is missing or invalid."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError


class _Required:
    """The default of a required setting."""


REQUIRED: Final = _Required()
_MOST: Final = 1 << 26
_MOST_LAYERS: Final = 4096
_MOST_IDS: Final = 1024
_LARGEST: Final = 1e18


class ConfigReader:
    """Settings by name. `origin` (a file, or a section of one) is in every error message.

    Each reader returns the value, its default when absent or null, and raises ConfigError when it is of another
    type or absent without a default.
    """

    def __init__(self, values: Mapping[str, object], origin: str) -> None:
        self.values = values
        self.origin = origin

    def integer(self, key: str, default: int | _Required = REQUIRED, most: int = _MOST) -> int:
        """Return an integer from 1 to `most`, so that a corrupt file cannot cause huge allocations."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.wrong(key, "a positive integer")
        if value > most:
            raise self.wrong(key, f"at most {most}")
        return value

    def num_layers(self) -> int:
        """`num_hidden_layers`."""
        return self.integer("num_hidden_layers", most=_MOST_LAYERS)

    def number(self, key: str, default: float | _Required = REQUIRED) -> float:
        """Return a finite number as float, at most 1e18 in magnitude."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        if not abs(value) <= _LARGEST:  # NaN fails every comparison; an integer may be too large for a float
            raise self.wrong(key, f"a finite number of at most {_LARGEST:g}")
        return float(value)

    def positive(self, key: str, default: float | _Required = REQUIRED) -> float:
        """Return a finite number above 0."""
        value = self.number(key, default)
        if value <= 0 or math.isinf(1 / value):
            raise self.wrong(key, "a positive number")
        return value

    def not_negative(self, key: str, default: float | _Required = REQUIRED) -> float:
        """Return a finite number of at least 0."""
        value = self.number(key, default)
        if value < 0:
            raise self.wrong(key, "a number of at least 0")
        return value

    def flag(self, key: str, default: bool | _Required = REQUIRED) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | _Required = REQUIRED) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Return a list of strings, None if absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return tuple(str(item) for item in value)

    def ids(self, key: str) -> tuple[int, ...]:
        """Return a token id or a list of them as a tuple; empty if absent."""
        value = self.values.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        ids = tuple(
            item for item in items if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < _MOST
        )
        if len(ids) != len(items) or len(ids) > _MOST_IDS:
            raise self.wrong(key, f"a token id or a list of them (at most {_MOST_IDS}, each below {_MOST})")
        return ids

    def section(self, key: str) -> "ConfigReader | None":
        """Return the settings nested under `key`, or None if absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return ConfigReader(value, f"{self.origin}: {key}")

    def has(self, key: str) -> bool:
        """Return whether `key` exists and is not null."""
        return self.values.get(key) is not None

    def choice(self, key: str, allowed: Sequence[str], default: str | _Required = REQUIRED) -> str:
        """Return one of `allowed`; ConfigError names the value and what is supported."""
        value = self.text(key, default)
        if value not in allowed:
            raise ConfigError(
                f"{self.origin}: {key} {abbreviate(value)} is not supported; supported: {', '.join(allowed)}"
            )
        return value

    def refuse(self, key: str, *harmless: object) -> None:
        """Raise ConfigError if `key` is set to a value other than null, false or one of `harmless`."""
        value = self.values.get(key)
        if value is not None and value is not False and value not in harmless:
            raise ConfigError(f"{self.origin}: {key} = {abbreviate(value)} is not supported")

    def wrong(self, key: str, expected: str) -> ConfigError:
        if self.values.get(key) is None:
            return ConfigError(f"{self.origin}: {key!r} is missing (expected {expected})")
        return ConfigError(f"{self.origin}: {key} = {abbreviate(self.values[key])}, expected {expected}")

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        return None if isinstance(default, _Required) else default
