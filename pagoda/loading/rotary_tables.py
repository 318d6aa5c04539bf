"""Rotary tables: cos and sin of every position, computed once in float32, exactly as transformers does."""

import math

import torch

from pagoda.layers.rope_config import RopeConfig, RopeType
from pagoda.layers.rotary import RotaryTables


def build_rotary_tables(
    rope: RopeConfig,
    head_dim: int,
    num_positions: int,
    device: torch.device,
    freq_factors: torch.Tensor | None = None,
    longest: int | None = None,
) -> RotaryTables:
    """Return tables for positions 0 .. num_positions - 1.

    freq_factors: float32 [elements turned / 2], divide the frequencies; a GGUF stores Llama 3's scaling like this.
    Elements that are not turned have the angle 0.
    longest: of the sequences that may come, by default as long as there are positions; it decides between the factors
    of LongRoPE, so that a token's angle does not depend on its sequence.
    """
    turned = rope.num_rotated(head_dim)
    if rope.rope_type is RopeType.ALTERNATING:
        frequencies = inverse_frequencies(rope, turned).view(-1, rope.axes).T.flatten()
    else:
        frequencies = inverse_frequencies(rope, turned // rope.axes, longest or num_positions).repeat(rope.axes)
    if freq_factors is not None:
        frequencies = frequencies / freq_factors
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    sin = -sin if rope.backwards else sin
    kept = (num_positions, (head_dim - turned) // 2)
    return RotaryTables(
        torch.cat((cos, torch.ones(kept)), 1).to(device),
        torch.cat((sin, torch.zeros(kept)), 1).to(device),
        _query_factors(rope, num_positions, device) if rope.query_beta else None,
    )


def _query_factors(rope: RopeConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    contexts = torch.floor((torch.arange(num_positions) + rope.query_shift) / rope.original_max_position)
    return (1 + rope.query_beta * torch.log(1 + contexts)).unsqueeze(1).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int, longest: int = 0) -> torch.Tensor:
    """float32 [head_dim / 2]: radians per position, per pair of dimensions.   head_dim: those that are turned."""
    if rope.rope_type is RopeType.LONGROPE:
        factors = rope.long_factors if longest > rope.original_max_position else rope.short_factors
        return 1.0 / (torch.tensor(factors) * rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.rope_type is RopeType.LINEAR:
        return plain / rope.factor
    if rope.rope_type is RopeType.PROPORTIONAL:
        turned = torch.arange(len(plain)) < int(rope.proportion * head_dim // 2)
        return torch.where(turned, plain / rope.factor, 0.0)
    if rope.rope_type is RopeType.LLAMA3:
        return _llama3(plain, rope)
    if rope.rope_type is RopeType.YARN:
        return _yarn(rope, head_dim)
    return plain


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, and blend those in between."""
    wavelength = 2 * math.pi / plain
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    stretched = torch.where(wavelength > shortest_stretched, plain / rope.factor, plain)
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    between = (wavelength >= longest_kept) & (wavelength <= shortest_stretched)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Keep dimensions that rotate often within the trained context; stretch those that rotate rarely by `factor`."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    powers = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return (1.0 / (rope.factor * powers)) * (1 - kept) + (1.0 / powers) * kept
