"""Fetch model folders from a hub: Hugging Face or ModelScope. A complete cached snapshot needs no network."""

import errno
import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.base.abbreviate import abbreviate, shorten
from pagoda.base.errors import CapacityError, ConfigError
from pagoda.base.registry import nearest
from pagoda.loading.hub_download import download_large_files
from pagoda.loading.model_files import split_gguf
from pagoda.loading.safetensors_header import shard_files

if TYPE_CHECKING:
    from huggingface_hub.file_download import DryRunFileInfo

logger = logging.getLogger("pagoda.fetch")

# The files that loading reads: safetensors weights, configuration, tokenizer, chat template. No pickles, no code.
FOLDER_PATTERNS: tuple[str, ...] = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja", "vocab.txt", "merges.txt")
# Second copies of the same weights under other names.
SKIPPED_PATTERNS: tuple[str, ...] = ("original/*", "onnx/*", "consolidated*", "*/*.safetensors")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_USUAL_QUANTIZATION = "Q4_K_M"
SOURCES = ("huggingface", "modelscope")


@dataclass(frozen=True, slots=True)
class HubModel:
    """`ORG/NAME`, or one GGUF model of a repository with several: `ORG/NAME:FILE.gguf`, or `ORG/NAME:Q4_K_M`.

    That quantization is also the one of `ORG/NAME-GGUF`, as in llama.cpp and Ollama.
    filename: the file, the first where a model is in several, or the quantization that its name ends with.
    """

    repo_id: str
    filename: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str, revision: str | None = None) -> "HubModel":
        repo_id, _, filename = text.partition(":")
        usual = _USUAL_QUANTIZATION if repo_id.lower().endswith("-gguf") else None
        return cls(repo_id, filename or usual, revision)

    @property
    def patterns(self) -> list[str]:
        """Return the patterns of the files to fetch, none for a folder of safetensors. Case counts in them."""
        if self.filename is None:
            return []
        if self.filename.endswith(".gguf"):
            return [*split_gguf(self.filename)]
        letters = (f"[{one.lower()}{one.upper()}]" if one.isalpha() else one for one in self.filename)
        stem = f"*{''.join(letters)}"
        return [f"{stem}.gguf", f"{stem}-?????-of-?????.gguf"]

    def file_in(self, folder: Path) -> Path | None:
        """Return the GGUF file in a snapshot, of several the first; None if it, or one of them, is not there.

        Raises ConfigError if several models have the quantization.
        """
        if self.filename is None:
            return None
        if self.filename.endswith(".gguf"):
            found = {folder / self.filename}
        else:
            files = (path for pattern in self.patterns for path in folder.rglob(pattern))
            firsts = {path.with_name(split_gguf(path.name)[0]) for path in files}
            # A part of the name, so that Q4_XS does not mean IQ4_XS.
            found = {path for path in firsts if _ends_with_part(_SPLIT.sub("", path.stem), self.filename)}
        if len(found) > 1:
            names = ", ".join(str(path.relative_to(folder)) for path in sorted(found))
            raise ConfigError(f"{self}: several files have this quantization: {names}; name one, as ORG/NAME:FILE.gguf")
        for path in found:
            if all(path.with_name(part).is_file() for part in split_gguf(path.name)):
                return path
        return None

    def __str__(self) -> str:
        return f"{self.repo_id}:{self.filename}" if self.filename else self.repo_id


def fetch_hub(model: HubModel, source: str, cache_dir: Path | None) -> Path:
    """Return the local snapshot folder of a hub model.

    A complete cached snapshot is returned without a request to the hub; otherwise missing files are fetched.
    cache_dir: None is the hub library's own cache folder, shared with its other users.
    Raises ConfigError (unknown source, no such model or revision, access refused, no network) or CapacityError (disk
    full).
    """
    try:
        if (cached := find_cached_hub(model, source, cache_dir)) is not None:
            return cached
        logger.info("fetching %s from %s", model, source)
        fetched = (_from_huggingface if source == "huggingface" else _from_modelscope)(model, cache_dir, False)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"disk full while fetching {model}; free space or choose another --cache-dir"
            ) from error
        if error.errno is None:  # the library's own: the size is not what the hub states
            raise ConfigError(f"{model} did not come whole; fetch it again, which continues: {error}") from error
        raise
    if fetched is None or not is_complete(fetched, model):
        wanted = model.filename or "config.json with its safetensors weights"
        raise ConfigError(
            f"{model}: no {wanted} in the cache, and none came from the hub: there is no network, or the repository "
            "has none (for a GGUF file say ORG/NAME:FILE.gguf or ORG/NAME:Q4_K_M)"
        )
    return fetched


