"""Defaults give way to what the user set: a default that contradicts a given option is adjusted, never an error."""

import dataclasses
import logging
from typing import Any

from pagoda.base.config import PARTS, EngineConfig, SchedulerConfig, SchedulingMode
from pagoda.base.errors import ConfigError
from pagoda.base.setting import default_of

logger = logging.getLogger("pagoda")

_OF_A_GPU = 0.95  # of what the largest step leaves: CUDA graphs need some of the rest
_TOKENS_OF_A_GPU = 8192
"""Tokens per step. A GPU computes 2,048 tokens of a small model in about the time in which the host launches them."""

_NATIVE_BLOCK_MULTIPLE = 8  # what the native attention kernels need of block_size


def note_given(config: EngineConfig) -> EngineConfig:
    """Return the config with `given` filled in. If it is unknown, it is every setting that differs from its default."""
    if config.given is not None:
        return config
    names = [
        item.name
        for part in PARTS
        for settings in [getattr(config, part)]
        for item in dataclasses.fields(settings)
        if getattr(settings, item.name) != default_of(item)
    ]
    return dataclasses.replace(config, given=tuple(sorted(names)))


def pipeline_depth(config: EngineConfig) -> int:
    """Return how many steps may be scheduled before the first result is back."""
    if config.debug.pipeline_depth is not None:
        return config.debug.pipeline_depth
    return 2 if config.scheduler.async_scheduling else config.parallel.pipeline_parallel_size


def fit_defaults(config: EngineConfig, max_model_len: int, is_host: bool) -> tuple[EngineConfig, int]:
    """Return the config with defaults adjusted to the options that were given, and the max_model_len to use.

    max_model_len: what was given, else the model's own limit.   is_host: of the device.
    Given options that contradict each other are kept; `resolve_engine` refuses them.
    """
    given = config.given or ()
    scheduler = config.scheduler
    changes: dict[str, Any] = {}
    if scheduler.async_scheduling is None:
        # On a CPU, the cores that would schedule the next step are those that compute the current one.
        changes["async_scheduling"] = not is_host and config.parallel.world_size == 1
    if not is_host and "gpu_memory_utilization" not in given:
        config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, gpu_memory_utilization=_OF_A_GPU))
    budget = scheduler.max_num_batched_tokens
    is_default = "max_num_batched_tokens" not in given and budget == SchedulerConfig().max_num_batched_tokens
    if not is_host and is_default:
        budget = changes["max_num_batched_tokens"] = _TOKENS_OF_A_GPU
    if budget < scheduler.max_num_seqs:
        if "max_num_seqs" not in given:
            changes["max_num_seqs"] = budget
        elif "max_num_batched_tokens" not in given:
            budget = changes["max_num_batched_tokens"] = scheduler.max_num_seqs
    whole_prompts = not scheduler.enable_chunked_prefill and scheduler.scheduling_mode is SchedulingMode.MIXED
    if whole_prompts and budget < max_model_len:
        if "max_num_batched_tokens" not in given:
            changes["max_num_batched_tokens"] = max_model_len
        elif "max_model_len" not in given:
            logger.warning(
                "max_model_len is lowered from %d to max_num_batched_tokens=%d: without chunked prefill a prompt "
                "must fit one step",
                max_model_len,
                budget,
            )
            max_model_len = budget
    return dataclasses.replace(config, scheduler=dataclasses.replace(scheduler, **changes)), max_model_len


def fit_whole_prompts(config: EngineConfig) -> EngineConfig:
    """Return the config for a model whose tokens attend to all others: prompts are not cut, and nothing is cached.

    Raises ConfigError if either was asked for.
    """
    given = config.given or ()
    asked = {
        "enable_chunked_prefill": config.scheduler.enable_chunked_prefill,
        "enable_prefix_caching": config.cache.enable_prefix_caching,
    }
    for name, is_on in asked.items():
        if is_on and name in given:
            raise ConfigError(f"{name}: the tokens of this model attend to the whole prompt; leave {name} out")
    return dataclasses.replace(
        config,
        scheduler=dataclasses.replace(config.scheduler, enable_chunked_prefill=False),
        cache=dataclasses.replace(config.cache, enable_prefix_caching=False),
    )


def fit_block_size(config: EngineConfig) -> EngineConfig:
    """With kernels=auto, choose torch's kernels if the native ones do not support the block size."""
    if config.parallel.kernels != "auto" or config.cache.block_size % _NATIVE_BLOCK_MULTIPLE == 0:
        return config
    if config.parallel.batch_invariant:
        raise ConfigError(
            f"batch_invariant needs the native kernels, and those a block_size that is a multiple of "
            f"{_NATIVE_BLOCK_MULTIPLE} (got {config.cache.block_size})"
        )
    logger.warning(
        "block_size=%d is not a multiple of %d: using torch's kernels, which are slower than the native ones",
        config.cache.block_size,
        _NATIVE_BLOCK_MULTIPLE,
    )
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, kernels="torch"))
