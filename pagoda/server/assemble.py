"""Build the state that all routes share from the settings and an engine client."""

import asyncio

from pagoda.base.config import EngineConfig
from pagoda.base.server_config import ServerConfig, ServerLimits
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.process_client import ProcessClient
from pagoda.engine.templates.process import TemplateLimits
from pagoda.engine.tokenizers.bounded_encoder import EncodingLimits
from pagoda.engine.wire import EngineFacts
from pagoda.engine_setup import resolve_engine
from pagoda.input_setup import build_input_processor
from pagoda.metrics.prometheus import ServerMetrics
from pagoda.server.admission import Admission, AdmissionLimits
from pagoda.server.generation import Generator
from pagoda.server.served_adapters import ServedAdapters
from pagoda.server.state import ServerState
from pagoda.server.tool_parsers import parser_named


async def build_state(
    config: EngineConfig, client: ProcessClient, starting: "asyncio.Task[EngineFacts]"
) -> ServerState:
    """Build the state of a server while the task `starting` starts its engine; return when that is ready.

    Raises ConfigError or CapacityError for invalid settings, WorkerDied if the engine does not start.
    """
    # This process loads the tokenizer while the engine process loads the weights.
    setup = await asyncio.to_thread(resolve_engine, config)
    encoding_limits = EncodingLimits(config.server.server_timeouts.tokenizer_timeout_s)
    inputs = await asyncio.to_thread(build_input_processor, setup, encoding_limits)
    facts = await starting
    inputs.limits.fit(facts.max_model_len)
    names = config.model.served_model_name or (config.model.model,)
    server = config.server
    max_loras = config.model.lora.max_loras if config.model.lora.enable_lora else 0
    metrics = ServerMetrics(names[0], client.stats, _cache_labels(config, facts), max_loras, lambda: client.num_deaths)
    client.on_step = metrics.iteration_tokens.observe
    template = inputs.tokenizer.facts.chat_template
    sources = template.sources if template is not None else {}
    source = sources.get("default") or next(iter(sources.values()), None)
    parser = server.tool_call_parser
    if parser not in ("auto", "none"):
        parser = parser_named(parser)  # raises for an unknown name, before the first request needs it
    llm = AsyncEngine(client, inputs, template_limits=_template_limits(server))
    adapters = ServedAdapters(llm, tuple(names), server.lora_sources.lora_dir)
    await adapters.load_modules(server.lora_sources)
    if template is not None:
        await llm.text.start()
    return ServerState(
        generator=Generator(llm, Admission(_limits(server.server_limits)), metrics),
        adapters=adapters,
        model_names=tuple(names),
        max_model_len=facts.max_model_len,
        chat_template=source,
        tool_template=sources.get("tool_use", source),
        tool_parser=parser,
        trusts_templates=server.trust_request_chat_template,
        request_limits=config.model.request_limits,
        has_admin_key=server.admin_api_key is not None,
        engine=client,
    )


def _template_limits(server: ServerConfig) -> TemplateLimits:
    return TemplateLimits(server.server_timeouts.template_timeout_s, server.server_limits.template_memory_bytes)


def _limits(limits: ServerLimits) -> AdmissionLimits:
    return AdmissionLimits(
        max_requests=limits.max_queued_requests,
        max_tokens=limits.max_queued_tokens,
        max_requests_per_key=limits.max_requests_per_key,
        requests_per_minute_per_key=limits.requests_per_minute_per_key,
    )


def _cache_labels(config: EngineConfig, facts: EngineFacts) -> dict[str, str]:
    return {
        "block_size": str(facts.block_size),
        "num_gpu_blocks": str(facts.num_blocks),
        "num_cpu_blocks": str(facts.num_host_blocks),
        "enable_prefix_caching": str(config.cache.enable_prefix_caching),
        "gpu_memory_utilization": str(config.cache.gpu_memory_utilization),
        "cache_dtype": config.cache.kv_cache_dtype,
    }
