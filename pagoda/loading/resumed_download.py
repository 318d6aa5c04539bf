"""Download a large file: what an earlier process left of it is continued, the whole is verified, its progress shown."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from pagoda.base.errors import ConfigError


def download_rest(
    url: str, partial: Path, sha256: str, name: str, size: int | None = None, headers: Mapping[str, str] | None = None
) -> None:
    """Download what is missing of a file, in `partial`.   name: for people.   size: None: as the server says.

    Raises what the hub's library raises, and ConfigError for a file that has another sha256; it is not kept.
    """
    from huggingface_hub.file_download import http_get

    with partial.open("ab") as target:
        if size is not None and target.tell() > size:
            target.truncate(0)
            target.seek(0)
        is_whole = size is None and target.tell() and sha256_of(partial) == sha256
        if not is_whole:
            own = dict(headers or {})
            http_get(url, target, resume_size=target.tell(), headers=own, expected_size=size, displayed_filename=name)
    if sha256_of(partial) != sha256:
        partial.unlink()
        raise ConfigError(
            f"{name} does not have the sha256 that its host states, so it was damaged on its way; fetch it again"
        )


def sha256_of(path: Path) -> str:
    """Return a file's sha256 in hex."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
