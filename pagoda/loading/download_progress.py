"""How much of a model is downloaded, by the files that another process writes."""

from collections.abc import Iterator
from pathlib import Path

from pagoda.base.config import ModelConfig
from pagoda.loading.fetch_hub import HubModel
from pagoda.loading.fetch_wheel import incomplete_folders
from pagoda.loading.hub_download import blobs_of
from pagoda.loading.known_names import known_size
from pagoda.loading.resolve import cache_dir_of, hub_cache_of, source_of


class DownloadProgress:
    """Of a model that is about to be downloaded.   num_bytes_in_all: 0 if it is not known."""

    def __init__(self, config: ModelConfig) -> None:
        source = source_of(config)
        self.num_bytes_in_all = known_size(config.model)
        self._folders: tuple[Path, ...] = ()
        self._suffixes: tuple[str, ...] | None = None  # None: all
        if isinstance(source, HubModel):
            self._folders = (blobs_of(source.repo_id, hub_cache_of(config)),)
        elif not isinstance(source, Path):
            self._folders = incomplete_folders(source, cache_dir_of(config))
            self._suffixes = (".whl", ".partial")  # else what is unpacked of them would count again
        self._before = {path for path, _ in self._files() if path.suffix != ".partial"}

    @property
    def num_bytes(self) -> int:
        """What is there, with what an earlier download left."""
        return sum(size for path, size in self._files() if path not in self._before)

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Iterate over files, which come and go meanwhile, and their sizes."""
        for folder in self._folders:
            for path in folder.rglob("*"):
                if self._suffixes is not None and path.suffix not in self._suffixes:
                    continue
                try:
                    yield path, path.stat().st_size if path.is_file() else 0
                except OSError:
                    continue
