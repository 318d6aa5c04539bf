"""GET /api/version, /api/tags, /api/ps; POST /api/show, /api/embed, /api/embeddings: Ollama's models and embeddings."""

import hashlib
import time
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.request_limits import RequestLimits
from pagoda.server.body import ModelBody
from pagoda.server.dialects.ollama.bodies import OllamaOptions
from pagoda.server.dialects.ollama.dialect import OllamaError, model_name, ollama_error, timestamp
from pagoda.server.discovery import capabilities_of
from pagoda.server.embeddings import Count, EmbeddingRequest, embed
from pagoda.server.routing import Router
from pagoda.server.sending import json_response
from pagoda.server.served_model import ModelFacts, ServedModel
from pagoda.server.state import state_of
from pagoda.server.turn import naming_fields

router = Router(error=OllamaError, error_form=ollama_error)

OLLAMA_VERSION = "0.12.6"
"""Whose API this is: clients refuse a server that is older than what they need."""
_NEVER_S = 100 * 365 * 86400


class OllamaDetails(Struct, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct, kw_only=True):
    """A model, or an adapter of it.   size: bytes on disk.   expires_at, size_vram, context_length: of loaded ones."""

    name: str
    model: str
    modified_at: str | UnsetType = UNSET
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(Struct, frozen=True):
    models: list[OllamaModel]


class OllamaVersion(Struct, frozen=True):
    version: str


class OllamaShowRequest(ModelBody, kw_only=True, frozen=True):
    """POST /api/show

    name: Older form of `model`.
    verbose: Has no effect.
    """

    name: str | None = None
    verbose: bool | None = None

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(model=self.model, name=self.name)


class OllamaShown(Struct, kw_only=True):
    """What is known of a model.   model_info: with the names of GGUF files, as far as it is known."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaEmbedRequest(ModelBody, kw_only=True, frozen=True):
    """POST /api/embed

    input: A text, or several.
    truncate: Keep the start of a text that does not fit; else that is an error.
    dimensions: Keep so many elements, of models made for it.
    options: Have no effect.
    keep_alive: Has no effect.
    """

    input: str | list[str]
    truncate: bool | None = None
    dimensions: Count | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None

    def check(self, limits: RequestLimits) -> None:
        with naming_fields(_own_name):
            self.asked(self.model).check(limits)

    def asked(self, model: str | None) -> EmbeddingRequest:
        """Return the same as a body of /v1/embeddings."""
        truncated = -1 if self.truncate else None
        return EmbeddingRequest(
            model=model,
            input=self.input,  # type: ignore[arg-type]  # a list of texts is one of texts or tokens
            truncate_prompt_tokens=truncated,
            dimensions=self.dimensions,
            normalize=True,
        )


class OllamaEmbeddingsRequest(ModelBody, kw_only=True, frozen=True):
    """POST /api/embeddings: the older form of /api/embed, for one text.

    prompt: The text.
    options: Have no effect.
    keep_alive: Has no effect.
    """

    prompt: str
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None

    def check(self, limits: RequestLimits) -> None:
        with naming_fields(_name_of_prompt):
            self.asked(self.model).check(limits)

    def asked(self, model: str | None) -> EmbeddingRequest:
        """Return the same as a body of /v1/embeddings."""
        return EmbeddingRequest(model=model, input=self.prompt)


def _own_name(param: str) -> str:
    return "truncate" if param == "truncate_prompt_tokens" else param


def _name_of_prompt(param: str) -> str:
    return {"input": "prompt", "truncate_prompt_tokens": ""}.get(param, param)


class OllamaEmbeddings(Struct, kw_only=True):
    """embeddings: of each text, of length 1.   total_duration, load_duration: in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbedding(Struct):
    embedding: list[float]


@router.get("/api/version", answer=OllamaVersion)
async def ollama_version(http: Request) -> Response:
    """The version of Ollama whose API this is."""
    return json_response(OllamaVersion(OLLAMA_VERSION))


@router.get("/api/tags", answer=OllamaModels)
async def ollama_tags(http: Request) -> Response:
    """The names under which the model is served, and its LoRA adapters."""
    state = state_of(http)
    models = [_described(served, name) for served in state.models.all for name in served.all_names]
    for model in models:
        model.modified_at = timestamp(state.started_at)
    return json_response(OllamaModels(models))


@router.get("/api/ps", answer=OllamaModels)
async def ollama_ps(http: Request) -> Response:
    """The models of /api/tags that are loaded."""
    state = state_of(http)
    models: list[OllamaModel] = []
    for served in [one for one in state.models.all if one.is_loaded]:
        for name in served.all_names:
            model = _described(served, name)
            model.expires_at = timestamp(state.started_at + _NEVER_S)
            model.size_vram = model.size if served.facts.is_on_gpu else 0
            model.context_length = served.max_model_len
            models.append(model)
    return json_response(OllamaModels(models))


@router.post("/api/show", answer=OllamaShown, body=OllamaShowRequest)
async def ollama_show(http: Request) -> Response:
    """What is known of a model: its template, its context, and what it can do."""
    state = state_of(http)
    body = await state.bodies.read(http, OllamaShowRequest)
    picked = state.pick(http, model_name(state, body.model or body.name))
    name, model = picked.name, picked.model
    family = model.facts.family
    return json_response(
        OllamaShown(
            modelfile=f"FROM {name}",
            parameters="\n".join(f"{key} {value}" for key, value in model.default_sampling.items()),
            template=model.template_for(None, False) or "",
            details=_details(model.facts),
            model_info={
                "general.architecture": family,
                "general.parameter_count": model.facts.num_parameters,
                f"{family}.context_length": model.max_model_len,
                f"{family}.embedding_length": model.facts.hidden_size,
            },
            capabilities=capabilities_of(model),
            modified_at=timestamp(state.started_at),
        )
    )


@router.post("/api/embed", answer=OllamaEmbeddings, body=OllamaEmbedRequest)
async def ollama_embed(http: Request) -> Response:
    """Return the embedding of each text, of length 1."""
    began_s, state = time.perf_counter(), state_of(http)
    body = await state.bodies.read(http, OllamaEmbedRequest)
    with naming_fields(_own_name):
        pooled = await embed(http, body.asked(model_name(state, body.model)))
    return await pooled.respond(
        lambda: OllamaEmbeddings(
            model=pooled.model,
            embeddings=[vector.tolist() for vector in pooled.vectors],
            total_duration=round(1e9 * (time.perf_counter() - began_s)),
            prompt_eval_count=pooled.usage.prompt_tokens,
        )
    )


@router.post("/api/embeddings", answer=OllamaEmbedding, body=OllamaEmbeddingsRequest)
async def ollama_embeddings(http: Request) -> Response:
    """Return the embedding of a text, as the model was made to scale it."""
    state = state_of(http)
    body = await state.bodies.read(http, OllamaEmbeddingsRequest)
    with naming_fields(_name_of_prompt):
        pooled = await embed(http, body.asked(model_name(state, body.model)))
    return await pooled.respond(lambda: OllamaEmbedding(pooled.vectors[0].tolist()))


def _described(model: ServedModel, name: str) -> OllamaModel:
    facts = model.facts
    digest = hashlib.sha256(f"{name} {facts.num_bytes}".encode()).hexdigest()
    return OllamaModel(name=name, model=name, size=facts.num_bytes, digest=digest, details=_details(facts))


def _details(facts: ModelFacts) -> OllamaDetails:
    return OllamaDetails(
        format=facts.format,
        family=facts.family,
        families=[facts.family],
        parameter_size=facts.parameter_size,
        quantization_level=facts.weights,
    )
