"""Start the model of a recording, to compute its steps again."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from pagoda.assembly.assemble import build_executor, start_executor
from pagoda.assembly.engine_setup import resolve_engine
from pagoda.assembly.sizing import fit_cache
from pagoda.base.config import PARTS, EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.base.redact import HIDDEN
from pagoda.engine.executor import Executor
from pagoda.engine.recording.format import RecordedSettings


def start_recorded_model(
    recorded: RecordedSettings, engine: Mapping[str, Any], model: str | None = None
) -> tuple[Executor, int]:
    """Start an executor as a recording's engine had it, and return it with the size of its vocabulary.

    engine: its settings, without secrets.   model: in place of the one that it names.
    Raises ConfigError for a model with another KV cache, and what `build_engine_core` raises.
    """
    parts = {part: engine.get(part, {}) for part in PARTS if part != "server"}
    given = {name: value for name, value in parts["debug"].items() if value != HIDDEN}
    config = msgspec.convert({**parts, "debug": given, "given": engine.get("given")}, EngineConfig, strict=False)
    debug = replace(config.debug, num_blocks=recorded.num_blocks, num_host_blocks=recorded.num_host_blocks, record=None)
    config = replace(config, debug=debug)
    if model is not None:
        config = replace(config, model=replace(config.model, model=model))
    setup = resolve_engine(config)
    if setup.groups != recorded.kv_groups or setup.config.cache.block_size != recorded.cache.block_size:
        raise ConfigError(f"{config.model.model} has another KV cache than the recorded model: name that with --model")
    setup, capacity = fit_cache(setup)
    executor = build_executor(setup, capacity, pin_threads=False, on_death=lambda _: None, ray_group=None)
    try:
        setup, _ = start_executor(executor, setup, capacity)
    except BaseException:
        executor.shutdown()
        raise
    return executor, setup.spec.vocab_size
