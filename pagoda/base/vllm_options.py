"""Options of vLLM that pagoda does not have: other names for its own, options without a meaning here, and refusals.

Command lines and scripts written for vLLM contain them. Those with the same meaning are accepted, those that change no
result are reported and left out, and the others are refused with an answer, all in one error.
"""

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from pagoda.base.errors import ConfigError

logger = logging.getLogger("pagoda")

ALIASES: Mapping[str, str] = {
    "allowed_origins": "cors_origins",
    "download_dir": "cache_dir",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "shutdown_timeout": "server_timeouts.drain_timeout_s",
}
"""Options that mean the same as a setting of pagoda -> its name."""

_NOTHING_TO_COMPILE = "CUDA graphs are captured when they are first needed, and nothing is compiled"
_DETECTED = "it is recognised from the model's files"
_TASKS = "what a model can do follows from its files, and requests of all its tasks run in one engine"
_CORS = "{cors_origins} allows an origin; methods and headers are not restricted"
_REASONING = "reasoning is recognised from the chat template"
_GRAMMARS = "structured output always uses llguidance, there is no xgrammar or other backend"
_STEPS = "each step is scheduled on its own"
_ALWAYS = "the server always does so"
_NEVER_LOGGED = "prompts are never logged; {access_log} controls the line per request"

IGNORED: Mapping[str, str] = {
    # Model and files
    "trust_remote_code": "code from a model repository is never run",
    "hf_token": "log in with `hf auth login`, or set the environment variable HF_TOKEN",
    "load_format": _DETECTED,
    "config_format": _DETECTED,
    "tokenizer_mode": _DETECTED,
    "skip_tokenizer_init": "the tokenizer is always loaded",
    "model_impl": "models are always run by pagoda's own code",
    "task": _TASKS,
    "runner": _TASKS,
    "convert": _TASKS,
    "limit_mm_per_prompt": "{request_limits} has images, the most images in a prompt",
    "language_model_only": "a request without images computes none",
    "code_revision": "code from a model repository is never run",
    "ignore_patterns": "only the files that loading needs are fetched",
    "safetensors_load_strategy": "weights are read in pieces, and each worker reads its share",
    "model_loader_extra_config": _DETECTED,
    "enable_lora_bias": "the biases of adapters that have them are always applied",
    "lora_dtype": "adapters are held in the compute type",
    "fully_sharded_loras": "both matrices of an adapter are divided as the layer is",
    # Memory and KV cache
    "cpu_offload_gb": "weights are not offloaded; {quantization}=int8 halves them",
    "num_cpu_blocks_override": "{swap_space} sizes the host memory of swapped requests",
    "calculate_kv_scales": "the scales of an int8 KV cache are always computed",
    "prefix_caching_hash_algo": "there is only one algorithm, with a secret seed",
    "disable_sliding_window": "sliding windows cannot be switched off",
    "disable_hybrid_kv_cache_manager": "full and sliding layers always have their own blocks",
    # Speed and devices
    "enforce_eager": _NOTHING_TO_COMPILE,
    "optimization_level": _NOTHING_TO_COMPILE,
    "performance_mode": _NOTHING_TO_COMPILE,
    "attention_backend": "{kernels} chooses the kernels of all ops",
    "enable_flashinfer_autotune": "{kernels} chooses the kernels of all ops",
    "disable_cascade_attention": "outputs never depend on which requests share a prefix",
    "numa_bind": "the engine process keeps its threads on cores; start it with numactl for a node",
    "compilation_config": _NOTHING_TO_COMPILE,
    "cuda_graph_sizes": _NOTHING_TO_COMPILE,
    "max_seq_len_to_capture": _NOTHING_TO_COMPILE,
    "enable_expert_parallel": "each worker has a share of every expert: see {tensor_parallel_size}",
    "disable_custom_all_reduce": "there is only one all-reduce, which sums in the order of the ranks",
    "max_parallel_loading_workers": "each worker reads only its share of the weights",
    "worker_use_ray": "{distributed_executor_backend}=ray runs the workers on a Ray cluster",
    "max_long_partial_prefills": "{max_num_partial_prefills} limits them together with the others",
    "num_scheduler_steps": _STEPS,
    "multi_step_stream_outputs": _STEPS,
    "stream_interval": "each token is sent as soon as it is ready",
    "use_v2_block_manager": "there is only one block manager",
    "guided_decoding_backend": _GRAMMARS,
    "structured_outputs_config": _GRAMMARS,
    # Server
    "enable_auto_tool_choice": "tool calls are on; {tool_call_parser} sets how they are read",
    "reasoning_parser": _REASONING,
    "enable_reasoning": _REASONING,
    "chat_template_content_format": "the form of a message's content is recognised from the chat template",
    "enable_prompt_tokens_details": _ALWAYS,
    "enable_request_id_headers": _ALWAYS,
    "exclude_tools_when_tool_choice_none": "a request with tool_choice none has no tools in its prompt",
    "enable_tokenizer_info_endpoint": "/tokenizer_info is always there",
    "enable_server_load_tracking": "/load is always there",
    "enable_offline_docs": "/docs needs no network",
    "show_hidden_metrics_for_version": "no metric is hidden",
    "collect_detailed_traces": "traces are not exported; /metrics has the times of each phase of a request",
    "profiler_config": "`pagoda bench throughput --profile` shows where the time goes",
    "disable_access_log_for_endpoints": "{no_access_log} switches off the line per request",
    "log_config_file": "the form of the log lines is fixed",
    "h11_max_incomplete_event_size": "headers have a fixed limit",
    "enable_ssl_refresh": "restart the server for a new certificate",
    "disable_log_stats": "statistics cost nothing and are at /metrics",
    "disable_log_requests": _NEVER_LOGGED,
    "enable_log_requests": _NEVER_LOGGED,
    "enable_log_outputs": _NEVER_LOGGED,
    "max_log_len": _NEVER_LOGGED,
    "disable_uvicorn_access_log": "{no_access_log} switches off the line per request",
    "uvicorn_log_level": "{log_level} sets what is logged",
    "disable_fastapi_docs": "/docs shows the routes and nothing else",
    "disable_frontend_multiprocessing": "the engine always runs in a process of its own",
    "otlp_traces_endpoint": "traces are not exported; /metrics has the times of each phase of a request",
}
"""Options that change no result here -> what holds instead."""

