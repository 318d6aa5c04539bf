"""The setting `kv_tier`: where blocks are kept beyond the pool."""

import os
import re
from dataclasses import dataclass

from pagoda.base.config_options import parse_size
from pagoda.base.errors import ConfigError

_HOST_FOLDER = f"/dev/shm/pagoda-{os.getuid()}"
_FORM = (
    "write disk=FOLDER:SIZE with an absolute path, such as disk=/var/cache/pagoda:64GiB, host=SIZE, or both with a "
    "comma between them"
)


@dataclass(frozen=True, slots=True)
class TierSpace:
    """A folder, and the most bytes that it may have.   tier: "host" if it is in memory, else "disk"."""

    tier: str
    path: str
    max_bytes: int


def read_kv_tier(text: str) -> list[TierSpace]:
    """Return what `host=8GiB,disk=/path:64GiB` says, the fastest first.

    Raises ConfigError that says what is wrong with it.
    """
    spaces: dict[str, TierSpace] = {}
    try:
        for part in re.split(",(?=host=|disk=)", text):
            tier, _, rest = part.partition("=")
            path, _, size = (_HOST_FOLDER, "", rest) if tier == "host" else rest.rpartition(":")
            if tier not in ("host", "disk") or tier in spaces or not path.startswith("/"):
                raise ValueError(_FORM)
            spaces[tier] = TierSpace(tier, path, parse_size(size))
            if spaces[tier].max_bytes < 1:
                raise ValueError("the size must be at least 1 byte")
    except ValueError as error:
        raise ConfigError(f"kv_tier={text!r}: {error}") from None
    return [spaces[tier] for tier in ("host", "disk") if tier in spaces]


def host_bytes_of(text: str | None) -> int:
    """Return the most bytes of memory that the setting `kv_tier` takes; all engines of a machine share them."""
    return sum(space.max_bytes for space in read_kv_tier(text) if space.tier == "host") if text is not None else 0