def find_cached_hub(model: HubModel, source: str, cache_dir: Path | None, complete: bool = True) -> Path | None:
    """Return the cached snapshot of a hub model, or None. Does not use the network.

    complete: only one with all that loading needs.
    """
    if source not in SOURCES:
        raise ConfigError(f"source={abbreviate(source)} is not a hub{nearest(source, list(SOURCES))}")
    cached = (_from_huggingface if source == "huggingface" else _from_modelscope)(model, cache_dir, True)
    return cached if cached is not None and (not complete or is_complete(cached, model)) else None


def _ends_with_part(stem: str, quantization: str) -> bool:
    before = stem[: len(stem) - len(quantization)]
    return not before or before[-1] in "-._"


def is_complete(folder: Path, model: HubModel) -> bool:
    """Return whether a snapshot is complete: the requested file, or a config with every shard named in the index."""
    if model.filename:
        return model.file_in(folder) is not None
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = shard_files(folder)
        except ConfigError:
            return False  # truncated, or a shard is missing; fetching replaces it
        weights = bool(shards)
    else:
        weights = any(folder.glob("*.safetensors"))
    return weights and (folder / "config.json").is_file()


def missing_bytes(model: HubModel, cache_dir: Path | None) -> int:
    """Return how many bytes of a model are to be fetched, as the hub says; 0 if it does not."""
    import httpx

    try:
        files = _snapshot(model, cache_dir, dry_run=True)
    except (OSError, ValueError, httpx.HTTPError):  # the fetch says what is wrong
        return 0
    return 0 if isinstance(files, str) else sum(file.file_size or 0 for file in files if file.will_download)


def _snapshot(
    model: HubModel, cache_dir: Path | None, local_only: bool = False, dry_run: bool = False
) -> "str | list[DryRunFileInfo]":
    from huggingface_hub import snapshot_download

    return snapshot_download(
        model.repo_id,
        revision=model.revision,
        cache_dir=cache_dir,
        allow_patterns=model.patterns or list(FOLDER_PATTERNS),
        ignore_patterns=list(SKIPPED_PATTERNS),
        local_files_only=local_only,
        dry_run=dry_run,
    )


def _from_huggingface(model: HubModel, cache_dir: Path | None, local_only: bool) -> Path | None:
    """Return a snapshot by `huggingface_hub`; None if local_only finds none."""
    import httpx
    from huggingface_hub import errors

    try:
        with suppress(errors.DryRunError):  # what cannot be reached is reported below
            if not local_only and not isinstance(files := _snapshot(model, cache_dir, dry_run=True), str):
                download_large_files(model.repo_id, files, cache_dir)
        folder = str(_snapshot(model, cache_dir, local_only))
    except errors.HFValidationError as error:
        raise ConfigError(f"model {abbreviate(model.repo_id)} is not a hub id: {shorten(str(error), 300)}") from None
    except errors.GatedRepoError:
        raise ConfigError(f"{model} is gated: accept its terms on the hub, then log in with `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"unknown model: the hub has no {abbreviate(model.repo_id)}, or it is private; check the name, or log in"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{model.repo_id} has no revision {abbreviate(model.revision)}") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, httpx.HTTPError) as error:
        if local_only:
            return None
        raise _no_network(model) from error
    return Path(folder)


def _from_modelscope(model: HubModel, cache_dir: Path | None, local_only: bool) -> Path | None:
    """Return a snapshot by the optional `modelscope` package; None if local_only finds none."""
    try:
        from modelscope import snapshot_download  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("source='modelscope' needs the modelscope package: pip install modelscope") from None
    try:
        folder: str = snapshot_download(
            model.repo_id,
            revision=model.revision,
            cache_dir=str(cache_dir) if cache_dir else None,
            allow_patterns=model.patterns or list(FOLDER_PATTERNS),
            ignore_patterns=list(SKIPPED_PATTERNS),
            local_files_only=local_only,
        )
    except ConnectionError as error:
        raise _no_network(model) from error
    except (ValueError, OSError) as error:  # "not cached" and "no such model", depending on the version
        if local_only:
            return None
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ConfigError(f"modelscope could not fetch {model}: {error}") from error
    return Path(folder)


def _no_network(model: HubModel) -> ConfigError:
    return ConfigError(
        f"no network: {model} is not complete in the cache and the hub cannot be reached; connect once, pass a local "
        "model folder, or pick a model of `pagoda list`"
    )
