"""EngineArgs: the options of an engine as a dataclass, whose signature LLM and AsyncLLM share.

Its fields are written by docs/reference/generate.py (`make docs`) from the declarations of the settings.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from pagoda.base.config import (
    EngineConfig,
    LogprobsMode,
    PreemptionMode,
    PrefillConfig,
    SchedulingMode,
    SchedulingPolicy,
)
from pagoda.base.errors import ConfigError
from pagoda.base.hf_overrides import HFOverrides
from pagoda.base.kv_events_config import KVEventsConfig
from pagoda.base.lora import LoRAConfig
from pagoda.base.request_limits import RequestLimits
from pagoda.base.speculative_config import SpeculativeConfig
from pagoda.base.vllm_options import ALIASES

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


@dataclass(slots=True)
class EngineArgs:
    """The options of an engine, for the `from_engine_args` of LLM, AsyncLLM and LLMEngine.

    `EngineArgs(model, **options)` takes what `LLM(model, **options)` takes: the settings in settings.md, and vLLM's
    options. None: not given. Raises ConfigError. Fields may be changed before they are used.
    """

    # ---- generated
    model: str | PathLike[str] | None = None
    _: KW_ONLY
    tokenizer: str | PathLike[str] | None = None
    revision: str | PathLike[str] | None = None
    source: Literal["huggingface", "modelscope"] | None = None
    cache_dir: str | PathLike[str] | None = None
    dtype: str | None = None
    quantization: Literal["none", "int8", "fp8", "gguf", "awq", "gptq", "compressed-tensors", "mxfp4"] | None = None
    max_model_len: int | Literal["auto"] | None = None
    hf_overrides: HFOverrides | Mapping[str, Any] | None = None
    pooling_type: Literal["auto", "cls", "last", "mean"] | None = None
    enable_prompt_embeds: bool | None = None
    seed: int | Literal["auto"] | None = None
    chat_template: str | PathLike[str] | None = None
    parse_special_tokens_in_chat: bool | None = None
    generation_config: str | PathLike[str] | None = None
    override_generation_config: Mapping[str, Any] | None = None
    served_model_name: str | list[str] | tuple[str, ...] | None = None
    allowed_media_domains: str | list[str] | tuple[str, ...] | None = None
    logprobs_mode: (
        LogprobsMode | Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] | None
    ) = None
    lora: LoRAConfig | Mapping[str, Any] | None = None
    enable_lora: bool | None = None
    max_loras: int | Literal["auto"] | None = None
    max_cpu_loras: int | Literal["auto"] | None = None
    max_lora_rank: int | None = None
    request_limits: RequestLimits | Mapping[str, Any] | None = None
    max_logprobs: int | None = None
    block_size: int | None = None
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float | None = None
    swap_space: float | None = None
    kv_cache_dtype: str | None = None
    enable_prefix_caching: bool | None = None
    kv_events_config: KVEventsConfig | Mapping[str, Any] | None = None
    kv_tier: str | PathLike[str] | None = None
    watermark: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    scheduling_mode: SchedulingMode | Literal["mixed", "phased"] | None = None
    scheduling_policy: SchedulingPolicy | Literal["fcfs", "priority"] | None = None
    preemption_mode: PreemptionMode | Literal["auto", "recompute", "swap", "cost"] | None = None
    enable_chunked_prefill: bool | None = None
    prefill: PrefillConfig | Mapping[str, Any] | None = None
    max_num_partial_prefills: int | None = None
    long_prefill_token_threshold: int | None = None
    scheduler_delay_factor: float | None = None
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None
    scheduler_cls: str | type[Any] | None = None
    async_scheduling: bool | None = None
    evict_for_priority: bool | None = None
    device: str | PathLike[str] | None = None
    threads: int | Literal["auto"] | None = None
    kernels: Literal["auto", "native", "triton", "torch", "reference"] | None = None
    batch_invariant: bool | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    distributed_executor_backend: Literal["auto", "in_process", "mp", "ray", "fake"] | None = None
    num_blocks: int | Literal["auto"] | None = None
    num_host_blocks: int | Literal["auto"] | None = None
    prefix_hash_seed: int | Literal["auto"] | None = None
    pipeline_depth: int | Literal["auto"] | None = None
    check_invariants: bool | None = None
    decision_log_steps: int | None = None
    record: str | PathLike[str] | None = None
    record_tokens: bool | None = None
    # ---- end

    if not TYPE_CHECKING:  # what is not a field, and vLLM's options, have an answer of their own

        def __init__(self, model: str | PathLike[str] | None = None, **options: Any) -> None:
            options["model"] = model
            grouped = next((name for name in options if "." in name), None)
            if grouped is not None:
                group, _, name = grouped.partition(".")
                raise ConfigError(f"{grouped} is one field of a group: write {group}={{{name!r}: ...}}")
            EngineConfig.for_engine(**options)
            given = {ALIASES.get(name, name): value for name, value in options.items()}
            for item in dataclasses.fields(self):
                setattr(self, item.name, given.get(item.name))

    def create_engine_config(self) -> EngineConfig:
        """Return the settings of an engine with these options. Raises ConfigError."""
        return EngineConfig.for_engine(**{item.name: getattr(self, item.name) for item in dataclasses.fields(self)})


def settings_of(engine_args: EngineArgs | EngineConfig) -> EngineConfig:
    """Return the settings that someone gave to `from_engine_args`. Raises ConfigError."""
    return engine_args.create_engine_config() if isinstance(engine_args, EngineArgs) else engine_args


def with_options_of(
    args: Callable[P, EngineArgs],
) -> Callable[[Callable[Concatenate[S, ...], R]], Callable[Concatenate[S, P], R]]:
    """Return a decorator for a method that takes a model and options: editors and `help` show those of `args`."""
    fields = dataclasses.fields(EngineArgs)
    kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD] + [inspect.Parameter.KEYWORD_ONLY] * (len(fields) - 1)
    shown = [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *(
            inspect.Parameter(item.name, kind, default=None, annotation=item.type)
            for item, kind in zip(fields, kinds, strict=True)
        ),
    ]

    def decorate(method: Callable[Concatenate[S, ...], R]) -> Callable[Concatenate[S, P], R]:
        method.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        return method

    return decorate


EngineArgs.__init__ = with_options_of(EngineArgs)(EngineArgs.__init__)  # type: ignore[method-assign]
