"""WorkerConfig: the settings of one worker."""

from dataclasses import dataclass

import torch

from pagoda.base.config import ParallelConfig
from pagoda.base.pooling import PoolingPlan
from pagoda.core.grammar import GrammarBackend
from pagoda.loading.model_files import ModelFiles
from pagoda.worker.adapters import AdapterLimits
from pagoda.worker.speculation.setup import DraftSetup

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
"""Types of weights and caches, by the names that settings have for them."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker's settings.

    dtype, kv_dtype: "float32", "bfloat16" or "float16"; kv_dtype also "int8" and "fp8".
    num_blocks, num_host_blocks: usable KV blocks.   max_rows: rows of the scheduler's table.
    max_model_len: longest sequence.   max_drafts: most draft tokens per row and step.
    grammars: None if no request may have a grammar.   adapters: None if no request may have a LoRA adapter.
    pooling: in place of the model's own.   takes_embeds: prompts may be given as embeddings.
    """

    files: ModelFiles
    dtype: str
    quantization: str | None
    kv_dtype: str
    block_size: int
    num_blocks: int
    num_host_blocks: int
    max_rows: int
    max_model_len: int
    max_drafts: int
    parallel: ParallelConfig
    grammars: GrammarBackend | None = None
    pin_threads: bool = False
    drafting: DraftSetup | None = None
    adapters: AdapterLimits | None = None
    pooling: PoolingPlan | None = None
    takes_embeds: bool = False
