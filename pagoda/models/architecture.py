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

    hf_names: what config.json may say in `architectures`.   model: builds the tree.
    read: settings in the words of config.json -> DecoderConfig.
    hf: the forms a safetensors checkpoint may have; the first whose embedding is there is taken.
    gguf_name: `general.architecture` of a GGUF, None where llama.cpp has no name of its own for it.
    experts: whether the model has some; llama.cpp may have one name for both.
    gguf_settings: settings that llama.cpp knows by heart instead of storing them, given those that it stores.
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
