"""What each setting may be on its own, and which settings have no effect next to others.

Other rules of how settings go together, and with a model, are checked where they meet.
"""

import ipaddress
import typing
from collections.abc import Iterator
from enum import Enum
from numbers import Integral, Real

from pagoda.base.abbreviate import abbreviate
from pagoda.base.config import PARTS, EngineConfig, PreemptionMode, PrefillConfig, SchedulingMode, SchedulingPolicy
from pagoda.base.errors import ConfigError
from pagoda.base.kv_tier import read_kv_tier
from pagoda.base.ranks import MAX_RANKS
from pagoda.base.registry import nearest
from pagoda.base.setting import DescribedSetting, describe_settings


def check_settings(config: EngineConfig) -> None:
    """Check the type, range and words of every setting. Raises ConfigError with the name, value and remedy."""
    for part in PARTS:
        _check_fields(getattr(config, part))
    cache, server = config.cache, config.server
    if not 0 < cache.gpu_memory_utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization={cache.gpu_memory_utilization} must be in (0, 1]")
    if not 0 <= cache.watermark < 1:
        raise ConfigError(f"watermark={cache.watermark} must be in [0, 1)")
    if "" in server.api_keys or server.admin_api_key == "":
        raise ConfigError("an API key is empty: give a key, or leave the option out")
    if server.root_path and not server.root_path.startswith("/"):
        raise ConfigError(f"root_path={abbreviate(server.root_path)} must begin with a slash")
    if server.admin_api_key in server.api_keys:
        raise ConfigError(
            "admin_api_key must not be one of api_keys, or all users of that key would be administrators; use another"
        )
    if config.parallel.batch_invariant and config.parallel.kernels in ("torch", "reference"):
        raise ConfigError(
            f"batch_invariant does not go with kernels={config.parallel.kernels!r}, whose results depend on the batch; "
            "take kernels='auto', or leave batch_invariant out"
        )
    _check_ranks(config)
    _check_tier(config)
    if config.debug.record is not None and server.data_parallel_size > 1:
        raise ConfigError(
            f"record goes with one engine, and data_parallel_size={server.data_parallel_size}: leave one of them out"
        )
    config.model.lora.check()
    cache.kv_events_config.check()
    if cache.kv_events_config.is_on and not cache.enable_prefix_caching:
        raise ConfigError("kv_events_config needs enable_prefix_caching: there are no other events; set one of them")
    for name in ("lora_modules", "lora_dir"):
        if getattr(server.lora_sources, name) and not config.model.lora.enable_lora:
            raise ConfigError(f"{name} needs enable_lora: set that too, or leave {name} out")
    for given in server.trusted_proxies:
        if given != "*" and not _is_network(given):
            raise ConfigError(
                f"forwarded_allow_ips={abbreviate(given)} must be an IP address, a network such as 10.0.0.0/8, or *"
            )
    if server.port is not None and server.port > 65535:
        raise ConfigError(f"port={server.port} must be in 0 .. 65535 (0: any free port)")


def _is_network(text: str) -> bool:
    """Return whether a string is an IP address or a network."""
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def _check_ranks(config: EngineConfig) -> None:
    """Check what does not go with several workers."""
    parallel, scheduler = config.parallel, config.scheduler
    if parallel.world_size == 1:
        return
    size = next(
        f"{name}={value}"
        for name in ("tensor_parallel_size", "pipeline_parallel_size")
        if (value := getattr(parallel, name)) > 1
    )
    if parallel.world_size > MAX_RANKS:
        raise ConfigError(
            f"tensor_parallel_size={parallel.tensor_parallel_size} times "
            f"pipeline_parallel_size={parallel.pipeline_parallel_size} makes {parallel.world_size} workers: at most "
            f"{MAX_RANKS} compute one model; take fewer, and several servers behind a proxy"
        )
    if parallel.executor == "in_process":
        raise ConfigError(f"{size} does not go with distributed_executor_backend='in_process'; take 'mp'")
    if scheduler.async_scheduling:
        raise ConfigError(f"{size} does not go with async_scheduling yet; leave async_scheduling out")
    if scheduler.speculative_config.method == "layer_skip":
        raise ConfigError(
            f"{size} does not go with speculative_config.method='layer_skip', whose drafts run layers of the model "
            "itself; take 'ngram', 'suffix' or 'draft_model'"
        )


def _check_tier(config: EngineConfig) -> None:
    """Check the setting `kv_tier`, and what does not go with it."""
    tier, parallel = config.cache.kv_tier, config.parallel
    if tier is None:
        return
    read_kv_tier(tier)
    if not config.cache.enable_prefix_caching:
        raise ConfigError("kv_tier needs enable_prefix_caching: turn that on, or leave kv_tier out")
    if parallel.executor != "in_process":
        raise ConfigError(
            f"kv_tier goes with one worker in the engine's process, not with tensor_parallel_size="
            f"{parallel.tensor_parallel_size}, pipeline_parallel_size={parallel.pipeline_parallel_size} and the "
            f"executor {parallel.executor!r}: leave it out, or take data_parallel_size"
        )
    if config.debug.record is not None:
        raise ConfigError("kv_tier does not go with record, which would have to hold what it found: leave one out")


def _check_fields(settings: object, group: str = "") -> None:
    """Check the fields of one settings object, and those of its groups.   group: its name and a dot, for a group."""
    for item in describe_settings(type(settings)):
        value = getattr(settings, item.name)
        _check_type(item, value, group + item.name)
        if item.is_group:
            _check_fields(value, f"{item.name}.")
        low, words = item.setting.at_least, item.setting.words
        if low is not None and value is not None and not value >= low:  # `not >=` is also true of NaN
            raise ConfigError(f"{group}{item.name}={value} must be at least {low}")
        if words and value is not None and value not in words:
            raise ConfigError(f"{group}{item.name}={abbreviate(value)} is unknown{nearest(str(value), list(words))}")


_NOUNS: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "a string"),
    tuple: (tuple, "strings"),
    dict: (dict, "a mapping of names to values"),
}
"""Annotation -> the class that its values have, and what to call it."""


def _check_type(item: DescribedSetting, value: object, name: str) -> None:
    """Raise ConfigError unless `value` has the type of its setting. A bool is not a number."""
    if value is None and item.optional:
        return
    wanted = typing.cast("type", typing.get_origin(item.type) or item.type)
    if issubclass(wanted, Enum):
        kind, noun = wanted, f"one of {', '.join(repr(member.value) for member in wanted)}"
    else:
        kind, noun = _NOUNS.get(wanted, (wanted, wanted.__name__))
    fits = isinstance(value, kind) and (wanted is bool or not isinstance(value, bool))
    if isinstance(value, tuple):
        fits = fits and all(isinstance(text, str) for text in typing.cast("tuple[object, ...]", value))
    shown = name if item.setting.is_secret else f"{name}={abbreviate(value)}"
    if not fits:
        raise ConfigError(f"{shown} must be {noun}")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:  # what a message to an engine can hold
        raise ConfigError(f"{shown} must be less than {1 << 64} and at least {-(1 << 63)}")


# ---- settings without effect, which are reported at start


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
