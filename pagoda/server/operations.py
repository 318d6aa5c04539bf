"""Routes that generate nothing: health, load, metrics, models, aborts, the prefix cache, LoRA adapters."""

import itertools
from importlib.metadata import version
from typing import Literal, TypeVar

from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.lora import LoRARequest
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.wire import WeightsSource
from pagoda.metrics.prometheus import write_metrics
from pagoda.server.body import Body, Flag
from pagoda.server.dialects.messages.dialect import is_client, model_card, model_list
from pagoda.server.discovery import ModelCard, ModelList, card_of
from pagoda.server.errors import RETRY_AFTER_S, ApiError, error_response
from pagoda.server.request_state import request_state
from pagoda.server.routing import ERRORS, Router, flag
from pagoda.server.sending import cancel_on_disconnect, json_response
from pagoda.server.served_adapters import AdapterChange
from pagoda.server.served_model import ServedModel
from pagoda.server.served_models import ServedModels
from pagoda.server.state import ServerState, read_as_operator, state_of

router = Router()


@router.get("/livez", errors={503: ERRORS[503]})
async def liveness(http: Request) -> Response:
    """200 while the server does its work or can come back to it by itself; 503 if only a restart would help."""
    if (died := state_of(http).models.died) is not None:  # its engine is gone, or the outputs cannot be read any more
        return error_response(503, f"no request can be served any more: {died}")
    return Response()


class Health(Struct, frozen=True):
    """As llama.cpp's server has it."""

    status: Literal["ok"] = "ok"


@router.get("/readyz", answer=Health, errors={503: ERRORS[503]})
@router.get("/health", answer=Health, errors={503: ERRORS[503]})
@router.get("/ping", answer=Health, errors={503: ERRORS[503]})
async def readiness(http: Request) -> Response:
    """200 while requests can make progress; 503 while all engines are down, starting or stuck, or the server drains."""
    state = state_of(http)
    if (dead := await liveness(http)).status_code != 200:
        return dead
    engines = {one.engine_state for one in state.models.all}
    if engines <= {"starting", "gone"}:
        return error_response(503, "the engine process is starting", retry_after_s=2)
    if engines <= {"starting", "gone", "stuck"}:
        return error_response(503, "the engine has made no progress for too long", retry_after_s=RETRY_AFTER_S)
    if state.drain.is_draining:
        return error_response(503, "the server is shutting down", retry_after_s=RETRY_AFTER_S)
    return json_response(Health())


class VersionResponse(Struct, frozen=True):
    version: str


@router.get("/version", answer=VersionResponse)
async def show_version(http: Request) -> Response:
    """The server's version."""
    return json_response(VersionResponse(version("pagoda-llm")))


class LoadResponse(Struct, frozen=True):
    """Of all models together.

    kv_cache_usage: of the fullest.
    as_of_s: how long ago the engine said this, which it does between steps; 0 while it has no request.
    """

    server_load: int
    live_tokens: int
    running: int
    waiting: int
    swapped: int
    kv_cache_usage: float
    free_blocks: int
    engine_restarts: int
    as_of_s: float


@router.get("/load", answer=LoadResponse)
async def load(http: Request) -> Response:
    """Admitted requests and tokens, and the lengths of the scheduler's queues."""
    state = state_of(http)
    admission, stats = await state.admission.read_counts(), [one.starter.metrics.stats() for one in state.models.all]
    return json_response(
        LoadResponse(
            server_load=admission.num_requests + admission.num_in_line,
            live_tokens=admission.num_tokens,
            running=sum(one.num_running for one in stats),
            waiting=sum(one.num_waiting for one in stats),
            swapped=sum(one.num_swapped for one in stats),
            kv_cache_usage=round(max(one.kv_usage for one in stats), 4),
            free_blocks=sum(one.num_free_blocks for one in stats),
            engine_restarts=sum(one.num_restarts for one in state.models.all),
            as_of_s=round(max(one.age_s for one in stats), 3),
        )
    )


