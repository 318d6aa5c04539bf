"""How much fits: weights, adapters and KV pools, as planned before loading and as the ranks measure after it."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from pagoda.assembly.engine_setup import EngineSetup, largest_ranks, options_of
from pagoda.base.abbreviate import human_bytes
from pagoda.base.errors import CapacityError, StepTooLarge
from pagoda.base.kv_tier import host_bytes_of, read_kv_tier
from pagoda.base.ranks import RankPlace
from pagoda.core.kv import BlockCounts
from pagoda.loading.quantization import resolve_quantization
from pagoda.loading.shares import read_share
from pagoda.loading.weight_memory import PreparedAs, adapter_memory, weight_memory
from pagoda.tier import bytes_in
from pagoda.worker.calls import Capacity, StepSize
from pagoda.worker.memory import (
    EmbedsMemory,
    EncoderMemory,
    KVCapacity,
    bytes_of_blocks,
    embeds_memory,
    encoder_memory,
    memory_limit,
    plan_capacity,
    require_device_memory,
    require_host_memory,
    smallest,
)

logger = logging.getLogger("pagoda")

_FEWEST_TOKENS = 256
"""Tokens per step that are worth a GPU."""

_ENOUGH_TOKENS = 2048
"""Tokens per step that most prompts need: as long as there are more, sequences that run at once are not given up."""

_SHORTEST_FITTED = 1024
"""Tokens: a default max_model_len is not lowered below this, since few prompts would fit."""


def weights_in_memory(setup: EngineSetup) -> int:
    """Return the bytes of a rank's weights, loaded and prepared for the kernels, with all of a draft model.

    Of the rank with the largest share of the layers; only the rank that samples has the draft model.
    """
    weights = weight_memory(setup.files, prepared_as(setup), largest_ranks(setup.config.parallel))
    return weights + (setup.drafting.memory_bytes if setup.drafting else 0)


def prepared_as(setup: EngineSetup) -> PreparedAs:
    """Return how the weights are held."""
    return PreparedAs(
        dtype=setup.dtype,
        quantization=setup.config.model.quantization,
        packed=setup.is_packed,
        num_positions=setup.num_positions,
        for_triton=setup.kernels == "triton",
    )


def adapters_in_memory(setup: EngineSetup) -> int:
    """Return the bytes that LoRA adapters may take of a rank: as many as are kept, each of the largest rank."""
    lora = setup.config.model.lora
    if not lora.enable_lora:
        return 0
    place = RankPlace(0, setup.config.parallel.tensor_parallel_size)  # which has what adapters add to the embedding
    model = read_share(setup.files, setup.config.model.quantization, place)
    return lora.num_kept * adapter_memory(model, lora.max_lora_rank, setup.dtype, setup.is_packed)


def embeds_in_memory(setup: EngineSetup) -> EmbedsMemory:
    """Return what the embeddings of requests may take, as far as the server's limits admit them."""
    if not setup.config.model.enable_prompt_embeds:
        return EmbedsMemory()
    return embeds_memory(setup.embeds_size, setup.dtype, setup.config.server.server_limits)


def encoder_in_memory(setup: EngineSetup) -> EncoderMemory:
    """Return what images and audio may take, `features` of all ranks together."""
    if setup.encoder is None:
        return EncoderMemory()
    return encoder_memory(setup.encoder, setup.dtype, setup.largest_item, options_of(setup))


