"""The cache of the hub's library: which models are in it, and their removal."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.loading.fetch_hub import HubModel, is_complete
from pagoda.loading.model_files import split_gguf

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, HFCacheInfo


def cached_hub_models(cache_dir: Path | None) -> list[tuple[str, Path, int]]:
    """Return the models in a cache, by name: what `--model` takes, the folder or file, and its size in bytes.

    cache_dir: None is the library's own.
    """
    info, found = _scan(cache_dir), list[tuple[str, Path, int]]()
    for repo in _models(info):
        for revision in sorted(repo.revisions, key=lambda one: one.commit_hash):
            if "main" not in revision.refs:  # would need --revision
                continue
            folder = revision.snapshot_path
            sizes = {file.file_path.relative_to(folder).as_posix(): file.size_on_disk for file in revision.files}
            if is_complete(folder, HubModel(repo.repo_id)):
                found.append((repo.repo_id, folder, sum(sizes.values())))
            for first in sorted({split_gguf(name)[0] for name in sizes if name.endswith(".gguf")}):
                parts = split_gguf(first)
                if not Path(first).name.startswith("mmproj") and all(part in sizes for part in parts):
                    found.append((f"{repo.repo_id}:{first}", folder / first, sum(sizes[part] for part in parts)))
    return found


def remove_hub_model(model: HubModel, cache_dir: Path | None) -> int:
    """Delete a model's files from the cache and return the bytes that this frees; 0 if it is not there.

    Of a repository with several GGUF models only the files of this one; the last takes the repository with it.
    """
    info, freed = _scan(cache_dir), 0
    repo = next((one for one in _models(info) if one.repo_id == model.repo_id), None)
    if repo is None or info is None:
        return 0
    wanted = [one for one in repo.revisions if model.revision in (None, one.commit_hash, *one.refs)]
    gone: list[CachedFileInfo] = []
    for revision in wanted:
        if model.filename is None:
            gone += revision.files
        elif (first := model.file_in(revision.snapshot_path)) is not None:
            parts = {first.with_name(part) for part in split_gguf(first.name)}
            gone += [file for file in revision.files if file.file_path in parts]
    used = {file.blob_path for one in repo.revisions for file in one.files if file not in gone}
    for file in gone:
        file.file_path.unlink(missing_ok=True)
        if file.blob_path not in used and file.blob_path.exists():
            freed += file.blob_path.stat().st_size
            file.blob_path.unlink()
    emptied = [one.commit_hash for one in wanted if gone and not any(file.file_path.exists() for file in one.files)]
    alone = replace(info, repos=frozenset({repo}))  # a copy of a repository has the same commits
    alone.delete_revisions(*emptied).execute()
    return freed


def _scan(cache_dir: Path | None) -> "HFCacheInfo | None":
    if cache_dir is not None and not cache_dir.is_dir():
        return None
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir(cache_dir)
    except CacheNotFound:
        return None


def _models(info: "HFCacheInfo | None") -> "list[CachedRepoInfo]":
    repos = info.repos if info is not None else ()
    return sorted((one for one in repos if one.repo_type == "model"), key=lambda one: one.repo_id)
