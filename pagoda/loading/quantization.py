"""resolve_quantization: how a checkpoint's weights are held in memory. No torch."""

from pagoda.base.dtypes import QUANTIZATIONS
from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.forms import MADE_WHILE_LOADING
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.packed_format import packed_format


def resolve_quantization(files: ModelFiles, quantization: str | None) -> str | None:
    """Return how weights are held, given the setting; None for floats of the compute dtype.

    "int8" and "fp8" are made while loading; "gguf", "awq" and "gptq" are the checkpoint's own codes, which AWQ and GPTQ
    checkpoints keep without a setting too. Raises ConfigError for other words, and for codes that are not there.
    """
    stored = packed_format(files)
    own = stored.method if stored else "gguf" if files.format == "gguf" else None
    if quantization is None:
        return stored.method if stored else None
    if quantization in MADE_WHILE_LOADING or quantization == own:
        return quantization
    if quantization == "gguf":
        raise ConfigError(f"quantization='gguf' needs a GGUF file, and {files.path} is not one; use 'int8'")
    if quantization in QUANTIZATIONS:
        raise ConfigError(
            f"quantization={quantization!r} needs a checkpoint quantised by {quantization.upper()}, and "
            f"{files.path} is not one; leave the setting out"
        )
    raise ConfigError(
        f"quantization={quantization!r} is not supported; take 'int8' or 'fp8' (8 bits, made while loading), "
        "'gguf', 'awq' or 'gptq' (the codes of such a checkpoint as they are), or leave it out"
    )