def size_cache(
    setup: EngineSetup, capacities: Sequence[Capacity] = (), media: EncoderMemory | None = None
) -> KVCapacity:
    """Return the number of KV blocks that will fit on every rank.

    capacities: what the ranks have measured next to their weights, those of a draft model too; none before they are
        loaded.
    media: what images and audio may take; None for what `setup` says.
    Raises CapacityError if a sequence of max_model_len does not fit, or if the cache does not fit into the memory; the
    message says what does.
    """
    config, is_on_host, embeds = setup.config, setup.device.is_host, embeds_in_memory(setup)
    media = media or encoder_in_memory(setup)
    is_fake = config.parallel.executor == "fake"
    weights = 0 if capacities and (is_fake or not is_on_host) else weights_in_memory(setup)
    # Ranks on the host share its memory, with those of other replicas: this is about the part of one.
    num_replicas = config.server.data_parallel_size if is_on_host else 1
    num_ranks = config.parallel.world_size if is_on_host else 1
    sharing = num_ranks * num_replicas
    taken_by = "the weights and the largest step" if capacities else "the weights"
    on_device = adapters_in_memory(setup) + embeds.device + media.outputs + media.scratch
    on_host = (embeds.host + media.features) // num_ranks
    reserved = on_device + (on_host if is_on_host else 0)
    tier = host_bytes_of(config.cache.kv_tier) // num_replicas
    reserved += max(0, tier - _in_host_tier(config.cache.kv_tier) // num_replicas)  # what it has is not free any more
    found: list[KVCapacity] = []
    planned = [] if capacities else [(_free_before_loading(setup, sharing, weights), _block_bytes(setup))]
    for free_bytes, block_bytes in _shares(capacities, num_replicas) or planned:
        free = max(0, free_bytes - reserved)
        found.append(
            plan_capacity(
                setup.groups,
                config.cache,
                setup.kv_dtype,
                setup.max_model_len,
                free,
                options_of(setup),
                config.debug,
                block_bytes,
            )
        )
        if not is_on_host and not is_fake:
            require_device_memory(found[-1], config.cache, free, taken_by)
    capacity = smallest(found)
    if not is_fake:
        limit = None if config.parallel.executor == "ray" else memory_limit()  # which is this machine's
        if limit is not None:
            limit //= num_ranks * config.server.data_parallel_size
        if is_on_host:
            on_host += weights + on_device
        require_host_memory(capacity, config.cache, limit, on_host + tier, is_on_host)
    return capacity


def _in_host_tier(kv_tier: str | None) -> int:
    """Return the bytes that the tier in host memory takes already, as engines that were killed have left it."""
    spaces = [] if kv_tier is None else read_kv_tier(kv_tier)
    return sum(min(bytes_in(Path(one.path)), one.max_bytes) for one in spaces if one.tier == "host")


def fit_cache(setup: EngineSetup, capacities: Sequence[Capacity] = ()) -> tuple[EngineSetup, KVCapacity]:
    """As `size_cache`; where max_model_len is the model's own, it is lowered to what the cache holds, with a warning.

    Raises CapacityError if the option was given and does not fit, or if less than 1,024 tokens would be left.
    """
    media = encoder_in_memory(setup)  # by what the model and the settings say, however short sequences will be
    try:
        return setup, size_cache(setup, capacities, media)
    except CapacityError:
        if "max_model_len" in (setup.config.given or ()):
            raise
        capacity = size_cache(_with_max_model_len(setup, 1), capacities, media)
        own, fits = setup.max_model_len, capacity.max_tokens
        if fits < min(own, _SHORTEST_FITTED):
            raise
    logger.warning(
        "max_model_len is lowered from %d to %d, the longest sequence that the KV cache holds; give it more "
        "(kv_cache_memory), or set max_model_len",
        own,
        fits,
    )
    return _with_max_model_len(setup, fits), capacity


def _with_max_model_len(setup: EngineSetup, max_model_len: int) -> EngineSetup:
    model = dataclasses.replace(setup.config.model, max_model_len=max_model_len)
    return dataclasses.replace(
        setup, config=dataclasses.replace(setup.config, model=model), max_model_len=max_model_len
    )


def _block_bytes(setup: EngineSetup) -> BlockCounts:
    """Return the bytes of a block of each KV pool, on the rank that has the most of it."""
    config = setup.config
    if config.parallel.pipeline_parallel_size == 1:
        return bytes_of_blocks(setup.groups, setup.kv_dtype, config.cache.block_size)
    shares = (read_share(setup.files, config.model.quantization, place) for place in largest_ranks(config.parallel))
    found = (bytes_of_blocks(share.kv_groups, setup.kv_dtype, config.cache.block_size) for share in shares)
    return tuple(map(max, zip(*found, strict=True)))


def _free_before_loading(setup: EngineSetup, sharing: int, weights: int) -> int:
    """Return the bytes that the weights will leave to a rank. Raises CapacityError if they do not fit.

    sharing: ranks that share the memory.   weights: their bytes.
    """
    free = room = max(0, setup.device.free_bytes() - setup.device.margin_bytes) // sharing
    config = setup.config
    if setup.device.is_host and (config.cache.kv_cache_memory is not None or config.debug.num_blocks is not None):
        # With a size that was given, what other processes have now does not count. The machine's memory does: pages are
        # taken when they are first written, so reading weights that are larger would end in a kill by the system.
        limit = None if config.parallel.executor == "ray" else memory_limit()
        room = free + weights + 1 if limit is None else limit // sharing
    _require_weights_fit(setup, room, weights)
    return free - weights


def _shares(capacities: Sequence[Capacity], num_replicas: int) -> list[tuple[int, BlockCounts]]:
    """Return for each rank the bytes for its pools, an equal share of its memory, and those of a block of each.

    num_replicas: which share the memory.
    """
    shares: list[tuple[int, BlockCounts]] = []
    for rank in capacities:
        together = [one.free_bytes for one in capacities if one.memory == rank.memory]
        shares.append((min(together) // (len(together) * num_replicas), rank.block_bytes))
    return shares


def _require_weights_fit(setup: EngineSetup, free_bytes: int, weights: int) -> None:
    """Raise CapacityError, with the quantizations that fit, if the weights are larger than the memory for them."""
    model, is_host = setup.config.model, setup.device.is_host
    if weights < free_bytes or setup.config.parallel.executor == "fake":
        return
    fits: list[str] = []
    if resolve_quantization(setup.files, model.quantization) is None:
        for quantization in ("int8",) if is_host else ("fp8", "int8"):
            config = dataclasses.replace(setup.config, model=dataclasses.replace(model, quantization=quantization))
            if weights_in_memory(dataclasses.replace(setup, config=config)) < free_bytes:
                fits.append(f"quantization={quantization!r}")
    raise CapacityError(
        f"the weights of {setup.files.name!r} take about {human_bytes(weights)}, and "
        f"{'this machine' if is_host else 'the GPU'} has {human_bytes(free_bytes)} for them; "
        f"{' or '.join(fits) + ' would fit' if fits else 'take a smaller model'}"
    )


def sizes_to_try(setup: EngineSetup) -> list[StepSize]:
    """Return the sizes of steps with which a GPU's memory is measured: as the settings say, then smaller ones.

    None where it is not: on the host, and for a number of blocks that was given, as after a restart.
    """
    if setup.device.is_host or setup.config.debug.num_blocks is not None:
        return []
    return list(_smaller(setup))


def fit_measured(
    setup: EngineSetup, planned: KVCapacity | None, capacities: Sequence[Capacity], sizes: Sequence[StepSize]
) -> tuple[EngineSetup, KVCapacity]:
    """Size the pools by what the ranks have measured, with the largest of `sizes` that fits on all of them.

    planned: what was expected before loading, if anything.
    capacities: as Executor.start returns them, for these `sizes`.
    If steps had to be smaller, defaults are lowered with a warning. Raises CapacityError that says what would fit if
    the settings were given, or if the pools do not fit.
    """
    if planned is not None and (not capacities or setup.config.debug.num_blocks is not None):
        return setup, planned
    tightest = max(capacities, key=lambda one: one.num_too_large)
    if tightest.num_too_large:
        setup = _lowered(setup, sizes[tightest.num_too_large], tightest.why)
    setup, measured = fit_cache(setup, capacities)
    if setup.device.is_host and planned is not None:
        # Loaded weights may still count as free there, for their files can be read again.
        measured = smallest([planned, measured])
    return setup, measured


def no_step_fits(sizes: Sequence[StepSize], error: StepTooLarge) -> CapacityError:
    """Return the error for sizes of steps of which none fits. error: of the first of them."""
    return CapacityError(
        f"no step fits in the GPU's memory next to the weights, tried down from "
        f"max_num_seqs={sizes[0].max_num_seqs} and max_num_batched_tokens={sizes[0].max_num_batched_tokens}; take a "
        f"smaller model, or quantize it ({error})"
    )


def _smaller(setup: EngineSetup) -> Iterator[StepSize]:
    """Yield the sizes of steps as they are, then smaller, as far as other settings allow."""
    scheduler = setup.config.scheduler
    num_seqs, num_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    # Without chunks a step must hold a prompt of max_model_len.
    least = _FEWEST_TOKENS if scheduler.enable_chunked_prefill else setup.max_model_len
    yield StepSize(num_seqs, num_tokens)
    while num_tokens // 2 >= max(least, _ENOUGH_TOKENS, num_seqs):
        num_tokens //= 2
        yield StepSize(num_seqs, num_tokens)
    while num_tokens // 2 >= least or num_seqs > 1:
        num_tokens = max(min(num_tokens, least), num_tokens // 2)
        num_seqs = max(1, min(num_seqs // 2, num_tokens))
        yield StepSize(num_seqs, num_tokens)


def _lowered(setup: EngineSetup, size: StepSize, why: str) -> EngineSetup:
    """Return the setup with these sizes of a step. Raises CapacityError with them if the larger ones were given."""
    scheduler = setup.config.scheduler
    fits = {"max_num_seqs": size.max_num_seqs, "max_num_batched_tokens": size.max_num_batched_tokens}
    said = " and ".join(f"{name}={value}" for name, value in fits.items())
    changed = [name for name, value in fits.items() if getattr(scheduler, name) != value]
    if any(name in (setup.config.given or ()) for name in changed):
        raise CapacityError(f"{why}; {said} would fit")
    logger.warning("%s; they are lowered to %s", why, said)
    config = dataclasses.replace(setup.config, scheduler=dataclasses.replace(scheduler, **fits))
    return dataclasses.replace(setup, config=config)
