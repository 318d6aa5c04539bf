"""Build a running EngineCore from settings: the only module that chooses implementations."""

import dataclasses
import importlib
import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, cast

from pagoda.assembly.engine_setup import EngineSetup, options_of, resolve_engine
from pagoda.assembly.identity import digest_of_weights
from pagoda.assembly.input_setup import build_input_processor
from pagoda.assembly.sizing import fit_cache, fit_measured, no_step_fits, sizes_to_try, weights_in_memory
from pagoda.assembly.tier_setup import open_tier, with_tiers_seed
from pagoda.assembly.worker_setup import make_grammars, make_worker
from pagoda.base.abbreviate import shorten
from pagoda.base.clock import Clock, SystemClock
from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import settings_without_effect
from pagoda.base.errors import CapacityError, ConfigError, StepTooLarge, WorkerDied
from pagoda.base.redact import settings_without_secrets
from pagoda.base.speculative_config import SpeculativeConfig
from pagoda.core.kv import KVTier, prefix_group
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_interface import SchedulerInterface
from pagoda.core.state import Preparations
from pagoda.engine.engine_core import EngineCore
from pagoda.engine.executor import Executor
from pagoda.engine.flight_recorder import FlightRecorder
from pagoda.engine.preparations import ExecutorPreparations
from pagoda.engine.recording.files import open_files
from pagoda.engine.recording.format import RecordedSettings
from pagoda.engine.recording.preparations import NotedPreparations
from pagoda.engine.recording.recorder import RecordingScheduler
from pagoda.engine.text_engine import TextEngine
from pagoda.engine.wire import EngineSizes
from pagoda.executors.in_process import InProcessExecutor
from pagoda.loading.quantization import resolve_quantization
from pagoda.process.out_of_memory import is_out_of_memory
from pagoda.worker.memory import KVCapacity
from pagoda.worker.speculation.registry import make_drafter
from pagoda.worker.speculation.speculator import Speculator

if TYPE_CHECKING:
    from pagoda.engine.kv_events import KVEventPublisher
    from pagoda.worker.worker import Worker  # brings torch, which engines without a model do without

logger = logging.getLogger("pagoda")


def build_engine_core(
    config: EngineConfig | EngineSetup,
    clock: Clock | None = None,
    wrap_executor: Callable[[Executor, int], Executor] | None = None,
    pin_threads: bool = False,
    on_death: Callable[[WorkerDied], object] = lambda _: None,
    ray_group: object = None,
    recorder: FlightRecorder | None = None,
    replica: int = 0,
) -> EngineCore:
    """Load the model and return an engine that is ready for requests.

    config: the settings, or the result of `resolve_engine`.   clock: by default the system's.
    wrap_executor: called with the executor and the number of the scheduler's rows; returns the executor to use.
    pin_threads: keep each compute thread on a core, if there are as many threads as cores; only for a process that runs
    nothing else.   on_death: called, in any thread, if an executor of several processes dies once it has started.
    ray_group: the placement group for ranks that are actors of Ray; None: a new one.   recorder: see EngineCore.
    replica: the number of this engine among those of a server, from 0.
    Raises ConfigError for invalid settings, CapacityError for too little memory, WorkerDied if the executor dies.
    """
    begin_s = time.perf_counter()
    setup = config if isinstance(config, EngineSetup) else resolve_engine(config)
    setup = dataclasses.replace(setup, config=with_tiers_seed(setup.config))
    make_scheduler = load_scheduler_class(setup.config.scheduler.scheduler_cls)
    capacity = None
    if setup.config.parallel.executor != "ray":  # nothing is known of other machines before their ranks have measured
        setup, capacity = fit_cache(setup)
    for sentence in settings_without_effect(setup.config):
        logger.warning("%s", sentence)
    clock = clock or SystemClock()
    # Before the executor pins this thread: the threads that these start may use all CPUs.
    weights = digest_of_weights(setup.files)
    tier, publisher = open_tier(setup), _make_publisher(setup, replica)
    executor = inner = build_executor(setup, capacity, pin_threads, on_death, ray_group)
    if wrap_executor is not None:
        executor = wrap_executor(executor, options_of(setup).max_rows)
    try:
        setup, capacity = start_executor(executor, setup, capacity)
    except BaseException:
        executor.shutdown()
        if publisher is not None:
            publisher.close()
        raise
    if tier is not None:
        assert isinstance(inner, InProcessExecutor), "the settings were checked"
        tier.attach(cast("Worker", inner.worker).kv_memory())
    options = options_of(setup)
    lora = setup.config.model.lora
    preparations = ExecutorPreparations(executor, options.max_num_seqs, lora.num_kept if lora.enable_lora else 0)
    scheduler = _make_scheduler(make_scheduler, setup, capacity, clock, preparations, tier)
    load_s = time.perf_counter() - begin_s
    _log(setup, capacity, load_s)
    sizes = EngineSizes(
        max_model_len=setup.max_model_len,
        block_size=capacity.block_size,
        num_blocks=capacity.num_blocks,
        num_host_blocks=capacity.num_host_blocks,
        max_num_seqs=setup.config.scheduler.max_num_seqs,
        max_num_batched_tokens=setup.config.scheduler.max_num_batched_tokens,
        prefix_group=prefix_group(setup.groups),
        weights=weights,
    )
    core = EngineCore(
        scheduler,
        executor,
        clock,
        sizes,
        setup.spec.vocab_size,
        options.pipeline_depth,
        preparations,
        waits_for_drafts=options.async_scheduling and setup.drafting is not None,
        embeds_size=setup.embeds_size,
        encoder=setup.encoder,
        crosses=setup.crosses,
        recorder=recorder,
        tier=tier,
    )
    if publisher is not None:
        core.subscribe(publisher.note, cache=True, close=publisher.close)
    return core


