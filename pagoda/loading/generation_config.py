"""What a model's publisher recommends for its output, from its files or the catalog."""

from collections.abc import Mapping
from pathlib import Path

from pagoda.base.config import ModelConfig
from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.sampling_params import SamplingParams
from pagoda.loading.catalog import CATALOG
from pagoda.loading.ctranslate2 import suppressed_tokens
from pagoda.loading.gguf_file import open_gguf
from pagoda.loading.model_files import ModelFiles, exists, read_json_object

FILE = "generation_config.json"
_IN_FILE = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Name in generation_config.json -> sampling parameter. Others, such as num_beams, are left out, as vLLM does."""
_IN_GGUF = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""GGUF key after "general.sampling." -> sampling parameter."""


def default_sampling(config: ModelConfig, files: ModelFiles) -> dict[str, object]:
    """Return the sampling parameters of requests that do not set them, by name; what is missing is SamplingParams' own.

    Raises ConfigError for a file that cannot be read, or whose values are out of range.
    """
    found: dict[str, object] = {}
    origin = "override_generation_config"
    if config.generation_config == "auto":
        found, origin = _of_model(config, files)
    elif config.generation_config != "vllm":
        path = Path(config.generation_config).expanduser()
        path = path / FILE if path.is_dir() else path
        if not exists(path):
            raise ConfigError(f"generation_config={config.generation_config}: there is no {path}")
        found, origin = _named(read_json_object(path), _IN_FILE), str(path)
    _check(found, origin)
    overrides = {_IN_FILE.get(name, name): value for name, value in config.override_generation_config.items()}
    _check(overrides, "override_generation_config")
    return found | overrides


def _of_model(config: ModelConfig, files: ModelFiles) -> tuple[dict[str, object], str]:
    """Return what a model's files say, else the catalog, and where that stands."""
    folder = files.path if files.path.is_dir() else files.path.parent
    if (folder / FILE).is_file():
        return _named(read_json_object(folder / FILE), _IN_FILE), str(folder / FILE)
    if files.format == "gguf":
        file = open_gguf(files.path)
        stated = {key: file.get(f"general.sampling.{key}", int if key == "top_k" else float) for key in _IN_GGUF}
        if found := _named(stated, _IN_GGUF):
            return found, str(files.path)
    return dict(CATALOG[config.model].sampling) if config.model in CATALOG else {}, "the catalog"


def generation_settings(files: ModelFiles) -> Mapping[str, object]:
    """Return all settings of generation_config.json, by name, or what a file of another format has of them."""
    if files.format == "ctranslate2":
        return suppressed_tokens(files.path)
    path = files.path / FILE
    return read_json_object(path) if files.path.is_dir() and path.is_file() else {}


def _named(values: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    return {own: values[name] for name, own in names.items() if values.get(name) is not None}


def _check(values: Mapping[str, object], origin: str) -> None:
    try:
        SamplingParams(**values)  # type: ignore[arg-type]
    except (RequestError, TypeError) as error:
        raise ConfigError(f"{origin}: {error}; --generation-config vllm ignores a model's values") from None
