"""What clients read to find a server and its models: cards of /v1/models, llama.cpp's /props, LM Studio's lists."""

import time
from importlib.metadata import version
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, json
from starlette.requests import Request
from starlette.responses import Response

from pagoda.engine.answers.reasoning import reasoning_of
from pagoda.server.routing import Router
from pagoda.server.sending import json_response
from pagoda.server.served_model import ServedModel
from pagoda.server.state import state_of

router = Router()


def capabilities_of(model: ServedModel) -> list[str]:
    """Return what a model can do, in Ollama's words."""
    template = model.template_for(None, True)
    is_chat = model.tasks.generates and template is not None
    can = {
        "completion": model.tasks.generates and not model.hears,  # its prompt alone is refused
        "embedding": _embeds(model),
        "tools": is_chat and model.tool_parser_for(template) is not None,
        "vision": model.facts.reads_images,
        "audio": model.hears,
        "thinking": is_chat and reasoning_of(template) is not None,
    }
    return [name for name, has in can.items() if has]


def _embeds(model: ServedModel) -> bool:
    """Return whether a model is for embeddings: any that generates text can make some, too."""
    return model.tasks.plan.embeds and (model.tasks.plan.is_declared or not model.tasks.generates)


# ---- /v1/models


class ModelMeta(Struct, frozen=True):
    """As llama.cpp has it.   n_ctx: longest prompt and output; n_ctx_train: that of the model itself.

    n_embd: of a hidden state.   size: bytes of the weights on disk.
    """

    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int


class ModelArchitecture(Struct, frozen=True):
    input_modalities: list[str]
    output_modalities: list[str]


class ModelStatus(Struct, frozen=True):
    """Whether a model is loaded.

    value: unloaded, waiting (for room), loading, loaded or unloading.   for_s: since when.
    load_s: how long its last load took.   users, waiting: requests that use it, and that wait for it.
    bytes: of memory that it takes, about; 0 of a model that is alone.   error: why its last load failed, if it did.
    """

    value: str
    for_s: float = 0.0
    load_s: float = 0.0
    users: int = 0
    waiting: int = 0
    bytes: int = 0
    error: str = ""


def _status_of(model: ServedModel) -> ModelStatus:
    if (known := model.loading) is None:
        return ModelStatus("loaded")
    return ModelStatus(
        known.state.value,
        round(time.monotonic() - known.since_s, 1),
        round(known.load_s, 1),
        known.num_users,
        len(known.waiters),
        known.num_bytes,
        known.error,
    )


class ModelCard(Struct, frozen=True, kw_only=True):
    """A name that is served.

    owned_by: whose API it is; clients that look for such servers go by it.   parent: of an adapter or another name.
    status: of the model; missing for an adapter, which the engine reads whenever a request needs it and has no copy.
    max_model_len, context_length: longest prompt and output, in tokens.   capabilities: in Ollama's words.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vllm"
    root: str
    parent: str | None = None
    max_model_len: int
    context_length: int
    capabilities: list[str]
    architecture: ModelArchitecture
    meta: ModelMeta
    status: ModelStatus | UnsetType = UNSET


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def card_of(model: ServedModel, name: str, created: int) -> ModelCard:
    """Return the card of one of a model's names."""
    adapter = model.adapters.by_name.get(name)
    lora = None if adapter is None else adapter.lora
    facts, longest = model.facts, model.max_model_len
    inputs = {"text": not model.hears, "image": facts.reads_images, "audio": model.hears}
    return ModelCard(
        id=name,
        created=created,
        root=model.names[0] if lora is None else lora.path,
        parent=None if adapter is None else adapter.parent,
        max_model_len=longest,
        context_length=longest,
        capabilities=capabilities_of(model),
        architecture=ModelArchitecture(
            [kind for kind, has in inputs.items() if has], ["text" if model.tasks.generates else "embeddings"]
        ),
        meta=ModelMeta(
            n_vocab=model.llm.input_processor.tokenizer.facts.vocab_size,
            n_ctx=longest,
            n_ctx_train=facts.longest,
            n_embd=facts.hidden_size,
            n_params=facts.num_parameters,
            size=facts.num_bytes,
        ),
        status=_status_of(model) if lora is None else UNSET,
    )


# ---- llama.cpp's server


class GenerationSettings(Struct, frozen=True):
    """params: of requests that do not set them, as far as the model has its own.   n_ctx: longest prompt and output."""

    params: dict[str, Any]
    n_ctx: int


class Modalities(Struct, frozen=True):
    vision: bool
    audio: bool


