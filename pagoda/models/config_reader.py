"""ConfigReader: a checkpoint's settings, read with their types; and the rotary embedding that they describe."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.layers.rope_config import RopeConfig, RopeType


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
    asked: the names of settings that were read, of this reader and of those made from it.
    """

    def __init__(self, values: Mapping[str, object], origin: str) -> None:
        self.values = values
        self.origin = origin
        self.asked: set[str] = set()

    def changed(self, changes: Mapping[str, object]) -> "ConfigReader":
        """Return the settings with some of them replaced."""
        made = ConfigReader({**self.values, **changes}, self.origin)
        made.asked = self.asked
        return made

    def with_defaults(self, defaults: Mapping[str, object]) -> "ConfigReader":
        """Return the settings with `defaults` for those that are absent or null."""
        return self.changed({key: value for key, value in defaults.items() if self.values.get(key) is None})

    def text_settings(self) -> "ConfigReader":
        """Return the settings of the text model: `text_config` of a model that also takes images, else all.

        Some of its settings may be given for the whole.
        """
        text = self.section("text_config")
        if text is None:
            return self
        inherited = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
        return text.changed({key: self.get(key) for key in inherited if self.has(key) and not text.has(key)})

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

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a required list of positive numbers, at most 1024."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) > _MOST_IDS:
            raise self.wrong(key, f"a list of at most {_MOST_IDS} positive numbers")
        each = ConfigReader({str(index): item for index, item in enumerate(value)}, f"{self.origin}: {key}")
        return tuple(each.positive(index) for index in each.values)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Return a list of strings, None if absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return tuple(str(item) for item in value)

    def ids(self, key: str) -> tuple[int, ...]:
        """Return a token id or a list of them as a tuple; empty if absent."""
        value = self.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        ids = tuple(
            item for item in items if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < _MOST
        )
        if len(ids) != len(items) or len(ids) > _MOST_IDS:
            raise self.wrong(key, f"a token id or a list of them (at most {_MOST_IDS}, each below {_MOST})")
        return ids

    def get(self, key: str) -> object:
        """Return a value as it stands, None if absent."""
        self.asked.add(key)
        return self.values.get(key)

    def section(self, key: str) -> "ConfigReader | None":
        """Return the settings nested under `key`, or None if absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return ConfigReader(value, f"{self.origin}: {key}")

    def has(self, key: str) -> bool:
        """Return whether `key` exists and is not null."""
        return self.get(key) is not None

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
        value = self.get(key)
        if value is not None and value is not False and value not in harmless:
            raise ConfigError(f"{self.origin}: {key} = {abbreviate(value)} is not supported")

    def expect(self, key: str, value: object) -> None:
        """Raise ConfigError if `key` is set to another value than this one."""
        if self.has(key) and self.get(key) != value:
            raise self.wrong(key, str(value))

    def wrong(self, key: str, expected: str) -> ConfigError:
        if self.get(key) is None:
            return ConfigError(f"{self.origin}: {key!r} is missing (expected {expected})")
        return ConfigError(f"{self.origin}: {key} = {abbreviate(self.values[key])}, expected {expected}")

    def _value(self, key: str, default: object) -> object:
        value = self.get(key)
        if value is not None:
            return value
        return None if isinstance(default, _Required) else default


_LARGEST_FACTOR = 1_000_000


def read_rope(
    config: ConfigReader, default_theta: float = 10_000.0, rotated: float | None = None, interleaved: bool = False
) -> RopeConfig:
    """Read `rope_parameters` (the newer form), or `rope_theta` with `rope_scaling` (the older one).

    rotated: the default of `partial_rotary_factor`, None for a model that turns whole heads.   interleaved: see
    RopeConfig.
    """
    parameters = config.section("rope_parameters") or config.section("rope_scaling") or ConfigReader({}, config.origin)
    if config.has("original_max_position_embeddings"):  # in transformers, too, this goes first
        original = config.integer("original_max_position_embeddings")
        parameters = parameters.changed({"original_max_position_embeddings": original})
    theta = parameters.number("rope_theta", config.number("rope_theta", default_theta))
    rope = read_rope_parameters(
        parameters, theta, config.integer("max_position_embeddings"), may_be_partial=rotated is not None
    )
    if rotated is None:
        config.refuse("partial_rotary_factor", 1, 1.0)
    else:
        default = config.positive("partial_rotary_factor", rotated)
        rotated = parameters.positive("partial_rotary_factor", default)
        if rotated > 1:
            raise ConfigError(f"{config.origin}: partial_rotary_factor = {rotated}, expected at most 1")
    return replace(rope, rotated=rotated or 1.0, interleaved=interleaved)


def read_rope_parameters(
    parameters: ConfigReader, theta: float, max_position: int, may_be_partial: bool = False
) -> RopeConfig:
    """Read one set of rope parameters. Raises ConfigError for an unsupported type.

    may_be_partial: the caller reads `partial_rotary_factor`.
    """
    # gemma4.py reads the first of these, and pixtral.py has the other.
    supported = [kind.value for kind in RopeType if kind not in (RopeType.PROPORTIONAL, RopeType.ALTERNATING)]
    kind = RopeType(parameters.choice("rope_type" if parameters.has("rope_type") else "type", supported, "default"))
    if not may_be_partial:
        parameters.refuse("partial_rotary_factor", 1, 1.0)
    if kind is not RopeType.YARN:
        parameters.refuse("llama_4_scaling_beta", 0, 0.0)
    if not 1 < theta < math.inf:
        raise ConfigError(f"{parameters.origin}: rope_theta = {theta}, expected a positive number above 1")
    if kind in (RopeType.DEFAULT, RopeType.DYNAMIC):
        return RopeConfig(kind, theta)
    if kind is RopeType.LINEAR:
        return RopeConfig(kind, theta, factor=_factor(parameters))
    if kind is RopeType.LLAMA3:
        low, high = parameters.positive("low_freq_factor"), parameters.positive("high_freq_factor")
        if low >= high:
            raise ConfigError(
                f"{parameters.origin}: low_freq_factor = {low} must be less than high_freq_factor = {high}"
            )
        return RopeConfig(
            kind,
            theta,
            factor=_factor(parameters),
            original_max_position=parameters.integer("original_max_position_embeddings"),
            low_freq_factor=low,
            high_freq_factor=high,
        )
    original = parameters.integer("original_max_position_embeddings", max_position)
    if kind is RopeType.LONGROPE:
        return RopeConfig(
            kind,
            theta,
            original_max_position=original,
            attention_factor=_longrope_attention_factor(parameters, max_position, original),
            short_factors=parameters.numbers("short_factor"),
            long_factors=parameters.numbers("long_factor"),
        )
    factor = _factor(parameters) if parameters.has("factor") else max_position / original
    return RopeConfig(
        kind,
        theta,
        factor=factor,
        original_max_position=original,
        beta_fast=parameters.positive("beta_fast", 32.0),
        beta_slow=parameters.positive("beta_slow", 1.0),
        truncate=parameters.flag("truncate", True),
        query_beta=parameters.not_negative("llama_4_scaling_beta", 0.0),
        attention_factor=_yarn_attention_factor(parameters, factor),
    )


def _factor(parameters: ConfigReader) -> float:
    factor = parameters.number("factor")
    if factor < 1.0:
        raise ConfigError(f"{parameters.origin}: factor = {factor}, expected 1 or more")
    if factor > _LARGEST_FACTOR:
        raise ConfigError(f"{parameters.origin}: factor = {factor}, expected at most {_LARGEST_FACTOR}")
    return factor


def _longrope_attention_factor(parameters: ConfigReader, max_position: int, original: int) -> float:
    if parameters.has("attention_factor"):
        return parameters.positive("attention_factor")
    factor = parameters.positive("factor", max_position / original)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0


def _yarn_attention_factor(parameters: ConfigReader, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.has("attention_factor"):
        return parameters.positive("attention_factor")
    above, below = parameters.not_negative("mscale", 0.0), parameters.not_negative("mscale_all_dim", 0.0)
    return mscale(above) / mscale(below) if above and below else mscale(1.0)
