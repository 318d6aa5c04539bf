"""Check paths that come from users or files and may be invalid."""

from pathlib import Path


def exists(path: Path) -> bool:
    """Return whether `path` exists; False for names that the file system cannot hold (too long, zero bytes)."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Return whether `path` is a file; False for names that the file system cannot hold."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
