"""The setting `kv_tier`: where blocks are kept beyond the pool."""

from dataclasses import dataclass

from pagoda.base.config_options import parse_size
from pagoda.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """A folder, and the most bytes that it may have."""

    path: str
    max_bytes: int


def read_kv_tier(text: str) -> DiskSpace:
    """Return what `disk=/path:64GiB` says. Raises ConfigError that says what is wrong with it."""
    kind, _, rest = text.partition("=")
    if kind == "host":
        raise ConfigError(
            f"kv_tier={text!r}: there is no tier in host memory, which a CPU's pool is in already: raise "
            "kv_cache_memory; or keep files in memory: disk=/dev/shm/pagoda:8GiB"
        )
    path, colon, size = rest.rpartition(":")
    try:
        if kind != "disk" or not colon or not path.startswith("/"):
            raise ValueError("write disk=FOLDER:SIZE with an absolute path, such as disk=/var/cache/pagoda:64GiB")
        space = DiskSpace(path, parse_size(size))
    except ValueError as error:
        raise ConfigError(f"kv_tier={text!r}: {error}") from None
    if space.max_bytes < 1:
        raise ConfigError(f"kv_tier={text!r}: the size must be at least 1 byte")
    return space
