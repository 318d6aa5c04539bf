"""BodyLimits: every bound on what one request body may hold. Larger ones are refused before work is spent on them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The bounds that a body is held to: its structure before it is decoded, the others by its `check` (protocol.py).

    max_values: JSON values in it, token ids included.   max_objects: objects, lists and keys of objects.
    """

    max_values: int = 1_000_000
    max_objects: int = 100_000
