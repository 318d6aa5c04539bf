"""The state that all routes share, kept in app.state, and how it is built from the settings and an engine client."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from pagoda.assembly.engine_setup import EngineSetup, resolve_engine
from pagoda.assembly.input_setup import build_input_processor
from pagoda.base.config import EngineConfig
from pagoda.base.request_limits import RequestLimits
from pagoda.base.server_config import ServerConfig
from pagoda.engine.answers.tool_parsers import parser_named
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.calls import AnyCalls, OwnCalls
from pagoda.engine.clients.remote_client import EngineClient
from pagoda.engine.wire import EngineSizes
from pagoda.loading.model_config import read_images, summarize_weights
from pagoda.metrics.prometheus import CACHE_LABELS, ServerMetrics
from pagoda.server.body_reader import BodyReader
from pagoda.server.dialects.openai_body import SamplingBody
from pagoda.server.errors import ApiError
from pagoda.server.history import History
from pagoda.server.looks import Looks
from pagoda.server.middleware import Drain
from pagoda.server.peers import Peers
from pagoda.server.request_starter import RequestStarter
from pagoda.server.request_state import request_state
from pagoda.server.seals import server_secret
from pagoda.server.served_adapters import ServedAdapters
from pagoda.server.served_model import ModelFacts, PickedModel, ServedModel
from pagoda.server.telemetry import Telemetry

logger = logging.getLogger("pagoda.server")


@dataclass(slots=True)
class ServerState:
    """The state that all routes share.

    bodies: reads those of requests.   forces_usage: all streams tell it.
    looks: at the engine, for those who look at its requests.
    owned: what the processes of the server have once, see Owned.
    pull_flags: of `pagoda models pull`, so that it fetches into this server's cache.
    max_num_seqs: that the engine runs at once.
    telemetry: exports each request, if there is somewhere to.
    returns_token_ids: log-probabilities have ids of tokens, where a request does not say.
    """

    starter: RequestStarter
    model: ServedModel
    block_size: int
    has_admin_key: bool = False
    pull_flags: tuple[str, ...] = ()
    forces_usage: bool = False
    returns_token_ids: bool = False
    bodies: BodyReader = field(default_factory=lambda: BodyReader(RequestLimits()))
    engine: EngineClient | None = None
    config: ServerConfig = field(default_factory=ServerConfig)
    looks: Looks = field(default_factory=Looks)
    drain: Drain = field(default_factory=Drain)
    peers: Peers = field(default_factory=Peers)
    telemetry: Telemetry | None = None
    max_num_seqs: int = 1
    owned: AnyCalls = field(default_factory=lambda: OwnCalls({}))
    started_at: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        observed = self.starter.observed
        self.peers.own = {
            "counts": self.starter.metrics.counts,
            "oldest": observed.oldest,
            "requests": observed.requests,
            "details": observed.details,
            "most_alike": observed.most_alike,
            "abort": self.starter.abort,
            "change_adapter": self.model.adapters.try_to,
        }

    def pick(self, http: Request, name: str | None) -> PickedModel:
        """Return the model that a request asks for, noting it for the log. Raises ApiError (404) for an unknown one."""
        picked = self.model.pick(name)
        request_state(http).model = picked.name
        return picked

    def check_admin(self, http: Request) -> None:
        """Raise ApiError (403) if the server has an admin key and the caller did not send it."""
        if self.has_admin_key and not request_state(http).caller.is_admin:
            raise ApiError(403, "this affects all users of the server: use the admin key (--admin-api-key)")

    def is_operator(self, http: Request) -> bool:
        """Return whether the caller has the admin key, or the server is one of this machine that has no keys."""
        config = self.config
        has_no_keys = not config.api_keys and config.admin_api_key is None
        return request_state(http).caller.is_admin or (config.is_local and has_no_keys)

    def writes_ids(self, body: SamplingBody) -> bool:
        """Return whether tokens of log-probabilities are written as "token_id:ID"."""
        asked = body.return_tokens_as_token_ids
        return self.returns_token_ids if asked is None else asked

    def request_id(self, http: Request, asked: str | None, prefix: str, num_prompts: int) -> str:
        """Return the id of this request and its response: from the body, or else the access log's.

        Several requests may have the same X-Request-Id header: while one is running, others get a suffix.
        """
        if asked is not None:
            return f"{prefix}{asked}"
        known = request_state(http)
        request_id = f"{prefix}{known.request_id}"
        is_free = self.starter.is_free(known.caller.key, request_id, num_prompts)
        return request_id if is_free else f"{request_id}-{uuid.uuid4().hex[:8]}"


def state_of(http: Request) -> ServerState:
    return http.app.state.server  # type: ignore[no-any-return]


async def build_state(
    config: EngineConfig,
    client: EngineClient,
    started: Callable[[], Awaitable[EngineSizes]],
    peers: Peers | None = None,
) -> ServerState:
    """Build the state of a server whose engine starts meanwhile; return when that is ready.

    started: waits for the engine.   peers: of this process, where there are others.
    Raises ConfigError or CapacityError for invalid settings, WorkerDied if the engine does not start.
    """
    # This process loads the tokenizer while the engine process loads the weights.
    setup = await asyncio.to_thread(resolve_engine, config)
    inputs = await asyncio.to_thread(build_input_processor, setup)
    sizes = await started()
    inputs.client_index = client.index
    inputs.limits.fit(sizes.max_model_len)
    peers = peers or Peers()
    names = config.model.served_model_name or (config.model.model,)
    server = config.server
    max_loras = config.model.lora.num_per_step if config.model.lora.enable_lora else 0
    metrics = ServerMetrics(names[0], client.stats, _cache_labels(config, sizes), max_loras, lambda: client.num_deaths)
    client.on_step = metrics.iteration_tokens.observe
    asyncio.get_running_loop().run_in_executor(None, inputs.grammars.load)  # before clients could wait for it
    template = inputs.tokenizer.facts.chat_template
    if template is None and inputs.limits.tasks.generates and inputs.speech is None:
        logger.warning(
            "%s has no chat template: /v1/completions works, /v1/chat/completions is a 400 unless --chat-template FILE "
            "gives it one",
            names[0],
        )
    parser = server.tool_call_parser
    if parser not in ("auto", "none"):
        parser = parser_named(parser)  # raises for an unknown name, before the first request needs it
    llm = AsyncEngine(client, inputs)
    peers.open(server)
    adapters = ServedAdapters(llm, tuple(names), server.lora_sources.lora_dir)
    return ServerState(
        starter=RequestStarter(llm, peers.make_admission(server), metrics, peers.salt_secret),
        model=ServedModel(
            names=tuple(names),
            llm=llm,
            adapters=adapters,
            max_model_len=sizes.max_model_len,
            chat_template=template,
            tool_parser=parser,
            trusts_templates=server.trust_request_chat_template,
            template_kwargs=server.answer_defaults.default_chat_template_kwargs,
            history=await asyncio.to_thread(_history_of, config, llm, peers, sizes.max_model_len),
            facts=await asyncio.to_thread(_facts_of, setup),
        ),
        block_size=sizes.block_size,
        bodies=BodyReader(config.model.request_limits, server.strict_fields),
        forces_usage=server.answer_defaults.enable_force_include_usage,
        returns_token_ids=server.answer_defaults.return_tokens_as_token_ids,
        has_admin_key=server.admin_api_key is not None,
        pull_flags=("--source", config.model.source, *_cache_flag(config.model.cache_dir)),
        engine=client,
        config=server,
        looks=Looks(client.look),
        peers=peers,
        max_num_seqs=config.scheduler.max_num_seqs,
        owned=peers.calls,
    )


def _cache_flag(folder: str | None) -> tuple[str, ...]:
    return () if folder is None else ("--cache-dir", folder)


def _history_of(config: EngineConfig, llm: AsyncEngine, peers: Peers, max_model_len: int) -> History | None:
    """Return the history of the model; None if it is off."""
    inputs = llm.input_processor
    if config.server.answer_defaults.history == "off" or not inputs.limits.tasks.generates:
        return None
    secret = server_secret(peers.salt_secret)
    return History(config.model.model, inputs.tokenizer, max_model_len, secret, peers.calls)


def _facts_of(setup: EngineSetup) -> ModelFacts:
    weights = summarize_weights(setup.files)
    return ModelFacts(
        family=setup.spec.architecture,
        format=setup.files.format,
        weights=next(iter(weights.bytes_by_type), ""),
        num_bytes=weights.num_bytes,
        num_parameters=weights.num_parameters,
        hidden_size=setup.spec.hidden_size,
        longest=setup.spec.max_position,
        reads_images=setup.encoder is not None and not setup.crosses and read_images(setup.files) is not None,
        is_on_gpu=setup.device.name != "cpu",
    )


def _cache_labels(config: EngineConfig, sizes: EngineSizes) -> dict[str, str]:
    cache = config.cache
    blocks = (sizes.block_size, sizes.num_blocks, sizes.num_host_blocks)
    num_tokens = sizes.block_size * sizes.num_blocks
    capacity = (num_tokens, round(num_tokens / sizes.max_model_len, 2))
    values = (*blocks, cache.enable_prefix_caching, cache.gpu_memory_utilization, cache.kv_cache_dtype, *capacity)
    return dict(zip(CACHE_LABELS, map(str, values), strict=True))
