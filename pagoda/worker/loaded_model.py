"""LoadedModel: a model in a device's memory with the kernels that compute it, before it has KV pools."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from pagoda.base.config import LogprobsMode, ParallelConfig
from pagoda.base.pooling import PoolingPlan
from pagoda.base.ranks import WHOLE, RankPlace
from pagoda.kernels.native.threads import cores_to_pin, openmp_runtimes
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.layers.sharding import ALONE
from pagoda.loading.adapters.files import AdapterTargets
from pagoda.loading.loader import load_model
from pagoda.loading.model_config import read_architecture
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.packed_cache import PackedCache
from pagoda.models.base import Model
from pagoda.ops.tensor import RankGroup
from pagoda.process.host_threads import host_pool
from pagoda.worker.adapters import AdapterLimits, AdapterStore
from pagoda.worker.devices import Device, select_device
from pagoda.worker.forward_runner import ForwardRunner, make_forward
from pagoda.worker.grammar import GrammarBackend
from pagoda.worker.speculation.loaded_draft import LoadedDraft, load_draft
from pagoda.worker.speculation.setup import DraftSetup

logger = logging.getLogger("pagoda")

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
    max_rows: rows of the scheduler's table.   max_model_len: longest sequence.
    max_drafts: most draft tokens per row and step.
    grammars: None if no row may have a grammar.   adapters: None if no request may have a LoRA adapter.
    pooling: in place of the model's own.   takes_embeds: prompts may be given as embeddings.
    place: of this rank.   device_index: which of the machine's devices of its kind it has.
    encoder_budget: encoder tokens per step.   max_encoder_len: of a request of an encoder-decoder model.
    packed_folder, packed_bytes: where packed weights are kept for the next start, and how many bytes; 0: none.
    """

    files: ModelFiles
    dtype: str
    quantization: str | None
    kv_dtype: str
    block_size: int
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
    place: RankPlace = WHOLE
    device_index: int = 0
    encoder_budget: int = 0
    max_encoder_len: int = 0
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    packed_folder: Path | None = None
    packed_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """What a worker has before its KV pools.

    max_len: positions of a row, those past its end included.   draft: the model that drafts for it, if there is one.
    encoder: the part of the model that computes images or audio, if it has one.
    """

    device: Device
    ops: Ops
    model: Model
    forward: ForwardRunner
    store: AdapterStore | None
    dtype: torch.dtype
    max_len: int
    draft: LoadedDraft | None = None
    encoder: ForwardRunner | None = None


def load(config: WorkerConfig, ranks: RankGroup = ALONE) -> LoadedModel:
    """Load the weights. Raises ConfigError if the device does not support the settings.

    ranks: those that share the layers with this one.
    """
    begin_s = time.perf_counter()
    device = select_device(config.parallel, config.device_index)
    device.prepare()
    dtype = DTYPES[config.dtype]
    # A step in flight may write tokens past the end of a finished row: reserve positions for them.
    max_len = config.max_model_len + config.max_drafts + 1
    parallel = config.parallel
    ops = device.make_ops(parallel.kernels, max_len, parallel.batch_invariant)
    if ops.name == "reference":
        logger.warning("running on the reference kernels, which define results and take minutes for a long answer")
    cache = None
    if isinstance(ops, NativeOps):
        if config.packed_folder is not None and config.packed_bytes:
            checks = host_pool(ops.threads, "pagoda-checks")
            cache = PackedCache(config.packed_folder, config.packed_bytes, checks)
        # The native kernels have their own threads. torch's threads, started for a small op in between, would
        # busy-wait for milliseconds on the same cores.
        torch.set_num_threads(1)
        if config.pin_threads:
            _pin_threads(ops)  # before they write the weights, whose memory is where they then are
    model = load_model(
        config.files,
        ops,
        dtype,
        device.device,
        config.quantization,
        max_len,
        ranks,
        config.place,
        config.max_model_len,
        cache,
    )
    store = None
    if config.adapters is not None:
        targets = AdapterTargets(read_architecture(config.files)[0], model)
        store = AdapterStore(model, targets, ops, dtype, device.device, config.adapters)
    tables = store.tables if store is not None else None
    max_rows = config.max_rows
    forward = make_forward(model, ops, device, max_rows, max_len, config.max_drafts + 1, tables)
    encoder = None
    if model.media_encoder is not None:
        encoder = make_forward(model.media_encoder, ops, device, max_rows, max_len, 1)
    draft = None
    if config.drafting is not None and config.place.samples:
        draft = load_draft(config.drafting, ops, dtype, device, max_rows, max_len, config.block_size, cache)
    if cache is not None:
        cache.checks.shutdown()
    if isinstance(ops, NativeOps):
        _warn_of_openmp()
    logger.info("weights loaded in %.2f s", time.perf_counter() - begin_s)
    return LoadedModel(device, ops, model, forward, store, dtype, max_len, draft, encoder)


def _pin_threads(ops: NativeOps) -> None:
    """Pin this thread and the kernels' threads, if they take every core."""
    cores = cores_to_pin(ops.threads)
    if cores and not ops.pin_threads(cores):
        logger.warning("compute threads could not be pinned to cores")


def _warn_of_openmp() -> None:
    runtimes = openmp_runtimes()
    if len(runtimes) > 1:
        logger.warning(
            "%d OpenMP runtimes in this process, whose threads may compete for cores: %s",
            len(runtimes),
            ", ".join(runtimes),
        )