@router.get("/metrics", answer="text/plain", errors={})
async def metrics(http: Request) -> Response:
    """Metrics in Prometheus's text format."""
    state = state_of(http)
    counts, admission = await state.peers.read_counts(), await state.admission.read_counts()
    of_models = [(one.starter.metrics, counts[one.name]) for one in state.models.all]
    return Response(write_metrics(of_models, admission.num_in_line), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", answer=ModelList)
@router.get("/models", answer=ModelList)
async def models(http: Request) -> Response:
    """The names of the models that are served, and of their LoRA adapters.

    In Anthropic's form for callers with the header `anthropic-version`.
    """
    state = state_of(http)
    if is_client(http.scope):
        return json_response(model_list(state))
    return json_response(ModelList(data=[card_of(*one, state.started_at) for one in state.models.by_name]))


@router.get("/v1/models/{name:path}", answer=ModelCard)
async def model(http: Request) -> Response:
    """One of these names; 404 for another."""
    state, name = state_of(http), http.path_params["name"]
    model = state.pick(http, name).model
    return json_response(model_card(state, name) if is_client(http.scope) else card_of(model, name, state.started_at))


class ModelRequest(Body, kw_only=True, frozen=True):
    """POST /models/load, POST /models/unload

    model: One of the names in /v1/models.
    """

    model: str

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(model=self.model)


async def _model_of_operator(http: Request) -> tuple[ServerState, ServedModel]:
    """Return the model that an operator's request names. Raises ApiError (403, 404)."""
    state, body = await read_as_operator(http, ModelRequest)
    return state, state.pick(http, body.model).model


@router.post("/models/load", body=ModelRequest, answer=ModelCard)
async def load_model(http: Request) -> Response:
    """Load a model ahead of its requests; return when it is.

    Needs the admin key, if the server has keys or other machines reach it.
    """
    state, model = await _model_of_operator(http)
    await cancel_on_disconnect(http, state.models.load(model))
    return json_response(card_of(model, model.name, state.started_at))


@router.post("/models/unload", body=ModelRequest, answer=ModelCard)
async def unload_model(http: Request) -> Response:
    """Unload a model once no request uses it, if there are others; its next request loads it again.

    Needs the admin key, if the server has keys or other machines reach it.
    """
    state, model = await _model_of_operator(http)
    state.models.unload_when_idle(model)
    return json_response(card_of(model, model.name, state.started_at))


class AbortRequest(Body, kw_only=True, frozen=True):
    """POST /abort_requests

    request_ids: Without ids: all requests (of the caller, unless it has the admin key), also those that wait in line.
    """

    request_ids: set[str] | None = None


class AbortResponse(Struct, frozen=True):
    aborted: list[str]


@router.post("/abort_requests", answer=AbortResponse, body=AbortRequest)
async def abort_requests(http: Request) -> Response:
    """Abort these requests of the caller; ignore unknown ids. They return their output so far, marked as aborted;
    in Anthropic's API as `pause_turn`, of which a stream ends with an error.

    Without ids: abort all requests. If the server has an admin key, this needs it.
    """
    state = state_of(http)
    body = await state.bodies.read(http, AbortRequest)
    if not body.request_ids:
        state.check_admin(http)
    key = request_state(http).caller.sees_key
    request_ids = body.request_ids or None
    if request_ids is None:  # first: they would be admitted in place of those that end
        error = ApiError(400, "the request was aborted while it waited in line")
        state.admission.end_line(error, key)
        state.models.end_waits(error, key)
    found = await state.peers.ask(ServedModels.abort, request_ids, key)
    return json_response(AbortResponse(list(itertools.chain.from_iterable(found))))


@router.post(
    "/reset_prefix_cache",
    flags=("reset_running_requests",),
    query=("model",),
    errors={**ERRORS, 409: "The state does not allow it now"},
)
async def reset_prefix_cache(http: Request) -> Response:
    """Empty the prefix cache. 409 if blocks are in use, unless running requests may be preempted.

    Of all models, unless `model` names one.
    """
    state = state_of(http)
    state.check_admin(http)
    name, preempts = http.query_params.get("model"), flag(http, "reset_running_requests")
    models = state.models.all if name is None else [state.pick(http, name).model]
    if all([await one.llm.reset_prefix_cache(preempts) for one in models]):
        return Response()
    return error_response(409, "blocks are in use; try again when idle, or with reset_running_requests=true")


_MAX_PATH_CHARS = 4096  # the system's own limit


def _check_path(name: str, path: str) -> None:
    if len(path) > _MAX_PATH_CHARS:
        raise RequestError(f"{name}: is longer than {_MAX_PATH_CHARS} characters", name)


class RestartRequest(Body, kw_only=True, frozen=True):
    """POST /restart_engines

    model: Whose engines; without a name, those of all models.
    model_path: Of weights that have changed, what the setting `model` may be, the same as before or another.
    revision: Of the hub's model that `model_path` names.
    """

    model: str | None = None
    model_path: str | None = None
    revision: str | None = None

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(model=self.model, revision=self.revision)
        _check_path("model_path", self.model_path or "")
        if self.revision is not None and self.model_path is None:
            raise RequestError("revision: is of a model_path; name that, too", "revision")


@router.post("/restart_engines", body=RestartRequest, errors={**ERRORS, 409: "The state does not allow it now"})
async def restart_engines(http: Request) -> Response:
    """Restart the engine processes, of several replicas one after the other; return when all are ready again.

    A replica gets no new requests and finishes those that it has, for at most the drain's timeout; the others continue
    with the rest. No request ends with an error. 409 if that is done already, or there is no engine process.
    With `model_path`, they load these weights, and a request ends with those with which it has begun: the last replica
    that has them finishes its requests, however long that takes. 400 if anything but the weights differs, or an engine
    does not start with them; it gets those of before again then.
    Needs the admin key, if the server has keys or other machines reach it.
    """
    state, body = await read_as_operator(http, RestartRequest)
    models = state.models.all if body.model is None else [state.pick(http, body.model).model]
    engines = [one.engine for one in models if one.engine is not None and one.is_loaded]
    if not engines:
        return error_response(409, "there is no engine process to restart")
    source = None if body.model_path is None else WeightsSource(body.model_path, body.revision)
    if source is not None and len(models) > 1:
        raise ApiError(400, "model: this server has several; name the one that model_path is for", "model")
    try:
        if source is not None:
            for model in models:
                await model.check_weights(source)
        for engine in engines:
            await engine.restart(source)
    except ConfigError as error:
        raise ApiError(400, f"model_path: {error}", "model_path") from None
    except RequestError as error:
        return error_response(409, str(error))
    return Response()


B = TypeVar("B", bound=Body)


class LoadAdapterRequest(Body, kw_only=True, frozen=True):
    """POST /v1/load_lora_adapter

    lora_name: What requests call it.
    lora_path: Its folder, below the server's --lora-dir.
    load_inplace: The name may be in use; its adapter is replaced.
    base_model_name: The model that /v1/models shows as its parent.
    """

    lora_name: str
    lora_path: str
    load_inplace: Flag = False
    base_model_name: str | None = None

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(lora_name=self.lora_name, base_model_name=self.base_model_name)
        _check_path("lora_path", self.lora_path)
        LoRARequest(self.lora_name, 1, self.lora_path)  # raises for what cannot be a name or a path


@router.post("/v1/load_lora_adapter", body=LoadAdapterRequest, answer="text/plain")
async def load_lora_adapter(http: Request) -> Response:
    """Load a LoRA adapter from below `--lora-dir`; requests choose it by its name as `model`.

    It is one of the model that `base_model_name` names, else of the first.
    If the server has an admin key, this needs it.
    """
    state, body = await _read_as_admin(http, LoadAdapterRequest)
    parents = [one for one in state.models.all if body.base_model_name in one.names]
    adapters = (parents or [state.model])[0].adapters
    change = adapters.change_to(body.lora_name, body.lora_path, body.base_model_name, body.load_inplace)
    await state.peers.change_adapter(change)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


class UnloadAdapterRequest(Body, kw_only=True, frozen=True):
    """POST /v1/unload_lora_adapter

    lora_name: What requests call it.
    lora_int_id: Has no effect.
    """

    lora_name: str
    # accepted because the name identifies the adapter
    lora_int_id: int | None = None

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(lora_name=self.lora_name)


@router.post("/v1/unload_lora_adapter", body=UnloadAdapterRequest, answer="text/plain")
async def unload_lora_adapter(http: Request) -> Response:
    """Remove a LoRA adapter. Requests that use it finish; new ones get 404.

    If the server has an admin key, this needs it.
    """
    state, body = await _read_as_admin(http, UnloadAdapterRequest)
    await state.peers.change_adapter(AdapterChange(body.lora_name))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _read_as_admin(http: Request, kind: type[B]) -> tuple[ServerState, B]:
    """Return the body of a request to change the adapters. Raises ApiError (403) without the key."""
    state = state_of(http)
    state.check_admin(http)
    return state, await state.bodies.read(http, kind)
