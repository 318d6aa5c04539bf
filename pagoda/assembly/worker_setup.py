"""Make the worker of one rank from what was decided before loading: the same in every process that has the settings."""

import os
from typing import TYPE_CHECKING

from pagoda.assembly.engine_setup import EngineSetup, options_of
from pagoda.base.cache_home import packed_cache_bytes
from pagoda.base.ranks import WHOLE, RankPlace
from pagoda.kernels.native.threads import num_memory_nodes
from pagoda.layers.sharding import ALONE
from pagoda.loading.resolve import packed_folder
from pagoda.ops.tensor import RankGroup
from pagoda.worker.grammar import GrammarBackend

if TYPE_CHECKING:
    from pagoda.worker.worker import Worker

_MAX_MASK_THREADS = 8


def make_worker(
    setup: EngineSetup,
    pin_threads: bool = False,
    place: RankPlace = WHOLE,
    ranks: RankGroup = ALONE,
    device_index: int = 0,
) -> "Worker":
    """Return a worker that has not loaded its model yet.

    setup: after `fit_cache`, which may lower max_model_len.
    pin_threads: keep each compute thread on a core, if there are as many threads as cores.   place: of this rank.
    ranks: those that share the layers with it.   device_index: which of the machine's devices of its kind it has.
    """
    # Imported here because torch takes a second to import, and planning and resolving do not need it.
    from pagoda.worker.adapters import AdapterLimits
    from pagoda.worker.loaded_model import WorkerConfig
    from pagoda.worker.worker import Worker

    config = setup.config
    lora = config.model.lora
    # The memory of a file is not where the threads of several nodes would put it.
    packed_bytes = packed_cache_bytes() if num_memory_nodes() == 1 else 0
    options = options_of(setup)
    return Worker(
        WorkerConfig(
            files=setup.files,
            dtype=setup.dtype,
            quantization=config.model.quantization,
            kv_dtype=setup.kv_dtype,
            block_size=config.cache.block_size,
            max_rows=options.max_rows,
            max_model_len=setup.max_model_len,
            max_drafts=setup.max_drafts,
            parallel=config.parallel,
            place=place,
            device_index=device_index,
            grammars=make_grammars(setup) if place.samples else None,
            pin_threads=pin_threads,
            drafting=setup.drafting,
            adapters=AdapterLimits(lora.num_kept, lora.max_lora_rank) if lora.enable_lora else None,
            pooling=setup.tasks.plan,
            takes_embeds=setup.embeds_size > 0,
            encoder_budget=options.encoder_budget,
            max_encoder_len=options.max_encoder_len,
            logprobs_mode=config.model.logprobs_mode,
            packed_folder=packed_folder(config.model),
            packed_bytes=packed_bytes,
        ),
        ranks,
    )


def make_grammars(setup: EngineSetup) -> GrammarBackend:
    """Return the backend of structured output, which loads the tokenizer with the first grammar."""
    # Imported here because planning and resolving need neither.
    from pagoda.engine.answers.thinking import ThinkingBackend
    from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer

    threads = min(os.cpu_count() or 1, _MAX_MASK_THREADS)
    return ThinkingBackend(
        lambda: load_tokenizer(setup.files, setup.config.model.tokenizer), setup.spec.vocab_size, threads
    )
