"""Features of the public interface that are planned, and what each still needs."""

from pagoda.base.errors import NotSupportedError


def planned(name: str, missing: str) -> NotSupportedError:
    """Return the error that a planned feature raises."""
    return NotSupportedError(f"{name} is planned and not available yet: {missing}")
