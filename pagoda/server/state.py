"""The state that all routes share, kept in app.state, and how it is built from the settings and an engine client."""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from pagoda.assembly.engine_setup import EngineSetup, resolve_engine
from pagoda.assembly.identity import parts_beside_weights
from pagoda.assembly.input_setup import build_input_processor
from pagoda.base.config import EngineConfig
from pagoda.base.errors import CapacityError, ConfigError, WorkerDied
from pagoda.base.request_limits import RequestLimits
from pagoda.base.server_config import ServerConfig
from pagoda.engine.answers.tool_parsers import parser_named
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.calls import AnyCalls, OwnCalls
from pagoda.engine.wire import EngineSizes
from pagoda.loading.model_config import read_images, summarize_weights
from pagoda.metrics.prometheus import CACHE_LABELS, ServerMetrics
from pagoda.server.body import Body
from pagoda.server.body_reader import BodyReader
from pagoda.server.dialects.openai.body import SamplingBody
from pagoda.server.errors import ApiError
from pagoda.server.history import History
from pagoda.server.live_ids import LiveIds
from pagoda.server.looks import Looks
from pagoda.server.middleware import Drain
from pagoda.server.model_engine import ModelEngine
from pagoda.server.model_loader import ModelLoader
from pagoda.server.peers import Peers
from pagoda.server.remote_admission import AnyAdmission
from pagoda.server.request_starter import RequestStarter
from pagoda.server.request_state import request_state
from pagoda.server.seals import derived, server_secret
from pagoda.server.served_adapters import ServedAdapters
from pagoda.server.served_model import ModelFacts, PickedModel, ServedModel
from pagoda.server.served_models import ServedModels
from pagoda.server.telemetry import Telemetry
from pagoda.tier import tiers_seed

logger = logging.getLogger("pagoda.server")


B = TypeVar("B", bound=Body)
_ADMINS_ONLY = "this affects all users of the server: use the admin key (--admin-api-key)"


@dataclass(slots=True)
class ServerState:
    """The state that all routes share.

    admission: of the requests to all models.
    bodies: reads those of requests.
    owned: what the processes of the server have once, see Owned.
    pull_flags: of `pagoda models pull`, so that it fetches into this server's cache.
    telemetry: exports each request, if there is somewhere to.
    """

    models: ServedModels
    admission: AnyAdmission
    pull_flags: tuple[str, ...] = ()
    bodies: BodyReader = field(default_factory=lambda: BodyReader(RequestLimits()))
    config: ServerConfig = field(default_factory=ServerConfig)
    drain: Drain = field(default_factory=Drain)
    peers: Peers = field(default_factory=Peers)
    telemetry: Telemetry | None = None
    owned: AnyCalls = field(default_factory=lambda: OwnCalls({}))
    started_at: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.peers.own = self.models

    @property
    def model(self) -> ServedModel:
        """The model of requests that name none."""
        return self.models.first

    def pick(self, http: Request, name: str | None) -> PickedModel:
        """Return the model that a request asks for, noting it for the log. Raises ApiError (404) for an unknown one."""
        picked = self.models.pick(name)
        request_state(http).model = picked.name
        return picked

    def check_admin(self, http: Request) -> None:
        """Raise ApiError (403) if the server has an admin key and the caller did not send it."""
        if self.config.admin_api_key is not None and not request_state(http).caller.is_admin:
            raise ApiError(403, _ADMINS_ONLY)

    def is_operator(self, http: Request) -> bool:
        """Return whether the caller has the admin key, or the server is one of this machine that has no keys."""
        config = self.config
        has_no_keys = not config.api_keys and config.admin_api_key is None
        return request_state(http).caller.is_admin or (config.is_local and has_no_keys)

    def writes_ids(self, body: SamplingBody) -> bool:
        """Return whether tokens of log-probabilities are written as "token_id:ID"."""
        asked = body.return_tokens_as_token_ids
        return self.config.answer_defaults.return_tokens_as_token_ids if asked is None else asked

    def request_id(self, http: Request, asked: str | None, prefix: str, num_prompts: int) -> str:
        """Return the id of this request and its response: from the body, or else the access log's.

        Several requests may have the same X-Request-Id header: while one is running, others get a suffix.
        """
        if asked is not None:
            return f"{prefix}{asked}"
        known = request_state(http)
        request_id = f"{prefix}{known.request_id}"
        is_free = self.model.starter.is_free(known.caller.key, request_id, num_prompts)
        return request_id if is_free else f"{request_id}-{uuid.uuid4().hex[:8]}"


