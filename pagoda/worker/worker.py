"""Worker: the model, the KV pools and the model runner of one device."""

import logging
import platform
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import torch

from pagoda.base.errors import CapacityError, ConfigError, RequestError, StepTooLarge, WorkerDied
from pagoda.core.request import LoraRef
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.layers.sharding import ALONE
from pagoda.models.base import Model
from pagoda.ops.tensor import RankGroup
from pagoda.process.allocator import return_freed_memory
from pagoda.process.host_threads import host_pool
from pagoda.process.out_of_memory import is_out_of_memory
from pagoda.worker.adapters import AdapterPieces, Adapters, AdapterStore
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.calls import Capacity, StepProfile, StepSize
from pagoda.worker.dry_runs import DryRuns, LargestSteps, largest_graphs
from pagoda.worker.encoders import EncoderOutputs
from pagoda.worker.forward_runner import ForwardRunner
from pagoda.worker.grammar_rows import GrammarRows
from pagoda.worker.launched_steps import LaunchedStep
from pagoda.worker.loaded_model import DTYPES, LoadedModel, WorkerConfig, load
from pagoda.worker.memory import bytes_of_blocks
from pagoda.worker.model_runner import ModelRunner
from pagoda.worker.speculation.loaded_draft import speculator_of
from pagoda.worker.staging import RowEmbeds
from pagoda.worker.table_mirror import RotaryPositions, TableMirror, first_ids_of

logger = logging.getLogger("pagoda")


