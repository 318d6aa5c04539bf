"""ServedModel: a model with what requests need of it, and how a request's `model` picks it."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from pagoda.assembly.engine_setup import resolve_engine
from pagoda.assembly.identity import parts_beside_weights
from pagoda.base.abbreviate import abbreviate, shorten
from pagoda.base.errors import ConfigError, PagodaError
from pagoda.base.pooling import ModelTasks
from pagoda.engine.answers.tool_parsers import parser_for_template
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.remote_client import EngineClient
from pagoda.engine.inputs.adapters import Adapter
from pagoda.engine.templates.chat_template import ChatTemplate
from pagoda.engine.wire import EngineSizes, WeightsSource
from pagoda.server.errors import ApiError
from pagoda.server.history import History
from pagoda.server.looks import Looks
from pagoda.server.model_engine import LoadState, ModelEngine
from pagoda.server.request_starter import RequestStarter
from pagoda.server.request_state import request_state
from pagoda.server.served_adapters import ServedAdapters

logger = logging.getLogger("pagoda.server")


@dataclass(frozen=True, slots=True)
class PickedModel:
    """What a request's `model` stands for.   name: of answers.   lora: the adapter, None for the model itself."""

    name: str
    model: "ServedModel"
    lora: Adapter | None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What lists of models show.

    family: its architecture.   format: of its files.   weights: the type that most of them have, on disk.
    num_bytes: of the weights, on disk.   longest: sequence that the model can have, in tokens.
    """

    family: str = ""
    format: str = ""
    weights: str = ""
    num_bytes: int = 0
    num_parameters: int = 0
    hidden_size: int = 0
    longest: int = 0
    reads_images: bool = False
    is_on_gpu: bool = False

    @property
    def parameter_size(self) -> str:
        """The number of parameters, as `1.2B` or `134.52M`."""
        count = self.num_parameters
        return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


@dataclass(slots=True)
class ServedModel:
    """A model that is served.

    names: the first is the default in answers.   starter: starts its requests.   adapters: of it, by name.
    chat_template: its own, of one or several names.   tool_parser: a name in TOOL_PARSERS, "none", "auto".
    trusts_templates: callers may send their own chat templates.   template_kwargs: for templates, where a request does
    not set them.   facts: for lists of models.
    max_num_seqs: that its engines run at once.
    history: what its answers were, as tokens; None if that is off.
    engine: its process, None in tests that have none.   loading: whether that is loaded.
    looks: at the engine, for those who look at its requests.
    parts: of its files besides the weights, by name, as digests.
    """

    names: tuple[str, ...]
    starter: RequestStarter
    adapters: ServedAdapters
    max_model_len: int
    chat_template: ChatTemplate | None
    tool_parser: str
    block_size: int
    max_num_seqs: int = 1
    trusts_templates: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    facts: ModelFacts = field(default_factory=ModelFacts)
    history: History | None = None
    engine: EngineClient | None = None
    loading: ModelEngine | None = None
    looks: Looks = field(default_factory=Looks)
    parts: Mapping[str, str] = field(default_factory=dict[str, str])
    _has_warned: bool = False

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def llm(self) -> AsyncEngine:
        """The engine that runs it."""
        return self.starter.llm

    @property
    def died(self) -> PagodaError | None:
        """Why no request to it can be served any more, None while they can."""
        return self.llm.died or (self.engine.died if self.engine is not None else None)

    @property
    def is_loaded(self) -> bool:
        return self.loading is None or self.loading.state is LoadState.LOADED

    @property
    def engine_state(self) -> str:
        """What its engine does: up, starting, stuck, or gone for good; or what it is in place of loaded."""
        if self.loading is not None and self.loading.state is not LoadState.LOADED:
            return self.loading.state.value
        if self.died is not None:
            return "gone"
        if self.engine is None:
            return "up"
        return "starting" if not self.engine.is_up else "stuck" if self.engine.is_stuck else "up"

    def fit(self, sizes: EngineSizes) -> None:
        """Take the sizes of its engine, which is loaded."""
        self.llm.revive()
        self.llm.input_processor.limits.fit(sizes.max_model_len)
        self.max_model_len, self.block_size = sizes.max_model_len, sizes.block_size

    async def check_weights(self, source: WeightsSource) -> None:
        """Raise ConfigError unless the model of a source differs from this one in its weights alone."""
        assert self.loading is not None
        setup = await asyncio.to_thread(resolve_engine, source.of(self.loading.config))
        found = await asyncio.to_thread(parts_beside_weights, setup)
        if changed := dict(found.items() ^ self.parts.items()):
            raise ConfigError(
                f"{abbreviate(source.model)}: only weights can be replaced, and these are not as those of "
                f"{self.name}: {shorten(', '.join(sorted(changed)))}; start another server for it"
            )

    @property
    def num_restarts(self) -> int:
        """How often its engine has died."""
        return self.engine.num_deaths if self.engine is not None else 0

    @property
    def all_names(self) -> tuple[str, ...]:
        """Its own names and those of its adapters."""
        return (*self.names, *self.adapters.by_name)

    @property
    def default_sampling(self) -> Mapping[str, object]:
        """The parameters of requests that do not set them."""
        return self.llm.input_processor.default_sampling

    def find(self, name: str) -> PickedModel | None:
        """Return what one of its names stands for; None for another name."""
        if name in self.names:
            return PickedModel(name, self, None)
        served = self.adapters.by_name.get(name)
        return None if served is None else PickedModel(name, self, served.lora)

    @property
    def tasks(self) -> ModelTasks:
        """What the model can be asked for."""
        return self.llm.input_processor.limits.tasks

    @property
    def hears(self) -> bool:
        """Whether it transcribes."""
        return self.llm.input_processor.speech is not None

    def warn_of_untrained(self, http: Request) -> None:
        """Say, once in the log and in a header of each answer, that embeddings and scores of this model mean little."""
        tasks = self.tasks
        if not tasks.generates or tasks.plan.is_declared or not tasks.plan.embeds:
            return
        text = "this model generates text; nothing says that it was trained for embeddings or scores"
        request_state(http).warning = text
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s: %s (logged once)", request_state(http).route, text)

    def check_template(self, template: str | None) -> None:
        """Raise ApiError (400) for a caller's template if those are not trusted: the sandbox does not prevent loops."""
        if template is not None and template not in self._named and not self.trusts_templates:
            hint = "start the server with --trust-request-chat-template to allow templates in requests"
            raise ApiError(400, f"chat_template: this server only uses the model's own; {hint}", "chat_template")

    def template_for(self, asked: str | None, has_tools: bool) -> str | None:
        """Return the text of the template of a request.   asked: a text, or a name."""
        if asked is not None:
            return self._named.get(asked, asked)
        return None if self.chat_template is None else self.chat_template.source_for(has_tools)

    @property
    def _named(self) -> Mapping[str, str]:
        return {} if self.chat_template is None else self.chat_template.sources

    def tool_parser_for(self, template: str | None) -> str | None:
        """Return the name of the parser for the output of this template, or None for plain text."""
        if self.tool_parser == "auto":
            return parser_for_template(template)
        return None if self.tool_parser == "none" else self.tool_parser