def state_of(http: Request) -> ServerState:
    return http.app.state.server  # type: ignore[no-any-return]


async def read_as_operator(http: Request, kind: type[B]) -> tuple[ServerState, B]:
    """Return the body of an operator's request. Raises ApiError (403) for other callers."""
    state = state_of(http)
    if not state.is_operator(http):
        raise ApiError(403, _ADMINS_ONLY)
    return state, await state.bodies.read(http, kind)


async def build_state(loader: ModelLoader, peers: Peers | None = None) -> ServerState:
    """Build the state of a server whose engines start meanwhile; return when they are ready.

    loader: of the models, the first of which has the settings of the server.   peers: of this process, where there are
    others.
    Raises ConfigError or CapacityError for invalid settings, WorkerDied if an engine does not start.
    """
    engines = loader.engines
    config, peers = engines[0].config, peers or Peers()
    server = config.server
    peers.open(server)
    serving = _Shared(peers, peers.make_admission(server), LiveIds(), loader)
    models = [await _build_named(one, serving, len(engines) > 1) for one in engines]
    loader.begin()
    return ServerState(
        models=ServedModels(models, loader),
        admission=serving.admission,
        bodies=BodyReader(config.model.request_limits, server.strict_fields),
        pull_flags=("--source", config.model.source, *_cache_flag(config.model.cache_dir)),
        config=server,
        peers=peers,
        owned=peers.calls,
    )


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the models of a server share."""

    peers: Peers
    admission: AnyAdmission
    live_ids: LiveIds
    loader: ModelLoader


async def _build_named(engine: ModelEngine, shared: _Shared, is_one_of_several: bool) -> ServedModel:
    """As `_build_model`; of several models, errors name theirs."""
    try:
        return await _build_model(engine, shared)
    except (ConfigError, CapacityError, WorkerDied) as error:
        if not is_one_of_several:
            raise
        raise type(error)(f"{engine.config.model.names[0]}: {error}") from error


async def _build_model(engine: ModelEngine, shared: _Shared) -> ServedModel:
    """Return a model when its engine is ready. Raises as `build_state`."""
    config, client, names = engine.config, engine.client, engine.config.model.names
    # This process loads the tokenizer while the engine process loads the weights.
    setup = await asyncio.to_thread(resolve_engine, config)
    inputs = await asyncio.to_thread(build_input_processor, setup)
    sizes = await engine.sizes()
    inputs.client_index = client.index
    server, peers = config.server, shared.peers
    max_loras = config.model.lora.num_per_step if config.model.lora.enable_lora else 0
    metrics = ServerMetrics(
        names[0], client.stats, _cache_labels(config, sizes), max_loras, lambda: client.num_deaths, engine.loads
    )
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
    engine.llm = llm
    hold = shared.loader.holder(engine) if shared.loader.can_unload else None
    model = ServedModel(
        names=names,
        starter=RequestStarter(llm, shared.admission, metrics, _salt_secret(config, peers), shared.live_ids, hold),
        adapters=ServedAdapters(llm, names, server.lora_sources.lora_dir),
        max_model_len=sizes.max_model_len,
        chat_template=template,
        tool_parser=parser,
        block_size=sizes.block_size,
        max_num_seqs=config.scheduler.max_num_seqs * server.data_parallel_size,
        trusts_templates=server.trust_request_chat_template,
        template_kwargs=server.answer_defaults.default_chat_template_kwargs,
        history=await asyncio.to_thread(_history_of, config, llm, peers, sizes.max_model_len),
        facts=await asyncio.to_thread(_facts_of, setup),
        engine=client,
        loading=engine,
        looks=Looks(client.look),
        parts=await asyncio.to_thread(parts_beside_weights, setup),
    )

    def fit(sizes: EngineSizes) -> None:
        model.fit(sizes)
        metrics.cache_config = _cache_labels(config, sizes)

    fit(sizes)
    engine.on_sizes = fit
    return model


def _cache_flag(folder: str | None) -> tuple[str, ...]:
    return () if folder is None else ("--cache-dir", folder)


def _salt_secret(config: EngineConfig, peers: Peers) -> bytes:
    """Return the secret of cache salts: with a tier, that of its folder, so that a later server finds its blocks."""
    if config.cache.kv_tier is None:
        return peers.salt_secret
    return derived(str(tiers_seed(config)).encode(), "salts")


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
