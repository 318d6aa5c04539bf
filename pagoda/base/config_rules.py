"""What each setting may be on its own. How settings go together, and with a model, is judged where they meet."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from numbers import Integral, Real

from pagoda.base.abbreviate import abbreviate
from pagoda.base.config import (
    PARTS,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
)
from pagoda.base.errors import ConfigError
from pagoda.base.registry import nearest

AT_LEAST: Mapping[type, Mapping[str, float]] = {
    ModelConfig: {"max_logprobs": 0},
    CacheConfig: {
        "block_size": 1,
        "kv_cache_memory": 1,
        "num_blocks": 1,
        "swap_space": 0,
        "num_host_blocks": 0,
    },
    SchedulerConfig: {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "max_num_partial_prefills": 0,
        "long_prefill_token_threshold": 0,
        "prefill_beside_decodes": 0,
        "scheduler_delay_factor": 0,
        "num_lookahead_slots": 0,
        "num_speculative_tokens": 0,
        "max_loras": 0,
        "pipeline_depth": 1,
        "encoder_budget": 0,
        "encoder_cache_tokens": 0,
        "decision_log_steps": 0,
    },
    ParallelConfig: {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "threads": 1},
    ServerConfig: {
        "port": 0,
        "max_queued_requests": 0,
        "max_queued_tokens": 0,
        "max_queued_bytes": 0,
        "max_requests_per_key": 0,
        "requests_per_minute_per_key": 0,
        "max_body_bytes": 1,
        "max_header_bytes": 1,
        "max_connections": 0,
        "header_timeout_s": 0,
        "body_timeout_s": 0,
        "send_timeout_s": 0,
        "drain_timeout_s": 0,
        "template_timeout_s": 0.001,
        "template_memory_bytes": 2**20,
        "step_timeout_s": 0,
    },
}
"""Smallest value of a number, by its owner and name."""

WORDS: Mapping[type, Mapping[str, tuple[str | None, ...]]] = {
    ModelConfig: {
        "source": ("huggingface", "modelscope"),
        "dtype": ("auto", "bfloat16", "float16", "float32"),
        "quantization": (None, "int8", "gguf"),
    },
    CacheConfig: {"kv_cache_dtype": ("auto", "bfloat16", "float16", "float32", "int8")},
    ParallelConfig: {
        "device": ("auto", "cpu", "cuda"),
        "distributed_executor_backend": ("in_process", "fake"),
        "kernels": ("auto", "native", "torch", "reference"),
    },
}
"""All values of a setting that is one of a few words."""


def check_settings(config: EngineConfig) -> None:
    """Every setting for itself: its type, its range, its words. Raises ConfigError with the name, value and remedy."""
    for part in PARTS:
        settings = getattr(config, part)
        kind = type(settings)
        hints = typing.get_type_hints(kind)
        for item in dataclasses.fields(settings):
            value = getattr(settings, item.name)
            _check_type(item.name, value, hints[item.name])
            low = AT_LEAST.get(kind, {}).get(item.name)
            if low is not None and value is not None and not value >= low:  # `not >=` is true of a NaN too
                raise ConfigError(f"{item.name}={value} must be at least {low}")
            words = WORDS.get(kind, {}).get(item.name)
            if words is not None and value not in words:
                known = [word for word in words if word is not None]
                raise ConfigError(f"{item.name}={abbreviate(value)} is unknown{nearest(str(value), known)}")
    cache, server = config.cache, config.server
    if not 0 < cache.gpu_memory_utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization={cache.gpu_memory_utilization} must be in (0, 1]")
    if not 0 <= cache.watermark < 1:
        raise ConfigError(f"watermark={cache.watermark} must be in [0, 1)")
    if "" in server.api_keys or server.admin_api_key == "":
        raise ConfigError("an API key is empty: give a key, or leave the option out")
    if server.admin_api_key in server.api_keys:
        raise ConfigError("admin_api_key is one of api_keys: its holders would all be administrators; choose another")
    if server.port > 65535:
        raise ConfigError(f"port={server.port} must be in 0 .. 65535 (0: any free port)")


_NOUNS: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "a string"),
    tuple: (tuple, "strings"),
}
"""Annotation -> the class that its values have, and how to call it."""


def _check_type(name: str, value: object, hint: object) -> None:
    """ConfigError unless `value` is what the field's annotation says. A bool is no number."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in members:
        return
    wanted = typing.cast("type", typing.get_origin(members[0]) or members[0])
    if issubclass(wanted, Enum):
        kind, noun = wanted, f"one of {', '.join(repr(member.value) for member in wanted)}"
    else:
        kind, noun = _NOUNS.get(wanted, (wanted, wanted.__name__))
    fits = isinstance(value, kind) and (wanted is bool or not isinstance(value, bool))
    if isinstance(value, tuple):
        fits = fits and all(isinstance(text, str) for text in typing.cast("tuple[object, ...]", value))
    if not fits:
        raise ConfigError(f"{name}={abbreviate(value)} must be {noun}")