class ServerProperties(Struct, frozen=True, kw_only=True):
    """total_slots: requests that run at once.   model_path: a name, too: no path of the server is shown."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str


@router.get("/props", answer=ServerProperties, query=("model",))
async def show_properties(http: Request) -> Response:
    """What llama.cpp's clients ask of a server.   `model`: of several, the one."""
    state = state_of(http)
    picked = state.pick(http, http.query_params.get("model"))
    model, special = picked.model, picked.model.llm.input_processor.tokenizer.facts.special_names
    return json_response(
        ServerProperties(
            default_generation_settings=GenerationSettings(dict(model.default_sampling), model.max_model_len),
            total_slots=model.max_num_seqs,
            model_alias=picked.name,
            model_path=picked.name,
            modalities=Modalities(vision=model.facts.reads_images, audio=model.hears),
            chat_template=model.template_for(None, False) or "",
            bos_token=special.get("bos_token", ""),
            eos_token=special.get("eos_token", ""),
            build_info=f"pagoda {version('pagoda-llm')}",
        )
    )


class Slot(Struct, frozen=True):
    """One of the requests that can run at once."""

    id: int
    n_ctx: int
    is_processing: bool


@router.get("/slots", answer="application/json", query=("model",))
async def list_slots(http: Request) -> Response:
    """How many requests run, of how many that can, in llama.cpp's form. What they are is in /requests.

    Of the first model, unless `model` names another.
    """
    model = state_of(http).pick(http, http.query_params.get("model")).model
    num_running = model.starter.metrics.stats().num_running
    slots = [Slot(index, model.max_model_len, index < num_running) for index in range(model.max_num_seqs)]
    return json_response(json.encode(slots))


# ---- LM Studio


class StudioModel(Struct, frozen=True, kw_only=True):
    """type: llm, vlm or embeddings.   compatibility_type: the format of its files.
    state: of the model itself, also where the name is that of an adapter.
    """

    id: str
    object: Literal["model"] = "model"
    type: str
    publisher: str
    arch: str
    compatibility_type: str
    quantization: str
    state: str
    max_context_length: int
    loaded_context_length: int
    capabilities: list[str]


class StudioModels(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[StudioModel]


@router.get("/api/v0/models", answer=StudioModels)
async def list_studio_models(http: Request) -> Response:
    """The same names as in /v1/models, in the form of LM Studio's API."""
    state = state_of(http)
    return json_response(StudioModels(data=[_studio_model(*one) for one in state.models.by_name]))


@router.get("/api/v0/models/{name:path}", answer=StudioModel)
async def show_studio_model(http: Request) -> Response:
    """One of these names; 404 for another."""
    picked = state_of(http).pick(http, http.path_params["name"])
    return json_response(_studio_model(picked.model, picked.name))


def _studio_model(model: ServedModel, name: str) -> StudioModel:
    facts = model.facts
    return StudioModel(
        id=name,
        type="embeddings" if not model.tasks.generates else "vlm" if facts.reads_images else "llm",
        publisher=_publisher(name),
        arch=facts.family,
        compatibility_type=facts.format,
        quantization=facts.weights,
        state="loaded" if model.is_loaded else "not-loaded",
        max_context_length=facts.longest,
        loaded_context_length=model.max_model_len,
        capabilities=["tool_use"] if "tools" in capabilities_of(model) else [],
    )


class StudioQuantization(Struct, frozen=True):
    name: str


class StudioConfig(Struct, frozen=True):
    context_length: int


class StudioInstance(Struct, frozen=True):
    id: str
    config: StudioConfig


class StudioCapabilities(Struct, frozen=True):
    vision: bool
    trained_for_tool_use: bool


class NewStudioModel(Struct, frozen=True, kw_only=True):
    """type: llm or embedding.   key: the name."""

    type: str
    publisher: str
    key: str
    display_name: str
    architecture: str
    quantization: StudioQuantization
    size_bytes: int
    params_string: str
    loaded_instances: list[StudioInstance]
    max_context_length: int
    format: str
    capabilities: StudioCapabilities


class NewStudioModels(Struct, frozen=True):
    models: list[NewStudioModel]


@router.get("/api/v1/models", answer=NewStudioModels)
async def list_new_studio_models(http: Request) -> Response:
    """The same names as in /v1/models, in the newer form of LM Studio's API."""
    return json_response(NewStudioModels([_new_studio_model(*one) for one in state_of(http).models.by_name]))


def _new_studio_model(model: ServedModel, name: str) -> NewStudioModel:
    facts, can = model.facts, capabilities_of(model)
    return NewStudioModel(
        type="llm" if model.tasks.generates else "embedding",
        publisher=_publisher(name),
        key=name,
        display_name=name,
        architecture=facts.family,
        quantization=StudioQuantization(facts.weights),
        size_bytes=facts.num_bytes,
        params_string=facts.parameter_size,
        loaded_instances=[StudioInstance(name, StudioConfig(model.max_model_len))] if model.is_loaded else [],
        max_context_length=facts.longest,
        format=facts.format,
        capabilities=StudioCapabilities(vision=facts.reads_images, trained_for_tool_use="tools" in can),
    )


def _publisher(name: str) -> str:
    """Return who a model is from, as far as its name says so."""
    return name.split("/")[-2] if "/" in name else ""
