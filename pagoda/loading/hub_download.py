"""Download the large files of a hub model into its library's cache: resumed by a later process, and verified.

The library begins a file again after a process was killed, and compares no more than sizes. So files with weights are
put in its cache before it looks for them; it fetches the rest, and links all of them to the snapshot.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.loading.resumed_download import download_rest

if TYPE_CHECKING:
    from huggingface_hub.file_download import DryRunFileInfo

_LEAST_BYTES = 16 << 20
_MOST_BYTES = 50 * 10**9  # the hub has larger ones through the library's own protocol only
_SHA256 = re.compile(r"[0-9a-f]{64}")


def blobs_of(repo_id: str, cache_dir: Path | None) -> Path:
    """Return the folder of a repository's files in the library's cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(cache_dir or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="model") / "blobs"


def download_large_files(repo_id: str, files: Sequence["DryRunFileInfo"], cache_dir: Path | None) -> None:
    """Download those files of a repository that are large and not in the cache yet, one after another.

    A part that an earlier process left is continued. Raises what the library raises, and ConfigError for a file that
    has another sha256 than the hub states; it is not kept.
    """
    from filelock import FileLock
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    blobs = blobs_of(repo_id, cache_dir)
    locks = blobs.parents[1] / ".locks" / blobs.parent.name  # the library's own, so that it waits, too
    for file in files:
        size = file.file_size or 0
        if not file.will_download or not _LEAST_BYTES <= size <= _MOST_BYTES:
            continue
        url = hf_hub_url(repo_id, file.filename, revision=file.commit_hash)
        stated = get_hf_file_metadata(url)
        if stated.etag is None or _SHA256.fullmatch(stated.etag) is None:
            continue
        blob, partial = blobs / stated.etag, blobs / f"{stated.etag}.partial"
        for one in (blobs, locks):
            one.mkdir(parents=True, exist_ok=True)
        with FileLock(locks / f"{stated.etag}.lock"):
            if blob.exists():  # another process was faster
                continue
            download_rest(url, partial, stated.etag, file.filename, size, build_hf_headers())
            partial.rename(blob)
