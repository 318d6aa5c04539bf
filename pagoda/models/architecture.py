"""Architecture: what connects a checkpoint's words to one of the models in this folder."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from typing_extensions import TypeVar

from pagoda.base.model_spec import ModelSpec
from pagoda.models.base import Model
from pagoda.models.config_reader import ConfigReader
from pagoda.models.naming import BARE, HF, Naming, gguf_naming


class TreeConfig(Protocol):
    """What a tree is built from: DecoderConfig, EncoderConfig, ..."""

    @property
    def spec(self) -> ModelSpec: ...


ConfigT = TypeVar("ConfigT", bound=TreeConfig, default=Any)


def _nothing(config: ConfigReader) -> dict[str, object]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture(Generic[ConfigT]):
    """One kind of model.

    title: what lists for people call it, `name` if it is empty.
    hf_names: values of `architectures` in config.json.   model: builds the tree.
    read: settings with the names of config.json -> what `model` takes.
    hf: the possible namings of a safetensors checkpoint; the first whose tables and norms all exist is used.
    unused: regular expression of a checkpoint's modules that no result depends on, if the tree has none of that name.
    zeros: a checkpoint's tensors that the model does not read, because they are zeros; others are refused.
    gguf_names: values of `general.architecture` of a GGUF, none if llama.cpp has no name for it.
    experts: whether the model has experts, None if it may; llama.cpp may use one name for both kinds.
    gguf_settings: derives settings that llama.cpp does not store from those that it stores.
    """

    name: str
    hf_names: tuple[str, ...]
    model: Callable[[ConfigT], Model]
    read: Callable[[ConfigReader], ConfigT]
    hf: tuple[Naming, ...] = (HF, BARE)
    unused: str | None = None
    zeros: tuple[str, ...] = ()
    gguf_names: tuple[str, ...] = ()
    experts: bool | None = False
    gguf: Naming = field(default_factory=gguf_naming)
    gguf_settings: Callable[[ConfigReader], dict[str, object]] = _nothing
    title: str = ""