_CONFIG_FILE = "edit config.json in a local copy of the model"
_SPECULATIVE = "use {speculative_config}"
_POOLER = "use {pooling_type}; normalize is a field of each request"
_LOGITS = "use logit_bias, allowed_token_ids or structured outputs in the request"
_PROXY = "set it in a proxy in front of the server"

REFUSED: Mapping[str, str] = {
    "tokenizer_revision": "use {tokenizer} with a local folder",
    "hf_config_path": _CONFIG_FILE,
    "rope_scaling": _CONFIG_FILE,
    "rope_theta": _CONFIG_FILE,
    "rope_parameters": _CONFIG_FILE,
    "mm_processor_kwargs": "edit preprocessor_config.json in a local copy of the model",
    "pooler_config": _POOLER,
    "override_pooler_config": _POOLER,
    "logits_processors": _LOGITS,
    "logits_processor_pattern": _LOGITS,
    "lora_extra_vocab_size": "adapters cannot add tokens to the vocabulary",
    "enable_sleep_mode": "the server cannot free its memory while it runs; end it and start it again",
    "allowed_methods": _CORS,
    "allowed_headers": _CORS,
    "allow_credentials": _CORS,
    "kv_transfer_config": "KV caches cannot be transferred between servers",
    "truncation_side": "set truncation_side in the request, next to truncate_prompt_tokens",
    "nnodes": "use {distributed_executor_backend}=ray for several machines",
    "node_rank": "use {distributed_executor_backend}=ray for several machines",
    "master_addr": "use {distributed_executor_backend}=ray for several machines",
    "tokens_only": "the server always tokenizes; send token ids to /v1/completions",
    "spec_method": _SPECULATIVE,
    "speculative_model": _SPECULATIVE,
    "ngram_prompt_lookup_max": _SPECULATIVE,
    "ngram_prompt_lookup_min": _SPECULATIVE,
    "tool_parser_plugin": "use {tool_call_parser} with one of the known formats",
    "response_role": "the role is always assistant",
    "middleware": _PROXY,
    "ssl_ca_certs": f"client certificates are not checked; {_PROXY}",
    "ssl_cert_reqs": f"client certificates are not checked; {_PROXY}",
}
"""Options whose absence would change a result, or open the server to others -> what to use instead."""

_NEUTRAL: Mapping[str, tuple[str, ...]] = {
    "allowed_headers": ("*", '["*"]', "['*']"),
    "allowed_methods": ("*", '["*"]', "['*']"),
    "nnodes": ("1",),
    "node_rank": ("0",),
    "response_role": ("assistant",),
    "truncation_side": ("left",),
}
"""What refused options may be, written as text: it is what holds here. All may be None, False or empty."""