def _make_publisher(setup: EngineSetup, replica: int) -> "KVEventPublisher | None":
    config = setup.config.cache
    if not config.kv_events_config.is_on:
        return None
    from pagoda.engine.kv_events import KVEventPublisher  # its sockets take a library that little else needs

    return KVEventPublisher(config.kv_events_config, setup.groups, config.block_size, replica)


def _make_scheduler(
    make: type[Scheduler],
    setup: EngineSetup,
    capacity: KVCapacity,
    clock: Clock,
    preparations: Preparations,
    tier: KVTier | None,
) -> SchedulerInterface:
    """Return the scheduler, which writes a recording if the settings ask for one."""
    debug, options = setup.config.debug, options_of(setup)
    noted = NotedPreparations(preparations) if debug.record is not None else None
    scheduler: SchedulerInterface = make(
        options,
        setup.config.cache,
        setup.groups,
        capacity.num_blocks,
        setup.max_model_len,
        clock,
        num_host_blocks=capacity.num_host_blocks,
        encoder_decoder=setup.crosses,
        preparations=noted or preparations,
        **({} if tier is None else {"tier": tier}),  # a scheduler of one's own need not know it
    )
    if debug.record is None:
        return scheduler
    settings = RecordedSettings(
        options,
        setup.config.cache,
        setup.groups,
        capacity.num_blocks,
        setup.max_model_len,
        capacity.num_host_blocks,
        setup.crosses,
    )
    return RecordingScheduler(
        scheduler,
        open_files(debug.record, clock),
        settings,
        engine=settings_without_secrets(setup.config),
        preparations=noted,
        with_tokens=debug.record_tokens,
    )


def load_scheduler_class(name: str | None) -> type[Scheduler]:
    """Return the class that `scheduler_cls` names. Raises ConfigError if it cannot be had, or is no scheduler."""
    if name is None:
        return Scheduler
    module, _, attribute = name.rpartition(".")
    remedy = "give package.module.Class, of a module that the engine's process can import"
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"scheduler_cls={name!r} cannot be imported ({error}); {remedy}") from error
    methods = [method for method in vars(SchedulerInterface) if not method.startswith("_")]
    if missing := [method for method in methods if not hasattr(found, method)]:
        raise ConfigError(
            f"scheduler_cls={name!r} is not a scheduler: it has no {', '.join(missing)}; extend pagoda.Scheduler"
        )
    return found


def text_engine_builder(config: EngineConfig) -> Callable[[], TextEngine]:
    """Return what builds an engine with text in and out, on another thread than the caller's.

    Called on the caller's thread, which alone knows the placement group of a task of Ray.
    """
    group = None
    if config.parallel.executor == "ray" and "ray" in sys.modules:  # otherwise this is no task of it
        from pagoda.executors.ray import callers_group

        group = callers_group()
    return lambda: build_llm_engine(config, ray_group=group)


def build_llm_engine(
    config: EngineConfig,
    wrap_executor: Callable[[Executor, int], Executor] | None = None,
    ray_group: object = None,
) -> TextEngine:
    """Load the model and return an engine with text in and out, to be stepped by the calling thread.

    wrap_executor, ray_group, errors: as for `build_engine_core`.
    """
    setup = resolve_engine(config)
    with ThreadPoolExecutor(1, "tokenizer") as beside:  # weights are packed without Python
        pending = beside.submit(build_input_processor, setup)
        core = build_engine_core(setup, wrap_executor=wrap_executor, ray_group=ray_group)
        try:
            inputs = pending.result()
        except BaseException:
            core.shutdown()
            raise
    inputs.limits.fit(core.sizes.max_model_len)
    return TextEngine(core, inputs)


def start_executor(
    executor: Executor, setup: EngineSetup, planned: KVCapacity | None
) -> tuple[EngineSetup, KVCapacity]:
    """Start the executor; return what the ranks have room for.

    planned: what was expected before loading, None if nothing could be.
    Raises CapacityError if memory runs out while it loads, whichever library notices.
    """
    sizes = sizes_to_try(setup)
    try:
        setup, capacity = fit_measured(setup, planned, executor.start(sizes), sizes)
        states = capacity.num_states, capacity.num_host_states
        executor.set_pools(capacity.num_blocks, capacity.num_host_blocks, *states)
        return setup, capacity
    except StepTooLarge as error:
        raise no_step_fits(sizes, error) from error
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise _too_little_memory(setup, planned, error) from error


