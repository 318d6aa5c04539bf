"""Worker: the model, the KV pools and the model runner of one device."""

import logging
import time
from dataclasses import dataclass, replace

import torch

from pagoda.base.errors import CapacityError, PagodaError, RequestError, StepTooLarge, WorkerDied
from pagoda.base.out_of_memory import is_out_of_memory
from pagoda.core.request import LoraRef
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.worker.adapters import Adapters, AdapterStore
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.dry_runs import DryRuns, LargestSteps, largest_graphs
from pagoda.worker.forward_runner import ForwardRunner
from pagoda.worker.grammar_rows import GrammarRows
from pagoda.worker.loaded_model import DTYPES, LoadedModel, WorkerConfig, load
from pagoda.worker.model_runner import ModelRunner
from pagoda.worker.sampler import Sampler
from pagoda.worker.speculation.loaded_draft import speculator_of
from pagoda.worker.staging import PromptEmbeds
from pagoda.worker.steps_in_flight import LaunchedStep
from pagoda.worker.table_mirror import TableMirror

logger = logging.getLogger("pagoda")


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Time spent in steps, in seconds.

    parts: by part of the worker's step.   ops: by kind of op in the forward; empty if it was not recorded.
    num_ops: ops per forward.   region_s: measured overhead of one parallel region.
    """

    num_steps: int
    parts: dict[str, float]
    ops: dict[str, float]
    num_ops: int
    region_s: float


class Worker:
    """Loads the model in `start`, then runs steps in order. Not thread-safe."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._runner: ModelRunner | None = None
        self._forward: ForwardRunner | None = None
        self._adapters: AdapterStore | None = None
        self._loaded: LoadedModel | None = None

    def _load(self) -> LoadedModel:
        """Load the weights, unless that is done. Raises ConfigError if the device does not support the settings."""
        if self._loaded is None:
            self._loaded = load(self._config)
            self._forward, self._adapters = self._loaded.forward, self._loaded.store
        return self._loaded

    def free_for_cache(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Load the weights, run the largest steps there can be, and return the bytes of a GPU left for the KV pools.

        Call it before `start`, again with smaller steps if it raises StepTooLarge, and `set_pools` after it. Raises as
        `start` does, too.
        """
        loaded = self._load()
        config, device = self._config, loaded.device
        steps = LargestSteps(
            max_num_seqs,
            max_num_batched_tokens,
            config.max_model_len,
            loaded.model.spec.vocab_size,
            len(loaded.model.kv_groups),
            config.max_drafts,
            loaded.model.generates,
        )
        cache = self._make_cache(loaded, 0, 0)

        def run() -> None:
            self._run_all(loaded, loaded.forward, steps, cache)
            if (draft := loaded.draft) is not None:
                draft_steps = draft.largest_steps(max_num_seqs, config.max_model_len)
                self._run_all(loaded, draft.forward, draft_steps, draft.cache)

        try:
            return device.free_bytes_beside(run)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and not is_out_of_memory(error):
                raise
            why = str(error)
        # Not raised from the error, whose traceback keeps what the step had computed: a smaller one needs that memory.
        raise StepTooLarge(
            f"steps of max_num_batched_tokens={max_num_batched_tokens} and max_num_seqs={max_num_seqs} do not fit "
            f"in the GPU's memory next to the weights ({why})"
        )

    def _run_all(self, loaded: LoadedModel, forward: ForwardRunner, steps: LargestSteps, cache: CacheEngine) -> None:
        """Run the largest steps, then the largest that are captured as graphs, until they are, for graphs keep memory.

        forward, cache: of the model, or of the one that drafts for it.
        """
        # Rows without blocks: all of their tokens are in the null block.
        table = TableMirror(self._config.max_rows, loaded.max_len, self._config.block_size, steps.num_groups)
        runs = DryRuns(forward, table, cache, Sampler(loaded.ops))
        for step in steps:
            runs.run(step)
        padding = forward.staging.padding
        if padding is None:
            return
        for num_rows, num_drafts in largest_graphs(steps, padding):
            for _ in range(2):
                runs.run(steps.decodes(num_rows, num_drafts))

    def set_pools(self, num_blocks: int, num_host_blocks: int) -> None:
        """Replace the sizes of the KV pools, before `start`."""
        self._config = replace(self._config, num_blocks=num_blocks, num_host_blocks=num_host_blocks)

    def start(self) -> None:
        """Load the weights, unless that is done, and allocate the KV pools.

        Raises ConfigError if the device does not support the settings, CapacityError if the KV pools do not fit.
        """
        loaded, self._loaded = self._load(), None
        begin_s = time.perf_counter()
        cache = self._make_cache(loaded, self._config.num_blocks, self._config.num_host_blocks)
        self._runner = self._make_runner(loaded, cache)
        self._runner.warm_up()
        logger.info(
            "worker ready on %s: %s kernels, %d threads, KV pools in %.2f s",
            loaded.device.device,
            loaded.ops.name,
            loaded.device.threads,
            time.perf_counter() - begin_s,
        )

    def _make_cache(self, loaded: LoadedModel, num_blocks: int, num_host_blocks: int) -> CacheEngine:
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
            )
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            raise CapacityError(f"{num_blocks} KV blocks do not fit in memory; lower kv_cache_memory") from error

    def _make_runner(self, loaded: LoadedModel, cache: CacheEngine) -> ModelRunner:
        config, model, ops, device = self._config, loaded.model, loaded.ops, loaded.device
        table = TableMirror(config.max_rows, loaded.max_len, config.block_size, len(model.kv_groups))
        adapters = Adapters(loaded.store, config.max_rows) if loaded.store is not None else None
        grammars = GrammarRows(config.grammars, model.spec.vocab_size) if config.grammars is not None else None
        embeds = PromptEmbeds(loaded.dtype, device.device) if config.takes_embeds else None
        speculator = None
        if config.drafting is not None:
            speculator = speculator_of(
                config.drafting,
                loaded.forward,
                table,
                cache,
                ops,
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
            Sampler(ops),
            speculator,
            grammars,
            adapters,
            config.pooling,
            embeds,
        )

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Begin one step: see ModelRunner.launch. Raises WorkerDied before `start` and after `shutdown`."""
        if self._runner is None:
            raise WorkerDied("the worker is not running")
        return self._runner.launch(output)

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Execute one step. Raises WorkerDied before `start` and after `shutdown`."""
        return self.launch(output).result()

    @torch.inference_mode()  # as steps, which may have made the tables that this writes to
    def load_adapter(self, lora: LoraRef) -> None:
        """Read an adapter, so that the first step that uses it need not. Raises PagodaError if it cannot be used."""
        if self._adapters is None:
            raise RequestError("this worker has no LoRA adapters: they are off (enable_lora)", "lora_request")
        try:
            self._adapters.load(lora)
        except Exception as error:
            if isinstance(error, PagodaError):
                raise
            if isinstance(error, OSError) or is_out_of_memory(error):
                raise RequestError(f"the adapter {lora.name!r} cannot be loaded: {error}", "lora_request") from error
            raise

    @torch.inference_mode()
    def unload_adapter(self, lora: LoraRef) -> None:
        """Free an adapter's memory once no row uses it. Ignore one that is not loaded."""
        if self._adapters is not None:
            self._adapters.unload(lora)

    def measure(self) -> None:
        """Start profiling steps, including each op if the forward is recorded."""
        assert self._runner is not None, "measure a worker after start"
        self._runner.times.clear()
        if self._forward is not None and self._forward.program is not None:
            self._forward.program.measure()

    def profile(self) -> StepProfile:
        """Return the profile since `measure`."""
        assert self._runner is not None
        ops: dict[str, float] = {}
        num_ops, region_s = 0, 0.0
        if self._forward is not None and (program := self._forward.program) is not None:
            ops = {op: seconds for op, seconds in program.seconds().items() if seconds}
            num_ops, region_s = program.num_steps, program.region_seconds()
        times = self._runner.times
        return StepProfile(times.num_steps, dict(times.seconds), ops, num_ops, region_s)

    def shutdown(self) -> None:
        """Free the model and the pools. Idempotent."""
        if self._runner is not None:
            self._runner.shutdown()
        self._runner = self._forward = self._adapters = self._loaded = None
