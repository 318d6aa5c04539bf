"""Settings that were given and have no effect next to others. They are reported at start, with both names."""

from collections.abc import Iterator

from pagoda.base.config import EngineConfig, PreemptionMode, PrefillConfig, SchedulingMode, SchedulingPolicy
from pagoda.base.setting import describe_settings


def settings_without_effect(config: EngineConfig) -> list[str]:
    """Return one sentence for each setting that was given, but that another setting makes useless.

    Settings that contradict each other are errors instead; see `check_settings` and `resolve_engine`.
    """
    given = set(config.given or ())
    if "prefill" in given:  # as a whole; only fields that differ from their defaults are yielded below
        given |= {item.name for item in describe_settings(PrefillConfig)}
    return [f"{name} has no effect {why}" for name, why in _useless(config) if name in given]


def _useless(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Yield names of settings that have no effect, given or not, and why: "with other_setting=value: reason"."""
    cache, scheduler, debug = config.cache, config.scheduler, config.debug
    if debug.num_blocks is not None:
        yield "kv_cache_memory", f"with num_blocks={debug.num_blocks}, which sizes the KV cache"
        yield "gpu_memory_utilization", f"with num_blocks={debug.num_blocks}, which sizes the KV cache"
    elif cache.kv_cache_memory is not None:
        yield "gpu_memory_utilization", f"with kv_cache_memory={cache.kv_cache_memory}, which sizes the KV cache"
    if debug.num_host_blocks is not None:
        yield "swap_space", f"with num_host_blocks={debug.num_host_blocks}, which sizes the swap pool"
    yield from _useless_for_swapping(config)
    if scheduler.evict_for_priority and scheduler.scheduling_policy is SchedulingPolicy.FCFS:
        yield "evict_for_priority", "with scheduling_policy=fcfs, where all requests are equally urgent"
    if not config.model.lora.enable_lora:
        for name in ("max_loras", "max_cpu_loras", "max_lora_rank"):
            yield name, "with enable_lora off"
    if not cache.enable_prefix_caching:
        yield "prefix_hash_seed", "with enable_prefix_caching off"
    if scheduler.scheduling_mode is SchedulingMode.PHASED:
        why = "with scheduling_mode=phased, where a prompt runs whole and not next to decodes"
    elif not scheduler.enable_chunked_prefill:
        why = "with enable_chunked_prefill off, where a prompt runs whole"
    else:
        return
    prefill = scheduler.prefill
    if prefill.long_prefill_token_threshold:
        yield "long_prefill_token_threshold", why
    if scheduler.scheduling_mode is SchedulingMode.PHASED:
        if prefill.prefill_beside_decodes:
            yield "prefill_beside_decodes", why
        if not scheduler.enable_chunked_prefill:
            yield "enable_chunked_prefill", why


def _useless_for_swapping(config: EngineConfig) -> Iterator[tuple[str, str]]:
    cache, mode = config.cache, config.scheduler.preemption_mode
    host_blocks = config.debug.num_host_blocks
    can_swap = cache.swap_space > 0 if host_blocks is None else host_blocks > 0
    if mode is PreemptionMode.RECOMPUTE and can_swap:
        yield "swap_space", "with preemption_mode=recompute, which never swaps"
        yield "num_host_blocks", "with preemption_mode=recompute, which never swaps"
    if mode in (PreemptionMode.SWAP, PreemptionMode.COST) and not can_swap:
        yield "preemption_mode", f"as {mode.value} with swap_space=0: preempted requests are recomputed; set swap_space"
