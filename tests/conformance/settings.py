"""The format's config and request keys, as pagoda's own records."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagoda.base.config import CacheConfig, SchedulingMode, SchedulingPolicy
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.kv import KVGroupKind, KVGroupSpec
from pagoda.core.request import LoraRef, MediaItem, Request
from pagoda.core.scheduler_options import SchedulerOptions

CONFIG_KEYS = {
    *("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "policy", "mode"),
    *("enable_prefix_caching", "enable_chunked_prefill", "long_prefill_token_threshold", "watermark"),
    *("reserve_full_prompt", "pipeline_depth", "async_scheduling", "num_speculative_tokens", "max_loras", "kv_groups"),
    *("encoder_budget", "encoder_cache", "no_partial_images", "encoder_decoder", "num_stages"),
}
REQUEST_KEYS = {
    *("id", "prompt", "max_tokens", "outputs", "eos", "stop_token_ids", "min_tokens", "arrival_step", "arrival_time"),
    *("priority", "drafts", "lora", "cache_salt", "skip_prefix_read", "images"),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a Scheduler is built from."""

    scheduler: SchedulerOptions
    cache: CacheConfig
    kv_groups: tuple[KVGroupSpec, ...]
    num_blocks: int
    max_model_len: int
    encoder_decoder: bool


def settings_of(config: dict[str, Any]) -> Settings:
    """Raises ValueError for a key that the format does not know, so that no scenario passes by being ignored."""
    unknown = config.keys() - CONFIG_KEYS
    if unknown:
        raise ValueError(f"unknown config keys: {sorted(unknown)}")
    num_blocks = config["num_blocks"]
    budget = config.get("encoder_budget", 0)
    scheduler = SchedulerOptions(
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        scheduling_mode=SchedulingMode(config.get("mode", "mixed")),
        scheduling_policy=SchedulingPolicy(config.get("policy", "fcfs")),
        enable_chunked_prefill=config.get("enable_chunked_prefill", True),
        admit_whole_prompt=config.get("reserve_full_prompt", True),
        long_prefill_token_threshold=config.get("long_prefill_token_threshold", 0),
        max_loras=config.get("max_loras", 0),
        pipeline_depth=config.get("pipeline_depth", 1),
        async_scheduling=config.get("async_scheduling", False),
        num_stages=config.get("num_stages", 1),
        has_followers=config.get("num_stages", 1) > 1,
        encoder_budget=budget,
        encoder_cache_tokens=config.get("encoder_cache", budget),
        no_partial_media=config.get("no_partial_images", False),
    )
    cache = CacheConfig(
        block_size=config["block_size"],
        enable_prefix_caching=config.get("enable_prefix_caching", False),
        watermark=config.get("watermark", 0.0),
    )
    groups = tuple(
        KVGroupSpec(KVGroupKind(group["kind"]), window=group.get("window", 0), layers=(index,))
        for index, group in enumerate(config.get("kv_groups") or [{"kind": "full"}])
    )
    return Settings(scheduler, cache, groups, num_blocks, config["max_model_len"], config.get("encoder_decoder", False))


def request_of(record: dict[str, Any], arrival: int, encoder_decoder: bool) -> Request:
    """A request whose prompt is spelled out. `arrival` orders those that name no arrival time, and is its handle."""
    unknown = record.keys() - REQUEST_KEYS
    if unknown:
        raise ValueError(f"unknown request keys: {sorted(unknown)}")
    media = tuple(MediaItem(item["hash"], item["offset"], item["length"]) for item in record.get("images", []))
    return Request(
        request_id=record["id"],
        prompt_token_ids=np.asarray(record["prompt"], np.int32),
        sampling=SamplingParams(
            max_tokens=record["max_tokens"],
            min_tokens=record.get("min_tokens", 0),
            stop_token_ids=tuple(record.get("stop_token_ids") or ()),
        ),
        arrival_time_s=record.get("arrival_time", float(arrival)),
        priority=record.get("priority", 0),
        handle=arrival,
        eos_token_ids=(record["eos"],) if record.get("eos") is not None else (),
        lora=LoraRef(record["lora"]) if record.get("lora") else None,
        cache_salt=record.get("cache_salt"),
        skip_prefix_read=bool(record.get("skip_prefix_read", False)),
        media=media,
        encoder_len=media[0].length if encoder_decoder and media else 0,
    )