def _too_little_memory(setup: EngineSetup, planned: KVCapacity | None, error: Exception) -> CapacityError:
    """Return the error that says what loading takes."""
    dtype = resolve_quantization(setup.files, setup.config.model.quantization) or setup.dtype
    weights = weights_in_memory(setup)
    pools = "" if planned is None else f", the KV cache {planned.pool_bytes >> 20} MiB"
    return CapacityError(
        f"memory ran out while loading {setup.files.name!r}: weights take about {weights >> 20} MiB as {dtype}"
        f"{pools}; lower kv_cache_memory, quantize (quantization='int8'), or "
        f"raise the memory limit ({shorten(str(error))})"
    )


def build_executor(
    setup: EngineSetup,
    capacity: KVCapacity | None,
    pin_threads: bool,
    on_death: Callable[[WorkerDied], object],
    ray_group: object,
) -> Executor:
    options = options_of(setup)
    if setup.config.parallel.executor == "fake":
        from pagoda.executors.fake import FakeExecutor

        assert capacity is not None
        return FakeExecutor(
            options.max_rows,
            setup.num_positions,
            capacity.block_size,
            len(setup.groups),
            vocab_size=setup.spec.vocab_size,
            grammars=make_grammars(setup),
            speculator=_lookup_speculator(setup, options.max_rows),
        )
    if setup.config.parallel.executor == "mp":
        # Imported here because one worker needs no sockets.
        from pagoda.executors.multi_process import LocalRanks, MultiProcessExecutor, load_timeout_s

        timeout_s = load_timeout_s(sum(setup.files.sizes().values()))
        start_ranks = partial(LocalRanks, module="pagoda.assembly.rank_process")
        return MultiProcessExecutor(setup.config, start_ranks, load_timeout_s=timeout_s, on_death=on_death)
    if setup.config.parallel.executor == "ray":
        return _on_ray(setup, on_death, ray_group)
    return InProcessExecutor(make_worker(setup, pin_threads), overlap=options.pipeline_depth > 1)


def _on_ray(setup: EngineSetup, on_death: Callable[[WorkerDied], object], group: object) -> Executor:
    from pagoda.assembly.rank_process import make_executor
    from pagoda.executors.multi_process import MultiProcessExecutor, load_timeout_s

    try:
        from pagoda.executors.ray import RayRanks, connect
    except ImportError as error:
        raise ConfigError("distributed_executor_backend='ray' needs Ray on every machine: pip install ray") from error
    timeout_s = load_timeout_s(sum(setup.files.sizes().values()))
    start_ranks = partial(RayRanks, make=make_executor, group=group)
    return MultiProcessExecutor(setup.config, start_ranks, host=connect(), load_timeout_s=timeout_s, on_death=on_death)


def _lookup_speculator(setup: EngineSetup, max_rows: int) -> Speculator | None:
    """Return the speculator of an executor without a model, for drafters that run none."""
    drafting = setup.drafting
    if drafting is None or drafting.num_layers or drafting.files is not None:
        return None
    return Speculator(drafting, make_drafter(drafting.config), setup.max_model_len, max_rows)


def _log(setup: EngineSetup, capacity: KVCapacity, load_s: float) -> None:
    """Log what has started, one fact per line."""
    scheduler, drafting = setup.config.scheduler, setup.drafting
    dtype = resolve_quantization(setup.files, setup.config.model.quantization) or setup.dtype
    logger.info(
        "model: %s (%s), weights in %s, computed in %s by %s kernels on %s, loaded in %.1f s",
        setup.files.name,
        setup.spec.architecture,
        dtype,
        setup.dtype,
        setup.kernels,
        setup.device.name,
        load_s,
    )
    if not setup.groups:
        logger.info("KV cache: none, prompts are computed in one step")
    else:
        _log_cache(setup, capacity)
    logger.info(
        "scheduler: %s, %s, up to %d sequences and %d tokens per step, prefix caching %s, preemption: %s, drafts: %s",
        scheduler.scheduling_mode.value,
        scheduler.scheduling_policy.value,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        "on" if setup.config.cache.enable_prefix_caching else "off",
        scheduler.preemption_mode.value,
        "none" if drafting is None else _length_of_drafts(drafting.config),
    )


def _length_of_drafts(config: SpeculativeConfig) -> str:
    most = "up to " if config.adaptive else ""
    return f"{config.method}, {most}{config.num_speculative_tokens} tokens per sequence"


def _log_cache(setup: EngineSetup, capacity: KVCapacity) -> None:
    num_tokens = capacity.num_blocks * capacity.block_size
    logger.info(
        "KV cache: %d tokens (%d blocks of %d, %.2f GiB, %s; %d blocks in host memory), room for %.1f requests of %d "
        "tokens (max_model_len)",
        num_tokens,
        capacity.num_blocks,
        capacity.block_size,
        capacity.pool_bytes / 2**30,
        setup.kv_dtype,
        capacity.num_host_blocks,
        num_tokens / setup.max_model_len,
        setup.max_model_len,
    )
