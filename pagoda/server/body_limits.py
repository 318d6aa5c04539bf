"""BodyLimits: every bound on what one request body may hold. Larger ones are refused before work is spent on them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The bounds that `check` of a body (protocol.py) holds it to."""
