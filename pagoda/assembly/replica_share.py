"""What of a machine one of several replicas computes with: its own GPUs, or its share of the cores."""

import dataclasses
import os
from collections.abc import MutableMapping
from pathlib import Path

from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.kernels.native.threads import available_cpus, bind_to_cores

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def take_share(
    config: EngineConfig, number: int, environ: MutableMapping[str, str] = os.environ, root: Path = Path("/")
) -> EngineConfig:
    """Keep this process, the engine of replica `number`, to its share of the machine; return the settings for it.

    Must come before anything uses a GPU.   environ, root: of the system (for tests).
    Raises ConfigError if the machine has too few GPUs.
    """
    parallel, count = config.parallel, config.server.data_parallel_size
    if count == 1 or parallel.executor == "ray":  # Ray places the ranks
        return config
    gpus = _gpus(environ, root) if parallel.device in ("auto", "cuda") else []
    if gpus:
        size = parallel.world_size
        if len(gpus) < count * size:
            raise ConfigError(
                f"data_parallel_size={count} with {size} workers each needs {count * size} GPUs, and this machine has "
                f"{len(gpus)} for it: take fewer replicas, or device='cpu'"
            )
        environ[_VISIBLE] = ",".join(gpus[number * size : (number + 1) * size])
        return config
    num_threads = bind_to_cores(number, count, root)
    if parallel.threads is not None or num_threads == available_cpus(root):  # ranks divide these cores
        return config
    num_threads = max(1, num_threads // parallel.world_size)
    return dataclasses.replace(config, parallel=dataclasses.replace(parallel, threads=num_threads))


def _gpus(environ: MutableMapping[str, str], root: Path) -> list[str]:
    """Return the names of the GPUs that this process may use, as the variable of CUDA has them."""
    visible = environ.get(_VISIBLE)
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    return [str(index) for index, _ in enumerate(sorted((root / "dev").glob("nvidia[0-9]*")))]
