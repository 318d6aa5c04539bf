"""What each of several models takes, and the memory that they share, as planned before anything is loaded."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.assembly.engine_setup import EngineSetup, resolve_engine
from pagoda.assembly.sizing import adapters_in_memory, embeds_in_memory, encoder_in_memory, fit_cache, weights_in_memory
from pagoda.base.abbreviate import human_bytes
from pagoda.base.config import EngineConfig
from pagoda.base.errors import CapacityError, ConfigError
from pagoda.base.kv_tier import host_bytes_of
from pagoda.engine.wire import EngineSizes


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The settings of a model, with the size of its KV cache.   num_bytes: that it takes.   sizes: as planned.

    A model that is alone is not planned: its engine sizes everything when it starts.
    """

    config: EngineConfig
    num_bytes: int = 0
    sizes: EngineSizes | None = None


def plan_models(configs: Sequence[EngineConfig], budget: int | None) -> tuple[list[ModelPlan], int]:
    """Return the plan of each model, and the bytes that those that are loaded may take together.

    budget: these bytes; None: what is free now. A model whose settings do not size its KV cache gets its part of what
    the weights leave: gpu_memory_utilization of that, divided by the number of models.
    Raises ConfigError, and CapacityError for a model that can never fit, with its name.
    """
    plans: list[ModelPlan] = []
    for config in configs:
        try:
            setup = resolve_engine(config)
            if budget is None:
                free = setup.device.free_bytes() - setup.device.margin_bytes
                budget = max(0, free - host_bytes_of(config.cache.kv_tier))  # which the models share
            plans.append(_plan(config, setup, budget, len(configs)))
        except (ConfigError, CapacityError) as error:
            raise type(error)(f"{config.model.names[0]}: {error}") from error
    assert budget is not None
    return plans, budget


def _plan(config: EngineConfig, setup: EngineSetup, budget: int, count: int) -> ModelPlan:
    embeds, cache = embeds_in_memory(setup), config.cache
    weights = weights_in_memory(setup)
    others = adapters_in_memory(setup) + embeds.device + embeds.host + encoder_in_memory(setup).total
    if setup.groups and cache.kv_cache_memory is None and config.debug.num_blocks is None:
        left = max(0, budget - weights - others)
        part = max(1, int(left * cache.gpu_memory_utilization / count))
        cache = dataclasses.replace(cache, kv_cache_memory=part)
        config = dataclasses.replace(config, cache=cache)
        setup = dataclasses.replace(setup, config=dataclasses.replace(setup.config, cache=cache))
    setup, capacity = fit_cache(setup)
    num_bytes = weights + others + capacity.pool_bytes
    if num_bytes > budget:
        raise CapacityError(
            f"it takes {human_bytes(num_bytes)} ({human_bytes(weights)} of weights, {human_bytes(capacity.pool_bytes)} "
            f"of KV cache, {human_bytes(others)} for adapters, embeddings and media), and models may take "
            f"{human_bytes(budget)} together; raise max_models_memory, lower kv_cache_memory, or take a smaller model"
        )
    sizes = EngineSizes(
        max_model_len=setup.max_model_len,
        block_size=capacity.block_size,
        num_blocks=capacity.num_blocks,
        num_host_blocks=capacity.num_host_blocks,
    )
    return ModelPlan(config, num_bytes, sizes)
