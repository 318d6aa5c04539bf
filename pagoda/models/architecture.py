"""Architecture: what connects a checkpoint's words to one of the models in this folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagoda.models.base import Model
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig
from pagoda.models.naming import HF, Naming, gguf_naming


def _nothing(values: Mapping[str, object]) -> dict[str, object]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One kind of model.

    hf_names: values of `architectures` in config.json.   model: builds the tree.
    read: settings with the names of config.json -> DecoderConfig.
    hf: the possible namings of a safetensors checkpoint; the first whose embedding exists is used.
    gguf_name: `general.architecture` of a GGUF, None if llama.cpp has no name for it.
    experts: whether the model has experts; llama.cpp may use one name for both kinds.
    gguf_settings: derives settings that llama.cpp does not store from those that it stores.
    """

    name: str
    hf_names: tuple[str, ...]
    model: Callable[[DecoderConfig], Model]
    read: Callable[[ConfigReader], DecoderConfig]
    hf: tuple[Naming, ...] = (HF,)
    gguf_name: str | None = None
    experts: bool = False
    gguf: Naming = field(default_factory=gguf_naming)
    gguf_settings: Callable[[Mapping[str, object]], dict[str, object]] = _nothing
