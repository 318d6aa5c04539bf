"""Read adapter_config.json. Every field that changes results is applied, or refused by name. No torch.

Field names and their meaning: peft's LoraConfig (0.21) and tuners_utils.check_target_module_exists.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.loading.model_files import read_json_object

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"
PROMPT_TUNING = "PROMPT_TUNING"

_MAX_BYTES = 1 << 20

# Fields that change nothing about a trained adapter's results: how it was made, and settings of training.
WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core"),
    *("runtime_config", "qalora_group_size", "fan_in_fan_out"),  # linear layers are never stored transposed here
}
APPLIED = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_bias"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"),
}
_REASONS = {
    "use_dora": "DoRA rescales the base weights",
    "modules_to_save": "it replaces whole layers; train them with LoRA, or merge the adapter into the model",
    "target_parameters": "it adapts parameters that are not linear layers (experts)",
    "trainable_token_indices": "it replaces rows of the embedding",
    "alora_invocation_tokens": "the adapter would be active in a part of the prompt only",
    "layer_replication": "it changes the number of layers",
    "bias": "it replaces biases of the model",
    "ensure_weight_tying": "it ties the adapter of the head to that of the embedding",
}
# Initialisations that leave the base weights as they are; the others (PiSSA, OLoRA, CorDA, LoftQ ...) change them.
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What adapter_config.json says about the adapter's weights.

    rank, alpha: of modules that no pattern names.   rank_pattern, alpha_pattern: by regular expression, first match.
    rslora: scale by alpha / sqrt(rank) in place of alpha / rank.   bias: `b` has a bias.
    targets, excluded: names of modules (or ends of their paths), or a regular expression for the whole path.
    layers: of these layers only; empty for all.   layers_patterns: names of the list of layers.
    """

    rank: int
    alpha: float
    rslora: bool
    bias: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...]
    layers_patterns: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        return next(_matching(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of b @ a @ x."""
        rank, alpha = self.rank_of(module), next(_matching(self.alpha_pattern, module), self.alpha)
        return alpha / rank**0.5 if self.rslora else alpha / rank

    @property
    def max_rank(self) -> int:
        return max(self.rank, *self.rank_pattern.values()) if self.rank_pattern else self.rank

    def adapts(self, module: str, is_output: bool, is_embedding: bool) -> bool:
        """Return whether PEFT would adapt the module of this path.

        is_output: it is the model's head.   is_embedding: it is an embedding; "all-linear" means neither.
        """
        if _names(self.excluded, module):
            return False
        if isinstance(self.targets, str):
            if self.targets.lower() == "all-linear":
                return not is_output and not is_embedding
            return re.fullmatch(self.targets, module) is not None
        if module in self.targets:
            return True
        return _names(self.targets, module) and (not self.layers or self._layer_of(module) in self.layers)

    def _layer_of(self, module: str) -> int | None:
        patterns = [rf"(?:^|.*?\.){pattern}" for pattern in self.layers_patterns] or [r".*?\.[^.]*"]
        for pattern in patterns:
            found = re.match(rf"{pattern}\.(?P<index>\d+)\.", module)
            if found is not None:
                return int(found["index"])
        return None


_END_OF_PATH = r"(.*\.)?({})$"
"""A pattern of ranks or alphas as PEFT applies it."""


def _matching(patterns: Mapping[str, T], module: str) -> Iterator[T]:
    return (value for pattern, value in patterns.items() if re.match(_END_OF_PATH.format(pattern), module))


def _names(names: str | tuple[str, ...], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return module in names or any(module.endswith(f".{name}") for name in names)


def read_config_file(folder: Path) -> Mapping[str, object]:
    """Return the fields of a folder's adapter_config.json. Raises ConfigError if it is missing or no JSON object."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{folder}: no {CONFIG_FILE}: an adapter is a folder as PEFT's save_pretrained writes it")
    return read_json_object(path, _MAX_BYTES)


def is_prompt_adapter(folder: Path) -> bool:
    """Return whether the folder's adapter is embeddings in front of a prompt. Raises as `read_config_file` does."""
    return read_config_file(folder).get("peft_type") == PROMPT_TUNING


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read a folder's adapter_config.json. Raises ConfigError that names the field that is wrong or not supported."""
    return _Fields(read_config_file(folder), folder / CONFIG_FILE).config()


class _Fields:
    """The fields of one adapter_config.json."""

    def __init__(self, values: Mapping[str, object], path: Path) -> None:
        self._values, self._path = values, path

    def config(self) -> AdapterConfig:
        kind = self._values.get("peft_type")
        if kind != "LORA":
            raise self._bad("peft_type", f"must be 'LORA' or {PROMPT_TUNING!r}: other methods are not supported")
        for name, value in self._values.items():
            self._check_field(name, value)
        layers = self._values.get("layers_to_transform")
        return AdapterConfig(
            rank=self._rank("r", self._values.get("r", 8)),
            alpha=self._number("lora_alpha", self._values.get("lora_alpha", 8)),
            rslora=self._flag("use_rslora"),
            bias=self._flag("lora_bias"),
            rank_pattern={key: self._rank("rank_pattern", value) for key, value in self._pattern("rank_pattern")},
            alpha_pattern={key: self._number("alpha_pattern", value) for key, value in self._pattern("alpha_pattern")},
            targets=self._modules("target_modules") or (),
            excluded=self._modules("exclude_modules") or (),
            layers=self._layers([layers] if isinstance(layers, int) else layers),
            layers_patterns=self._names("layers_pattern"),
        )

    def _check_field(self, name: str, value: object) -> None:
        """Refuse a field that changes results and is not applied."""
        if name == "init_lora_weights" and value not in _KEEPS_BASE:
            raise self._bad(name, "is not supported: it changes the base weights; convert the adapter to plain LoRA")
        if name in APPLIED or name in WITHOUT_EFFECT or value in (None, False, "none", [], {}):
            return
        raise self._bad(name, f"is not supported: {_REASONS.get(name, 'pagoda does not know this field')}")

    def _bad(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{self._path}: {name}={abbreviate(self._values.get(name))} {what}")

    def _flag(self, name: str) -> bool:
        value = self._values.get(name) or False
        if not isinstance(value, bool):
            raise self._bad(name, "must be true or false")
        return value

    def _rank(self, name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._bad(name, "must be a positive integer")
        return value

    def _number(self, name: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < float("inf"):
            raise self._bad(name, "must be a finite number")
        return float(value)

    def _pattern(self, name: str) -> Iterator[tuple[str, object]]:
        values = self._values.get(name) or {}
        if not isinstance(values, dict):
            raise self._bad(name, "must be an object")
        for key, value in values.items():
            self._check_regex(name, _END_OF_PATH.format(key))
            yield key, value

    def _check_regex(self, name: str, pattern: str) -> None:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise self._bad(name, f"has a regular expression that does not compile: {error}") from None

    def _modules(self, name: str) -> str | tuple[str, ...]:
        value = self._values.get(name)
        if not isinstance(value, str):
            return self._names(name)
        self._check_regex(name, value)
        return value

    def _names(self, name: str) -> tuple[str, ...]:
        value = self._values.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._bad(name, "must be a string or a list of strings")
        return tuple(str(item) for item in value)

    def _layers(self, value: object) -> tuple[int, ...]:
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self._bad("layers_to_transform", "must be an integer or a list of integers")
        return tuple(int(item) for item in value)
