"""What each worker needs for every tensor_parallel_size and pipeline_parallel_size, for `pagoda plan`."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import ConfigError
from pagoda.base.ranks import RankPlace

if TYPE_CHECKING:
    from pagoda.assembly.engine_setup import EngineSetup
    from pagoda.loading.model_files import ModelFiles
    from pagoda.loading.weight_memory import SharesInMemory

_MOST_RANKS = 8  # of a stage
_TYPICAL_TOKENS = 8192  # of a request, where max_model_len is the model's own limit


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to divide the model among workers; sizes in bytes, of the worker that needs most.

    weights: in memory.   kv_bytes: of the smallest KV cache that holds one request of `num_tokens`.
    fits: on workers like this one, where both must be free: on a GPU each, or on a CPU the ranks of a stage together.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    weights: int
    kv_bytes: int
    num_tokens: int
    fits: bool


def layouts_of(config: EngineConfig, files: "ModelFiles | None" = None) -> list[Layout]:
    """Return the ways to divide a model among workers, the fewest workers first. Raises ConfigError as resolving.

    files: of the model, if it is not to be resolved.
    """
    from pagoda.assembly.engine_setup import resolve_engine
    from pagoda.assembly.sizing import prepared_as
    from pagoda.loading.weight_memory import SharesInMemory

    parallel = dataclasses.replace(
        config.parallel, tensor_parallel_size=1, pipeline_parallel_size=1, distributed_executor_backend="auto"
    )
    setup = resolve_engine(dataclasses.replace(config, parallel=parallel), files)
    shares = SharesInMemory(setup.files, prepared_as(setup))
    found: list[Layout] = []
    for stages in (1, 2, 4):
        for size in range(1, _MOST_RANKS + 1):
            divided = dataclasses.replace(parallel, tensor_parallel_size=size, pipeline_parallel_size=stages)
            try:
                check_settings(dataclasses.replace(config, parallel=divided))
                found.append(_layout(setup, shares, size, stages))
            except ConfigError:  # a size that does not divide it, or settings that do not go with several workers
                continue
    # Of as many workers, those that share layers answer sooner than those that have other layers.
    return sorted(
        found, key=lambda one: (one.tensor_parallel_size * one.pipeline_parallel_size, one.pipeline_parallel_size)
    )


def whole_layout(setup: "EngineSetup") -> Layout:
    """Return what the model needs on one worker."""
    from pagoda.assembly.sizing import prepared_as
    from pagoda.loading.weight_memory import SharesInMemory

    return _layout(setup, SharesInMemory(setup.files, prepared_as(setup)), 1, 1)


def _layout(setup: "EngineSetup", shares: "SharesInMemory", size: int, stages: int) -> Layout:
    """Raises ConfigError if the model cannot be divided so."""
    from pagoda.assembly.engine_setup import options_of
    from pagoda.core.kv import KVSizing
    from pagoda.loading.weight_memory import adapter_memory
    from pagoda.worker.memory import bytes_of_blocks, pool_bytes_of

    config, own, device, options = setup.config, setup.max_model_len, setup.device, options_of(setup)
    num_tokens = own if "max_model_len" in (config.given or ()) else min(own, _TYPICAL_TOKENS)
    sizing = KVSizing.of(setup.groups, config.cache.block_size, own, options)
    # The last rank of a stage has what does not divide.
    trees = [shares.tree(RankPlace(size - 1, size, stage, stages)) for stage in range(stages)]
    of_trees = (bytes_of_blocks(tree.kv_groups, setup.kv_dtype, config.cache.block_size) for tree in trees)
    block_bytes = tuple(map(max, zip(*of_trees, strict=True)))
    needed_blocks = sizing.blocks_for_request(num_tokens, options.max_encoder_len)
    kv_bytes = pool_bytes_of(sizing, needed_blocks[0], block_bytes)  # the other pool follows from the first
    weights = max(map(shares.weights, trees)) + (setup.drafting.memory_bytes if setup.drafting else 0)
    needed, lora = weights + kv_bytes, config.model.lora
    if lora.enable_lora:
        first = shares.tree(RankPlace(0, size))
        needed += lora.num_kept * adapter_memory(first, lora.max_lora_rank, setup.dtype, setup.is_packed)
    fits = needed * (size if device.is_host else 1) <= device.free_bytes() - device.margin_bytes
    return Layout(size, stages, weights, kv_bytes, num_tokens, fits)


def proposal(layouts: Sequence[Layout], is_host: bool) -> str:
    """Return the sentence that proposes the fewest workers that fit."""
    found = next((one for one in layouts if one.fits), None)
    if found is None:
        return "no way to divide it fits on workers like this one; quantize it, or take a smaller model"
    size, stages = found.tensor_parallel_size, found.pipeline_parallel_size
    if size * stages == 1:
        return "one worker is enough"
    where = " on machines like this one" if is_host and stages > 1 else "" if is_host else " on GPUs like this one"
    return f"tensor_parallel_size={size} and pipeline_parallel_size={stages} fit{where}"
