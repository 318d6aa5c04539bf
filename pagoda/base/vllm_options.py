"""Options of vLLM that pagoda does not have: what to use instead, or why none is needed.

Command lines and scripts written for vLLM contain them. They are refused with an answer, never ignored.
"""

import re
from collections.abc import Callable

_NOTHING_TO_COMPILE = "CUDA graphs are captured when they are first needed, and nothing is compiled; leave it out"
_NO_MEDIA = "models that read images, audio or video are not supported yet"
_DETECTED = "it is recognised from the model's files; leave it out"
_TASKS = "what a model can do follows from its files, and requests of all its tasks run in one engine; leave it out"
_CONFIG_FILE = "edit config.json in a local copy of the model"
_CORS = "{cors_origins} allows an origin; methods and headers are not restricted"
_SPECULATIVE = "use {speculative_config}"
_TEMPLATE_REASONING = "reasoning is recognised from the chat template; leave it out"
_GRAMMARS = "structured output always uses llguidance, there is no xgrammar or other backend; leave it out"
_PROXY = "set it in a proxy in front of the server"

VLLM_ANSWERS = {
    # Model and files
    "trust_remote_code": "code from a model repository is never run; leave it out",
    "download_dir": "use {cache_dir}",
    "hf_token": "log in with `hf auth login`, or set the environment variable HF_TOKEN",
    "load_format": _DETECTED,
    "config_format": _DETECTED,
    "tokenizer_mode": _DETECTED,
    "tokenizer_revision": "use {tokenizer} with a local folder",
    "skip_tokenizer_init": "the tokenizer is always loaded; leave it out",
    "model_impl": "models are always run by pagoda's own code; leave it out",
    "hf_config_path": _CONFIG_FILE,
    "rope_scaling": _CONFIG_FILE,
    "rope_theta": _CONFIG_FILE,
    "generation_config": "generation_config.json is not read: send sampling parameters with each request",
    "override_generation_config": "send sampling parameters with each request",
    "task": _TASKS,
    "runner": _TASKS,
    "convert": _TASKS,
    "pooler_config": "use {pooling_type}; normalize is a field of each request",
    "override_pooler_config": "use {pooling_type}; normalize is a field of each request",
    "logits_processors": "use logit_bias, allowed_token_ids or structured outputs in the request",
    "logits_processor_pattern": "use logit_bias, allowed_token_ids or structured outputs in the request",
    "limit_mm_per_prompt": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "enable_lora_bias": "the biases of adapters that have them are always applied; leave it out",
    "lora_dtype": "adapters are held in the compute type: use {dtype}",
    "lora_extra_vocab_size": "adapters cannot add tokens to the vocabulary; leave it out",
    "fully_sharded_loras": "both matrices of an adapter are divided as the layer is; leave it out",
    # Memory and KV cache
    "cpu_offload_gb": "weights are not offloaded; {quantization}=int8 halves them",
    "kv_cache_memory_bytes": "use {kv_cache_memory}",
    "num_gpu_blocks_override": "use {kv_cache_memory}, or {num_blocks} in tests",
    "num_cpu_blocks_override": "use {swap_space}",
    "calculate_kv_scales": "the scales of an int8 KV cache are always computed; leave it out",
    "prefix_caching_hash_algo": "there is only one algorithm, with a secret seed; leave it out",
    "disable_sliding_window": "sliding windows cannot be switched off; leave it out",
    "disable_hybrid_kv_cache_manager": "full and sliding layers always have their own blocks; leave it out",
    "kv_transfer_config": "KV caches cannot be transferred between servers",
    "enable_sleep_mode": "the server cannot free its memory while it runs; stop and start it",
    # Speed and devices
    "enforce_eager": _NOTHING_TO_COMPILE,
    "compilation_config": _NOTHING_TO_COMPILE,
    "cuda_graph_sizes": _NOTHING_TO_COMPILE,
    "max_seq_len_to_capture": _NOTHING_TO_COMPILE,
    "data_parallel_size": "start one `pagoda serve` per replica behind a load balancer",
    "enable_expert_parallel": "each worker has a share of every expert: use {tensor_parallel_size}",
    "disable_custom_all_reduce": "there is only one all-reduce, which sums in the order of the ranks; leave it out",
    "max_parallel_loading_workers": "each worker reads only its share of the weights; leave it out",
    "worker_use_ray": "use {distributed_executor_backend}=ray",
    "max_long_partial_prefills": "use {max_num_partial_prefills}",
    "num_scheduler_steps": "each step is scheduled on its own; leave it out",
    "multi_step_stream_outputs": "each step is scheduled on its own; leave it out",
    "stream_interval": "each token is sent as soon as it is ready; leave it out",
    "use_v2_block_manager": "there is only one block manager; leave it out",
    "speculative_model": _SPECULATIVE,
    "ngram_prompt_lookup_max": _SPECULATIVE,
    "ngram_prompt_lookup_min": _SPECULATIVE,
    "guided_decoding_backend": _GRAMMARS,
    "structured_outputs_config": _GRAMMARS,
    # Server
    "enable_auto_tool_choice": "tool calls are on; {tool_call_parser} sets how they are read",
    "tool_parser_plugin": "use {tool_call_parser} with one of the known formats",
    "reasoning_parser": _TEMPLATE_REASONING,
    "enable_reasoning": _TEMPLATE_REASONING,
    "response_role": "the role is always assistant; leave it out",
    "enable_prompt_tokens_details": "the usage always contains the cached tokens; leave it out",
    "enable_force_include_usage": "send stream_options.include_usage with the request",
    "return_tokens_as_token_ids": "send return_token_ids with the request",
    "disable_log_stats": "statistics are served at /metrics and not logged; leave it out",
    "disable_log_requests": "prompts are never logged; {access_log} controls the line per request",
    "enable_log_requests": "{access_log} controls the line per request; prompts are never logged",
    "max_log_len": "prompts are never logged; leave it out",
    "disable_uvicorn_access_log": "use {no_access_log}",
    "uvicorn_log_level": "use `pagoda --verbose` or `pagoda --debug` in front of the command",
    "allowed_origins": "use {cors_origins}",
    "allowed_methods": _CORS,
    "allowed_headers": _CORS,
    "allow_credentials": _CORS,
    "root_path": _PROXY,
    "middleware": _PROXY,
    "ssl_ca_certs": f"client certificates are not checked; {_PROXY}",
    "ssl_cert_reqs": f"client certificates are not checked; {_PROXY}",
    "uds": "the server listens on TCP: use {host} and {port}",
    "api_server_count": "start several `pagoda serve` behind a load balancer",
    "disable_frontend_multiprocessing": "the engine always runs in a process of its own; leave it out",
    "otlp_traces_endpoint": "traces are not exported; /metrics has the times of each phase of a request",
}
"""Option -> the answer. {name} is replaced by how the user writes that setting of pagoda."""


def answer_for_vllm(option: str, spell: Callable[[str], str]) -> str | None:
    """Return what to use instead of an option of vLLM, or why it is not needed; None for any other name.

    option: may name a field, as `structured_outputs_config.backend` does.
    spell: turns the name of a setting into what the user types, such as a flag.
    """
    answer = VLLM_ANSWERS.get(option.partition(".")[0])
    return None if answer is None else re.sub(r"\{(\w+)\}", lambda name: spell(name[1]), answer)