class Worker:
    """One rank. Loads the model in `load`, then runs steps and calls in order. Not thread-safe."""

    def __init__(self, config: WorkerConfig, ranks: RankGroup = ALONE) -> None:
        """ranks: those that share the layers with this one, at `config.place`."""
        self._config, self._ranks = config, ranks
        self._runner: ModelRunner | None = None
        self._cache: CacheEngine | None = None
        self._loaded: LoadedModel | None = None
        # Made before `load` pins the calling thread.
        self._mask_thread = host_pool(1, "pagoda-masks")
        self._reading_thread = host_pool(1, "pagoda-adapters")
        self._calls: dict[str, Callable[..., object]] = {
            "prepare_grammar": self._prepare_grammar,
            "drop_grammar": self._drop_grammar,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
            "begin_profile": self._begin_profile,
            "profile": self._profile,
        }

    def load(self) -> None:
        """Load the weights. Raises ConfigError if the device does not support the settings."""
        self._loaded = load(self._config, self._ranks)

    def measure(self, sizes: Sequence[StepSize]) -> Capacity:
        """Return what is left for KV pools, next to steps of the first of `sizes` that fits.

        Raises StepTooLarge if none does.
        """
        loaded = self._model()
        why: list[StepTooLarge] = []
        for size in sizes:
            try:
                return self._capacity(loaded, self._free_beside(loaded, size), why)
            except StepTooLarge as error:
                why.append(error)
        if why:
            raise why[0]
        return self._capacity(loaded, max(0, loaded.device.free_bytes() - loaded.device.margin_bytes), why)

    def _capacity(self, loaded: LoadedModel, free_bytes: int, why: Sequence[StepTooLarge]) -> Capacity:
        config, device = self._config, loaded.device
        memory = "host" if device.is_host else f"{device.name}:{device.index}"
        block_bytes = bytes_of_blocks(loaded.model.kv_groups, config.kv_dtype, config.block_size)
        return Capacity(f"{memory} of {platform.node()}", free_bytes, block_bytes, len(why), str(why[0]) if why else "")

    def _model(self) -> LoadedModel:
        if self._loaded is None:
            raise WorkerDied("the worker has not loaded its model")
        return self._loaded

    def _free_beside(self, loaded: LoadedModel, size: StepSize) -> int:
        """Run the largest steps there can be; return the bytes left for the KV pools. Raises StepTooLarge."""
        config, device = self._config, loaded.device
        steps = LargestSteps(
            size.max_num_seqs,
            size.max_num_batched_tokens,
            config.max_model_len,
            loaded.model.spec.vocab_size,
            len(loaded.model.kv_groups),
            config.max_drafts,
            loaded.model.generates,
        )
        cache, encoders = self._make_cache(loaded, 0, 0), self._make_encoders(loaded)

        def run() -> None:
            if encoders is not None:
                encoders.run_largest(config.encoder_budget)
            self._run_all(loaded, loaded.forward, steps, cache)
            if (draft := loaded.draft) is not None:
                draft_steps = draft.largest_steps(size.max_num_seqs, config.max_model_len)
                self._run_all(loaded, draft.forward, draft_steps, draft.cache)

        try:
            return device.free_bytes_beside(run)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and not is_out_of_memory(error):
                raise
            why = str(error)
        # Not raised from the error, whose traceback keeps what the step had computed: a smaller one needs that memory.
        raise StepTooLarge(
            f"steps of max_num_batched_tokens={size.max_num_batched_tokens} and max_num_seqs={size.max_num_seqs} do "
            f"not fit in the GPU's memory next to the weights ({why})"
        )

    def _run_all(self, loaded: LoadedModel, forward: ForwardRunner, steps: LargestSteps, cache: CacheEngine) -> None:
        """Run the largest steps, then the largest that are captured as graphs, until they are, for graphs keep memory.

        forward, cache: of the model, or of the one that drafts for it.
        """
        # Rows without blocks: all of their tokens are in the null block.
        table = self._make_table(forward.model, loaded.max_len)
        runs = DryRuns(forward, table, cache)
        for step in steps:
            runs.run(step)
        padding = forward.staging.padding
        if padding is None:
            return
        largest = [steps.decodes(num_rows, num_drafts) for num_rows, num_drafts in largest_graphs(steps, padding)]
        for step in (*largest, steps.mixed(padding.most_tokens)):
            for _ in range(2):
                runs.run(step)

    def set_pools(self, num_blocks: int, num_host_blocks: int, num_states: int = 0, num_host_states: int = 0) -> None:
        """Allocate the KV pools, and warm up. Raises CapacityError if they do not fit."""
        loaded = self._model()
        begin_s = time.perf_counter()
        cache = self._make_cache(loaded, num_blocks, num_host_blocks, num_states, num_host_states)
        self._runner, self._cache = self._make_runner(loaded, cache), cache
        self._runner.warm_up()
        logger.info(
            "worker ready on %s: %s kernels, %d threads, KV pools in %.2f s",
            loaded.device.device,
            loaded.ops.name,
            loaded.device.threads,
            time.perf_counter() - begin_s,
        )

    def _make_cache(
        self, loaded: LoadedModel, num_blocks: int, num_host_blocks: int, num_states: int = 0, num_host_states: int = 0
    ) -> CacheEngine:
        config = self._config
        try:
            return CacheEngine(
                loaded.model.kv_groups,
                config.block_size,
                num_blocks,
                num_host_blocks,
                DTYPES[config.kv_dtype],
                loaded.device,
                loaded.ops.make_device_blocks,
                num_states,
                num_host_states,
            )
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            raise CapacityError(f"{num_blocks} KV blocks do not fit in memory; lower kv_cache_memory") from error

    def _make_table(self, model: Model, max_len: int, num_blocks: int = 0) -> TableMirror:
        config = self._config
        rotary = RotaryPositions(model, config.max_rows) if model.position_runs else None
        return TableMirror(
            config.max_rows,
            max_len,
            config.block_size,
            len(model.kv_groups),
            model.cross_groups,
            config.max_encoder_len,
            rotary,
            config.logprobs_mode,
            first_ids_of(model.kv_groups, num_blocks),
            model.state_groups,
        )

    def _make_encoders(self, loaded: LoadedModel) -> EncoderOutputs | None:
        if loaded.encoder is None:
            return None
        return EncoderOutputs(loaded.encoder, loaded.dtype, bool(loaded.model.cross_groups))

    def _make_runner(self, loaded: LoadedModel, cache: CacheEngine) -> ModelRunner:
        config, model, device = self._config, loaded.model, loaded.device
        table = self._make_table(model, loaded.max_len, cache.num_blocks)
        adapters = Adapters(loaded.store, config.max_rows) if loaded.store is not None else None
        samples, grammars, speculator = config.place.samples, None, None
        if config.grammars is not None and samples:
            grammars = GrammarRows(config.grammars, model.spec.vocab_size, self._mask_thread)
        embeds = RowEmbeds(loaded.dtype, device.device) if config.takes_embeds else None
        if config.drafting is not None and samples:
            speculator = speculator_of(
                config.drafting,
                loaded.forward,
                table,
                cache,
                config.max_model_len,
                loaded.draft,
                grammars,
                adapters,
            )
        return ModelRunner(
            loaded.forward,
            table,
            cache,
            device,
            speculator,
            grammars,
            adapters,
            config.pooling,
            embeds,
            config.place,
            self._make_encoders(loaded),
        )

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Begin one step: see ModelRunner.launch. Raises WorkerDied before `set_pools` and after `shutdown`."""
        if self._runner is None:
            raise WorkerDied("the worker is not running")
        return self._runner.launch(output)

    def call(self, name: str, args: Sequence[object]) -> object:
        """Run one of worker.calls.CALLS between steps; return its result, or a future of it. Raises its errors."""
        if self._runner is None:
            raise WorkerDied("the worker is not running")
        return self._calls[name](*args)

    def _prepare_grammar(self, grammar: str) -> "Future[None] | None":
        backend = self._config.grammars
        return backend.prepare(grammar) if backend is not None else None

    def _drop_grammar(self, grammar: str) -> None:
        if self._config.grammars is not None:
            self._config.grammars.drop(grammar)

    def kv_memory(self) -> list[np.ndarray]:
        """Return the memory of the KV pool: see CacheEngine.host_memory. Raises WorkerDied before `set_pools`."""
        if self._cache is None:
            raise WorkerDied("the worker has no KV pool")
        return self._cache.host_memory()

    @property
    def store(self) -> AdapterStore | None:
        """The adapters in memory; None if requests cannot have one."""
        return self._loaded.store if self._loaded is not None else None

    @torch.inference_mode()  # as steps, which may have made the tables that this writes to
    def _load_adapter(self, lora: LoraRef) -> "Future[None] | None":
        store = self.store
        if store is None:
            raise RequestError("this worker has no LoRA adapters: they are off (enable_lora)", "lora_request")
        if self._model().device.is_host:
            read = store.begin(lora, lambda: self._reading_thread.submit(_read_adapter, store, lora))
            # What was read stays here: the call ends, without a result, right after it on the same thread.
            return self._reading_thread.submit(_await_read, read) if read is not None else None
        with _errors_of(lora):  # now, because other threads must not use a GPU while graphs are captured
            return store.load(lora)

    @torch.inference_mode()
    def _unload_adapter(self, lora: LoraRef) -> None:
        if self.store is not None:
            self.store.unload(lora)

    def _begin_profile(self) -> None:
        """Start profiling steps, including each op if the forward is recorded."""
        assert self._runner is not None, "`call` has checked it"
        self._runner.times.clear()
        if (program := self._model().forward.program) is not None:
            program.measure()

    def _profile(self) -> StepProfile:
        """Return the profile since `_begin_profile`."""
        assert self._runner is not None, "`call` has checked it"
        ops: dict[str, float] = {}
        num_ops, region_s = 0, 0.0
        if (program := self._model().forward.program) is not None:
            ops = {op: seconds for op, seconds in program.seconds().items() if seconds}
            num_ops, region_s = program.num_steps, program.region_seconds()
        times = self._runner.times
        return StepProfile(times.num_steps, dict(times.seconds), ops, num_ops, region_s)

    def shutdown(self) -> None:
        """Free the model and the pools, and return their memory to the system. Idempotent."""
        self._reading_thread.shutdown(wait=False, cancel_futures=True)
        if self._runner is not None:
            self._runner.shutdown()
        self._runner = self._loaded = self._cache = None
        return_freed_memory()


@torch.inference_mode()
def _read_adapter(store: AdapterStore, lora: LoraRef) -> AdapterPieces:
    with _errors_of(lora):
        return store.read(lora)


def _await_read(read: "Future[AdapterPieces]") -> None:
    read.result()


@contextmanager
def _errors_of(lora: LoraRef) -> Generator[None]:
    """Raise RequestError if files cannot be used, or memory runs out: other ranks may have no such error."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        if isinstance(error, ConfigError | CapacityError | OSError) or is_out_of_memory(error):
            raise RequestError(f"the adapter {lora.name!r} cannot be loaded: {error}", "lora_request") from error
        raise
