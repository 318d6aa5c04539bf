"""Where files are kept that can be made or fetched again."""

import os
import tempfile
from pathlib import Path

from pagoda.base.config_options import parse_size
from pagoda.base.errors import ConfigError

_PACKED_SIZE = "PAGODA_PACKED_CACHE_SIZE"


def cache_home() -> Path:
    """Return pagoda's folder below XDG_CACHE_HOME, or ~/.cache; a temporary one for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # a relative path is to be ignored, says the specification
        return Path(given) / "pagoda"
    try:
        return Path.home() / ".cache" / "pagoda"
    except RuntimeError:
        return temporary_folder()


def temporary_folder() -> Path:
    """Return this user's temporary folder, made if necessary. Raises OSError if it is not this user's alone.

    What is loaded from it must not come from another user, who may have made a folder of this name first.
    """
    folder = Path(tempfile.gettempdir()) / f"pagoda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not folder.is_dir() or folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to another user, or others can write to it; remove it")
    return folder


def packed_cache_bytes() -> int:
    """Return how large the folder of packed weights may get; 0: none are kept. Raises ConfigError."""
    given = os.environ.get(_PACKED_SIZE, "32GiB")
    try:
        return parse_size(given)
    except ValueError:
        raise ConfigError(f"{_PACKED_SIZE} must be a size such as 20GiB, or 0 to keep none (got {given!r})") from None
