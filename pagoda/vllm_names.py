"""vLLM's modules and names: where scripts look for them, and what to use for those that are not here.

`from vllm.sampling_params import SamplingParams` becomes `from pagoda.sampling_params import SamplingParams`: vLLM's
modules hold names of `pagoda`, and are made by a finder when they are first imported.
"""

from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES: Mapping[str, str] = {
    "beam_search": "BeamSearchOutput BeamSearchSequence",
    "config": "EngineConfig",
    "engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "entrypoints": "",
    "entrypoints.llm": "LLM",
    "inputs": "TextPrompt TokensPrompt",
    "logprobs": "Logprob",
    "lora": "",
    "lora.request": "LoRARequest",
    "outputs": """
        RequestOutput CompletionOutput PoolingRequestOutput PoolingOutput EmbeddingRequestOutput EmbeddingOutput
        ClassificationRequestOutput ClassificationOutput ScoringRequestOutput ScoringOutput""",
    "pooling_params": "PoolingParams",
    "sampling_params": "SamplingParams BeamSearchParams RequestOutputKind StructuredOutputsParams",
    "sequence": "Logprob RequestMetrics",
    "utils": "random_uuid",
    "v1": "",
    "v1.engine": "",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.metrics": "",
    "v1.metrics.reader": "Metric",
}
"""Modules of vLLM -> the names of `pagoda` that they hold."""

_FLAT = "settings are flat options: LLM(max_num_seqs=8, block_size=16), see docs/reference/settings.md"

INSTEAD: Mapping[str, str] = {
    "AsyncStream": "AsyncLLM.generate returns an async iterator",
    "BlockSpaceManager": "the KV cache is managed by pagoda.core.kv.KVCacheManager",
    "CacheConfig": _FLAT,
    "CompilationConfig": "nothing is compiled; leave it out",
    "EngineCoreRequest": "use pagoda.LLMEngine.add_request",
    "EngineDeadError": "use pagoda.WorkerDied",
    "FlexibleArgumentParser": "use argparse, and LLM(**vars(parser.parse_args()))",
    "GuidedDecodingParams": "use pagoda.StructuredOutputsParams",
    "KVTransferConfig": "KV caches cannot be transferred between engines",
    "LogitsProcessor": "use logit_bias, allowed_token_ids or structured_outputs of SamplingParams",
    "ModelConfig": _FLAT,
    "ModelRegistry": "models are part of pagoda, see docs/howto/add-a-model.md",
    "ParallelConfig": _FLAT,
    "PoolerConfig": "use LLM(pooling_type=...) and the fields of PoolingParams",
    "PromptType": "prompts are strings, lists of token ids, TextPrompt or TokensPrompt",
    "SchedulerConfig": _FLAT,
    "SequenceGroup": "a prompt with its n outputs is a pagoda.core.request.Request",
    "VllmConfig": "use pagoda.EngineConfig",
    "initialize_ray_cluster": "use LLM(distributed_executor_backend='ray')",
    "distributed": "ranks are started by LLM(tensor_parallel_size=..., distributed_executor_backend=...)",
    "model_executor": "models are part of pagoda, see docs/howto/add-a-model.md",
    "multimodal": "images are parts of messages, see docs/howto/images.md",
    "platforms": "devices are described in docs/howto/add-a-device.md",
    "reasoning": "reasoning is recognised from the chat template",
    "tool_parsers": "tool calls are parsed by `pagoda serve` and by chat, see docs/howto/tools.md",
    "transformers_utils": "use LLM.get_tokenizer(), or load the tokenizer with transformers",
}
"""Names and modules of vLLM that are not here -> what to use."""

METHODS: Mapping[str, str] = {
    "apply_model": "the model belongs to the engine's workers, and is not handed out",
    "check_health": "a request raises WorkerDied once the engine is gone",
    "collective_rpc": "workers take no calls of programs",
    "do_log_stats": "use get_metrics() of LLM, stats() of AsyncLLM",
    "errored": "a request raises WorkerDied once the engine is gone",
    "get_model_config": "use get_tokenizer(), and EngineArgs(...) for settings",
    "is_running": "a request raises WorkerDied once the engine is gone",
    "is_sleeping": "an engine does not sleep; close it, and make a new one",
    "preprocess_chat": "use get_tokenizer().apply_chat_template(messages)",
    "reward": "use encode(prompts, pooling_task=...)",
    "set_tokenizer": "use LLM(tokenizer=...)",
    "sleep": "an engine does not sleep; close it, and make a new one",
    "start_profile": "use `pagoda bench throughput --profile`",
    "stop_profile": "use `pagoda bench throughput --profile`",
    "wake_up": "an engine does not sleep; close it, and make a new one",
}
"""Methods of vLLM's LLM and AsyncLLM that are not here -> what to use."""


def missing_method(owner: type, name: str) -> AttributeError:
    """Return the error for a method or attribute that an object of `owner` does not have."""
    remedy = f": {METHODS[name]}" if name in METHODS else ""
    return AttributeError(f"{owner.__name__!r} object has no attribute {name!r:.80}{remedy}")


def missing(name: str) -> str:
    """Return the error for a name that `pagoda` does not have."""
    from pagoda import __all__
    from pagoda.base.registry import nearest

    if name in INSTEAD:
        return f"pagoda has no {name}: {INSTEAD[name]}"
    return f"pagoda has no {name:.80}{nearest(name, __all__)}"


class Finder:
    """Finds vLLM's modules below `pagoda`, after those that are files."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return where a module comes from. Raises ModuleNotFoundError for what has another name here."""
        package, _, module = name.partition(".")
        if package != "pagoda":
            return None
        if module in MODULES:
            return ModuleSpec(name, _Loader(), is_package=True)  # pyright: ignore[reportArgumentType]
        last = module.rpartition(".")[2]
        if last in INSTEAD or last[:1].isupper():  # `from pagoda import NAME` looks for a module of this name
            raise ModuleNotFoundError(missing(last))
        return None


class _Loader:
    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Leave it to the caller."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        import pagoda

        names = MODULES[module.__name__.partition(".")[2]].split()

        def find(name: str) -> object:
            if name in names:
                return getattr(pagoda, name)
            raise AttributeError(missing(name))

        module.__dict__.update(__getattr__=find, __all__=names)
