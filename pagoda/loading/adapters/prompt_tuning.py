"""Read prompt adapters as PEFT writes them: the embeddings that prompt tuning has trained. No torch.

Field names and their meaning: peft's PromptTuningConfig (0.21).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagoda.base.abbreviate import abbreviate, shorten
from pagoda.base.errors import ConfigError
from pagoda.loading.adapters.config import CONFIG_FILE, read_config_file
from pagoda.loading.adapters.files import digest_of, weights_path
from pagoda.loading.tensor_file import TensorFileError, read_tensor

_TENSOR = "prompt_embeddings"
_MAX_FILE_BYTES = 1 << 30

# How the adapter was made and where it began; and facts about its model that its tensor's shape says, too.
_WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs"),
    *("token_dim", "num_attention_heads", "num_layers"),
}
_APPLIED = {"peft_type", "num_virtual_tokens", "num_transformer_submodules"}


@dataclass(frozen=True, slots=True, eq=False)
class PromptAdapterFiles:
    """A prompt adapter that fits the model it was checked against.

    digest: of the contents of both files.   embeds: float32 [virtual tokens, hidden size], finite.
    """

    digest: str
    embeds: np.ndarray


def read_prompt_adapter(folder: Path, hidden_size: int) -> PromptAdapterFiles:
    """Read a prompt adapter.   hidden_size: of the model; 0 if it does not take prompt embeddings.

    Raises ConfigError that names what is unsupported, missing or of a wrong shape.
    """
    if not hidden_size:
        raise ConfigError(f"{folder}: a prompt adapter, but this model does not take prompts as embeddings")
    values = read_config_file(folder)
    _check_fields(values, folder / CONFIG_FILE)
    path = weights_path(folder)
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path}: more than {_MAX_FILE_BYTES >> 20} MiB, too much for a prompt adapter")
        embeds = read_tensor(path.read_bytes(), _TENSOR).astype(np.float32)
    except TensorFileError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {shorten(str(error))}") from None
    expected = (values["num_virtual_tokens"], hidden_size)
    if embeds.shape != expected:
        raise ConfigError(f"{path}: {_TENSOR} has the shape {embeds.shape}, expected {expected} for this model")
    if not np.isfinite(embeds).all():
        raise ConfigError(f"{path}: {_TENSOR} has values that are not finite")
    return PromptAdapterFiles(digest_of(folder), embeds)


def _check_fields(values: Mapping[str, object], path: Path) -> None:
    """Raise ConfigError for a field that is wrong, or that changes results and is not applied."""
    count = values.get("num_virtual_tokens")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"{path}: num_virtual_tokens={abbreviate(count)} must be a positive integer")
    if values.get("num_transformer_submodules") not in (None, 1):
        submodules = abbreviate(values.get("num_transformer_submodules"))
        raise ConfigError(f"{path}: num_transformer_submodules={submodules} is not supported: decoders have one")
    for name, value in values.items():
        if name not in _APPLIED and name not in _WITHOUT_EFFECT and value not in (None, False, [], {}):
            raise ConfigError(f"{path}: {name}={abbreviate(value)} is not supported with prompt tuning")
