"""What settings depend on of the GPU that an engine will use. torch is imported only where there is a driver."""

import logging
from pathlib import Path

from pagoda.base.errors import ConfigError

logger = logging.getLogger("pagoda")

BF16_SINCE = (8, 0)
"""Compute capability from which a GPU multiplies in bfloat16."""

_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvmap"))
"""A driver's file: on Linux, in Windows' subsystem for it (WSL 2), on Tegra."""


def has_gpu() -> bool:
    """Return whether torch can use a GPU."""
    if not any(path.exists() for path in _DRIVERS):
        return False
    import torch

    return torch.cuda.is_available()


def fit_dtype(dtype: str, asked: str) -> str:
    """Return the dtype for an engine on a GPU: one without bfloat16 computes in float16.

    asked: the setting, "auto" if it was left to the model. Raises ConfigError if that is bfloat16.
    """
    import torch

    if dtype != "bfloat16" or not torch.cuda.is_available():  # without a GPU, loading says so
        return dtype
    capability = torch.cuda.get_device_capability()
    if capability >= BF16_SINCE:
        return dtype
    has = "{}.{}".format(*capability)
    if asked == "bfloat16":
        raise ConfigError(
            f"dtype='bfloat16' needs a GPU of compute capability 8.0 or later (this one has {has}); take "
            "dtype='float16', or 'float32' if a model's values are too large for that"
        )
    logger.warning(
        "dtype is float16 in place of the model's bfloat16, which this GPU does not have (compute capability %s); if "
        "values are too large for float16, set dtype='float32'",
        has,
    )
    return "float16"
