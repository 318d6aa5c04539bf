"""pagoda: an exact and fast inference and serving engine for large language models.

Names are imported when they are first used, so that `import pagoda` costs nothing.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from pagoda.vllm_names import Finder, missing

if TYPE_CHECKING:
    from pagoda.async_llm import AsyncLLM as AsyncLLM
    from pagoda.base.config import EngineConfig as EngineConfig
    from pagoda.base.engine_args import EngineArgs as EngineArgs
    from pagoda.base.errors import CapacityError as CapacityError
    from pagoda.base.errors import ConfigError as ConfigError
    from pagoda.base.errors import InvariantBroken as InvariantBroken
    from pagoda.base.errors import PagodaError as PagodaError
    from pagoda.base.errors import RequestError as RequestError
    from pagoda.base.errors import UsageError as UsageError
    from pagoda.base.errors import WorkerDied as WorkerDied
    from pagoda.base.lora import LoRARequest as LoRARequest
    from pagoda.base.outputs import BeamSearchOutput as BeamSearchOutput
    from pagoda.base.outputs import BeamSearchSequence as BeamSearchSequence
    from pagoda.base.outputs import ChatMessage as ChatMessage
    from pagoda.base.outputs import ClassificationOutput as ClassificationOutput
    from pagoda.base.outputs import CompletionOutput as CompletionOutput
    from pagoda.base.outputs import EmbeddingOutput as EmbeddingOutput
    from pagoda.base.outputs import FunctionCall as FunctionCall
    from pagoda.base.outputs import Logprob as Logprob
    from pagoda.base.outputs import Metric as Metric
    from pagoda.base.outputs import PoolingOutput as PoolingOutput
    from pagoda.base.outputs import PoolingRequestOutput as PoolingRequestOutput
    from pagoda.base.outputs import RequestMetrics as RequestMetrics
    from pagoda.base.outputs import RequestOutput as RequestOutput
    from pagoda.base.outputs import RequestOutputKind as RequestOutputKind
    from pagoda.base.outputs import ScoringOutput as ScoringOutput
    from pagoda.base.pooling import PoolingParams as PoolingParams
    from pagoda.base.sampling_params import BeamSearchParams as BeamSearchParams
    from pagoda.base.sampling_params import SamplingParams as SamplingParams
    from pagoda.base.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from pagoda.core.scheduler import Scheduler as Scheduler
    from pagoda.engine.inputs.prompts import TextPrompt as TextPrompt
    from pagoda.engine.inputs.prompts import TokensPrompt as TokensPrompt
    from pagoda.llm import LLM as LLM
    from pagoda.llm_engine import LLMEngine as LLMEngine

    AsyncLLMEngine, AsyncEngineArgs = AsyncLLM, EngineArgs
    EmbeddingRequestOutput = ClassificationRequestOutput = ScoringRequestOutput = PoolingRequestOutput
    __version__: str

_HOMES = {
    "pagoda.llm": ("LLM",),
    "pagoda.async_llm": ("AsyncLLM",),
    "pagoda.core.scheduler": ("Scheduler",),
    "pagoda.llm_engine": ("LLMEngine",),
    "pagoda.base.engine_args": ("EngineArgs",),
    "pagoda.base.sampling_params": ("SamplingParams", "BeamSearchParams"),
    "pagoda.base.pooling": ("PoolingParams",),
    "pagoda.base.structured_outputs": ("StructuredOutputsParams",),
    "pagoda.base.config": ("EngineConfig",),
    "pagoda.base.lora": ("LoRARequest",),
    "pagoda.base.outputs": (
        "RequestOutput",
        "CompletionOutput",
        "ChatMessage",
        "FunctionCall",
        "Logprob",
        "RequestMetrics",
        "PoolingRequestOutput",
        "PoolingOutput",
        "EmbeddingOutput",
        "ClassificationOutput",
        "ScoringOutput",
        "BeamSearchOutput",
        "BeamSearchSequence",
        "RequestOutputKind",
        "Metric",
    ),
    "pagoda.engine.inputs.prompts": ("TextPrompt", "TokensPrompt"),
    "pagoda.base.errors": (
        "PagodaError",
        "ConfigError",
        "RequestError",
        "CapacityError",
        "UsageError",
        "WorkerDied",
        "InvariantBroken",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]


_ALIASES = {
    "AsyncLLMEngine": "AsyncLLM",
    "AsyncEngineArgs": "EngineArgs",
    "EmbeddingRequestOutput": "PoolingRequestOutput",
    "ClassificationRequestOutput": "PoolingRequestOutput",
    "ScoringRequestOutput": "PoolingRequestOutput",
}
"""Names of vLLM -> the name here."""


def random_uuid() -> str:
    """Return a new request id, as `vllm.utils.random_uuid` does."""
    import uuid

    return uuid.uuid4().hex


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("pagoda-llm")
    name = _ALIASES.get(name, name)
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(missing(name))
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


sys.meta_path.append(Finder)  # vLLM's modules, after all that are files
