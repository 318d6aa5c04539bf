"""What a model's publisher recommends for its output, from its files or the catalog."""

import logging
from collections.abc import Mapping
from pathlib import Path

from pagoda.base.abbreviate import shorten
from pagoda.base.config import ModelConfig
from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.registry import closest
from pagoda.base.sampling_params import SamplingParams
from pagoda.loading.catalog import CATALOG
from pagoda.loading.ctranslate2 import token_settings
from pagoda.loading.gguf_file import open_gguf
from pagoda.loading.known_names import full_name
from pagoda.loading.model_files import ModelFiles, exists, read_json_object
from pagoda.models.config_reader import ConfigReader

logger = logging.getLogger("pagoda")

FILE = "generation_config.json"
_SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("no_repeat_ngram_size", "forced_eos_token_id"),
)
_IN_FILE = {
    **{name: name for name in _SAME_NAME},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
"""Name in generation_config.json -> sampling parameter."""
DEFAULTS = (
    *_IN_FILE.values(),
    *("presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "bad_words", "logit_bias"),
)
"""Parameters that may have another default. The others are of each request: HTTP always sends their values."""
_UNUSED: Mapping[str, object] = {
    "num_beams": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
    "typical_p": 1.0,
}
"""Names of others that change what transformers generates -> values with which they do not."""
_IN_GGUF = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""GGUF key after "general.sampling." -> sampling parameter."""
_UNUSED_IN_GGUF: Mapping[str, object] = {"xtc_probability": 0, "mirostat": 0, "sequence": ""}
"""Others there that change what llama.cpp generates -> values with which they do not."""


def default_sampling(config: ModelConfig, files: ModelFiles, num_start: int = 0) -> dict[str, object]:
    """Return the sampling parameters of requests that do not set them, by name; what is missing is SamplingParams' own.

    num_start: with how many tokens an encoder-decoder model's answers begin, which its lengths count; 0 for others.
    Raises ConfigError for a file that cannot be read, or whose values are out of range.
    """
    found: dict[str, object] = {}
    origin = "override_generation_config"
    if config.generation_config == "auto":
        found, origin = _of_model(config, files, num_start)
    elif config.generation_config != "vllm":
        path = Path(config.generation_config).expanduser()
        path = path / FILE if path.is_dir() else path
        if not exists(path):
            raise ConfigError(f"generation_config={config.generation_config}: there is no {path}")
        found, origin = _of_file(path, num_start), str(path)
    _check(found, origin)
    overrides = {_IN_FILE.get(name, name): value for name, value in config.override_generation_config.items()}
    for name in overrides:
        if name not in DEFAULTS:
            raise ConfigError(
                f"override_generation_config: {name!r:.80} cannot have another default{closest(name, list(DEFAULTS))}; "
                f"take one of {', '.join(DEFAULTS)}, and give others with each request"
            )
    _check(overrides, "override_generation_config")
    return found | overrides


def _of_model(config: ModelConfig, files: ModelFiles, num_start: int) -> tuple[dict[str, object], str]:
    """Return what a model's files say, else the catalog, and where that stands."""
    folder = files.path if files.path.is_dir() else files.path.parent
    if (folder / FILE).is_file():
        return _of_file(folder / FILE, num_start), str(folder / FILE)
    if files.format == "gguf":
        file = open_gguf(files.path)
        stated = {key: file.get(f"general.sampling.{key}", int if key == "top_k" else float) for key in _IN_GGUF}
        others: dict[str, object] = {key: file.metadata.get(f"general.sampling.{key}") for key in _UNUSED_IN_GGUF}
        suppressed = file.numbers("tokenizer.ggml.suppress_tokens")
        others["suppress_tokens"] = None if suppressed is None else suppressed.tolist()
        _warn_of_unused(str(files.path), others, _UNUSED_IN_GGUF)
        if found := _named(stated, _IN_GGUF):
            return found, str(files.path)
    name = full_name(config.model)
    return dict(CATALOG[name].sampling) if name in CATALOG else {}, "the catalog"


def generation_settings(files: ModelFiles) -> Mapping[str, object]:
    """Return all settings of generation_config.json, by name, or what a file of another format has of them."""
    if files.format == "ctranslate2":
        return token_settings(files.path)
    path = files.path / FILE
    return read_json_object(path) if files.path.is_dir() and path.is_file() else {}


def _of_file(path: Path, num_start: int) -> dict[str, object]:
    """Return what a file says. Log what else it says that transformers would use."""
    values = read_json_object(path)
    _warn_of_unused(str(path), {name: values.get(name) for name in _UNUSED}, _UNUSED)
    found = _named(values, _IN_FILE)
    return found | _answer_lengths(ConfigReader(values, str(path)), num_start) if num_start else found


def _warn_of_unused(origin: str, values: Mapping[str, object], neutral: Mapping[str, object]) -> None:
    ignored = [f"{name}={value}" for name, value in values.items() if value is not None and value != neutral.get(name)]
    if ignored:
        listed = shorten(", ".join(ignored), 300)
        logger.warning("%s: not used: %s; beam searches are asked for by request (use_beam_search)", origin, listed)


def _answer_lengths(settings: ConfigReader, num_start: int) -> dict[str, object]:
    """Return the lengths of an encoder-decoder model's answers after what they begin with.

    max_length and min_length count all of that, max_new_tokens and min_new_tokens all but its first token.
    """
    found: dict[str, object] = {}
    for kind in ("max", "min"):
        is_new = settings.has(f"{kind}_new_tokens")
        name = f"{kind}_new_tokens" if is_new else f"{kind}_length"
        if settings.has(name):
            length = int(settings.not_negative(name)) + is_new - num_start
            found[f"{kind}_tokens"] = length if kind == "max" else max(length, 0)
    return found


def _named(values: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    return {own: values[name] for name, own in names.items() if values.get(name) is not None}


def _check(values: Mapping[str, object], origin: str) -> None:
    try:
        SamplingParams.of_model(values)
    except (RequestError, TypeError) as error:
        raise ConfigError(f"{origin}: {error}; --generation-config vllm ignores a model's values") from None
