"""Read a RopeConfig from a checkpoint's settings."""

import math

from pagoda.base.errors import ConfigError
from pagoda.layers.rope_config import RopeConfig, RopeType
from pagoda.models.config_reader import ConfigReader

_LARGEST_FACTOR = 1_000_000


def read_rope(config: ConfigReader, default_theta: float = 10_000.0) -> RopeConfig:
    """Read `rope_parameters` (the newer form), or `rope_theta` with `rope_scaling` (the older one)."""
    parameters = config.section("rope_parameters") or config.section("rope_scaling") or ConfigReader({}, config.origin)
    theta = parameters.number("rope_theta", config.number("rope_theta", default_theta))
    return read_rope_parameters(parameters, theta, config.integer("max_position_embeddings"))


def read_rope_parameters(parameters: ConfigReader, theta: float, max_position: int) -> RopeConfig:
    """Read one set of rope parameters. Raises ConfigError for an unsupported type."""
    supported = [kind.value for kind in RopeType]
    kind = RopeType(parameters.choice("rope_type" if parameters.has("rope_type") else "type", supported, "default"))
    parameters.refuse("partial_rotary_factor", 1, 1.0)
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
    factor = _factor(parameters) if parameters.has("factor") else max_position / original
    return RopeConfig(
        kind,
        theta,
        factor=factor,
        original_max_position=original,
        beta_fast=parameters.positive("beta_fast", 32.0),
        beta_slow=parameters.positive("beta_slow", 1.0),
        truncate=parameters.flag("truncate", True),
        attention_factor=_yarn_attention_factor(parameters, factor),
    )


def _factor(parameters: ConfigReader) -> float:
    factor = parameters.number("factor")
    if factor < 1.0:
        raise ConfigError(f"{parameters.origin}: factor = {factor}, expected 1 or more")
    if factor > _LARGEST_FACTOR:
        raise ConfigError(f"{parameters.origin}: factor = {factor}, expected at most {_LARGEST_FACTOR}")
    return factor


def _yarn_attention_factor(parameters: ConfigReader, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.has("attention_factor"):
        return parameters.positive("attention_factor")
    above, below = parameters.not_negative("mscale", 0.0), parameters.not_negative("mscale_all_dim", 0.0)
    return mscale(above) / mscale(below) if above and below else mscale(1.0)
