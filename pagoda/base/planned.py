"""Planned features of the public interface, and what each of them still needs."""

from pagoda.base.errors import NotSupportedError

_MISSING = {
    "embed": "encoder models and pooling are missing",
    "classify": "models with a classification head and pooling are missing",
    "score": "cross-encoder and embedding models are missing",
}


def planned(name: str) -> NotSupportedError:
    """Return the error that the planned method `name` raises."""
    return NotSupportedError(f"{name} is planned and not available yet: {_MISSING[name]}")