_SWITCHES = """
trust_remote_code skip_tokenizer_init enable_lora_bias fully_sharded_loras calculate_kv_scales
disable_sliding_window disable_hybrid_kv_cache_manager enable_sleep_mode enforce_eager
enable_expert_parallel disable_custom_all_reduce worker_use_ray multi_step_stream_outputs
use_v2_block_manager enable_auto_tool_choice enable_reasoning enable_prompt_tokens_details
enable_request_id_headers exclude_tools_when_tool_choice_none enable_tokenizer_info_endpoint
enable_server_load_tracking disable_log_stats disable_log_requests enable_log_requests enable_log_outputs
disable_uvicorn_access_log allow_credentials disable_fastapi_docs disable_frontend_multiprocessing
language_model_only enable_flashinfer_autotune disable_cascade_attention numa_bind
enable_offline_docs enable_ssl_refresh tokens_only
"""
SWITCHES = frozenset(_SWITCHES.split())
"""Options whose flag takes no value."""


API_KEY_VARIABLE = "VLLM_API_KEY"
"""The environment variable of vLLM's with a server's key, which is one here, too."""

GUARDS: Mapping[str, str] = {
    "VLLM_MAX_N_SEQUENCES": "`n` is bounded by {max_num_seqs}",
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": "{server_limits}.max-body-bytes and {request_limits}.audio-s bound sound files",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "{allowed_media_domains} lists the domains, which each redirect is held to",
}
"""Environment variables of vLLM's that restrict what callers may do -> what does so here."""

_MET = ("VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "VLLM_USE_V1")
_OF_KUBERNETES = re.compile(r"VLLM_(SERVICE_|PORT)")
"""What Kubernetes sets in the containers next to a service that is named vllm."""


def key_from(environ: Mapping[str, str], spell: Callable[[str], str] = str) -> str | None:
    """Return the API key that vLLM's variable sets, if any; log the names of its other variables, without effect here.

    Raises ConfigError for those that protect a server, so that it is not open by mistake.
    """
    given = [name for name, value in environ.items() if name.startswith("VLLM_") and value]
    for name in given:
        if name in GUARDS:
            raise ConfigError(
                f"the environment variable {name} has no effect: {spelled(GUARDS[name], spell)}; unset it"
            )
    others = [name for name in given if name not in (API_KEY_VARIABLE, *_MET) and not _OF_KUBERNETES.match(name)]
    if others:
        logger.warning("environment variables of vLLM that have no effect here: %s", ", ".join(sorted(others)))
    return environ.get(API_KEY_VARIABLE) or None


def is_vllms(option: str) -> bool:
    """Return whether this is an option of vLLM that pagoda has under another name, ignores or refuses.

    option: may name a field, as `structured_outputs_config.backend` does.
    """
    name = option.partition(".")[0]
    return name in ALIASES or name in IGNORED or name in REFUSED


def translate(options: Mapping[str, Any], spell: Callable[[str], str] = str) -> tuple[dict[str, Any], list[str]]:
    """Return the options without those of vLLM, and what to say about those that are refused.

    Other names for a setting become its name; options without a meaning here are logged as one warning. Neutral values
    of what is refused, and None, are left out.
    spell: turns the name of an option into what the user typed, such as a flag.
    """
    kept: dict[str, Any] = {}
    ignored: list[str] = []
    refused: list[str] = []
    for option, value in options.items():
        name = option.partition(".")[0]
        if value is None and is_vllms(name):
            continue
        if name in IGNORED:
            ignored.append(f"{spell(option)} ({spelled(IGNORED[name], spell)})")
        elif name in REFUSED:
            if value in (False, [], (), {}) or str(value) in _NEUTRAL.get(option, ()):
                continue
            refused.append(f"{spell(option)} of vLLM is not supported: {spelled(REFUSED[name], spell)}")
        else:
            own = ALIASES.get(option, option)
            if own != option and own in options:
                raise ConfigError(f"{spell(option)} and {spell(own)} mean the same; give one of them")
            kept[own] = value
    if ignored:
        logger.warning("no effect here: %s", "; ".join(ignored))
    return kept, refused


def spelled(answer: str, spell: Callable[[str], str]) -> str:
    """Return an answer with the names of settings, which are in braces, as `spell` writes them."""
    return re.sub(r"\{(\w+)\}", lambda name: spell(name[1]), answer)
