"""From settings to a server that can answer, and its end, as async context managers; without HTTP."""

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from pagoda.assembly.model_plans import ModelPlan, plan_models
from pagoda.base.config import EngineConfig
from pagoda.engine.clients.replicas import own_engines
from pagoda.server.model_engine import ModelEngine
from pagoda.server.model_loader import ModelLoader

if TYPE_CHECKING:
    from pagoda.server.state import ServerState


@contextlib.asynccontextmanager
async def running_engines(configs: Sequence[EngineConfig]) -> "AsyncGenerator[ServerState]":
    """Start the engines of a server; yield its state when they are ready, and end them after the block.

    configs: of each model, the first of which has the settings of the server.
    Raises ConfigError or CapacityError for invalid settings, WorkerDied if an engine does not start.
    """
    most_bytes = configs[0].server.server_limits.max_models_memory
    plans, budget = ([ModelPlan(configs[0])], math.inf) if len(configs) == 1 else plan_models(configs, most_bytes)
    engines = [ModelEngine(one.config, own_engines(one.config), one.num_bytes, one.sizes) for one in plans]
    loader = ModelLoader(engines, budget, configs[0].server.server_timeouts.queue_timeout_s)
    loader.start_first()
    await asyncio.sleep(0)  # lets the process start before the imports below keep this thread busy
    try:
        from pagoda.server.load_report import report_load
        from pagoda.server.state import build_state
        from pagoda.server.telemetry import telemetry_of

        state = await build_state(loader)
        for one, model in zip(configs, state.models.all, strict=True):
            await model.adapters.load_modules(one.server.lora_sources)
        state.telemetry = telemetry_of(os.environ, state.model.name)
        reports = [
            asyncio.create_task(
                report_load(
                    *(model.name, model.starter.metrics.stats, state.peers.read_counts, model.starter.observed.oldest),
                    is_one_of_several=len(configs) > 1,
                )
            )
            for model in state.models.all
        ]
        try:
            yield state
        finally:
            for report in reports:
                report.cancel()
    finally:
        await loader.close()
