"""Routes that generate nothing: health, load, metrics, models, aborts, the prefix cache; tokens; LoRA adapters."""

import itertools
from importlib.metadata import version
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from pagoda.base.errors import RequestError
from pagoda.server.answers import (
    AbortResponse,
    DetokenizeResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    TokenizerInfo,
    VersionResponse,
)
from pagoda.server.body import Body
from pagoda.server.dialects.messages import model_card, model_list
from pagoda.server.errors import ApiError, error_response
from pagoda.server.middleware import RETRY_AFTER_S
from pagoda.server.protocol import (
    AbortRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from pagoda.server.render import render_chat
from pagoda.server.routing import ERRORS, Router
from pagoda.server.sending import cancel_on_disconnect, json_response, run_sized
from pagoda.server.served_adapters import AdapterChange
from pagoda.server.state import ServerState, state_of

router = Router()


@router.get("/livez", errors={503: ERRORS[503]})
async def liveness(http: Request) -> Response:
    """200 while the server does its work or can come back to it by itself; 503 if only a restart would help."""
    state = state_of(http)
    if state.starter.llm.died is not None:  # the engine is gone, or its outputs cannot be read any more
        return error_response(503, f"no request can be served any more: {state.starter.llm.died}")
    if state.engine is not None and state.engine.died is not None:
        return error_response(503, f"the engine cannot be restarted: {state.engine.died}")
    return Response()


@router.get("/readyz", errors={503: ERRORS[503]})
@router.get("/health", errors={503: ERRORS[503]})
@router.get("/ping", errors={503: ERRORS[503]})
async def readiness(http: Request) -> Response:
    """200 while requests can make progress; 503 while the engine is down, starting or stuck, or the server drains."""
    state = state_of(http)
    if (dead := await liveness(http)).status_code != 200:
        return dead
    if state.engine is not None and not state.engine.is_up:
        return error_response(503, "the engine process is starting", retry_after_s=2)
    if state.engine is not None and state.engine.is_stuck:
        return error_response(503, "the engine has made no progress for too long", retry_after_s=5)
    if state.drain.is_draining:
        return error_response(503, "the server is shutting down", retry_after_s=RETRY_AFTER_S)
    return Response()


@router.get("/version", answer=VersionResponse)
async def show_version(http: Request) -> Response:
    """The server's version."""
    return json_response(VersionResponse(version("pagoda-llm")))


@router.get("/load", answer=LoadResponse)
async def load(http: Request) -> Response:
    """Admitted requests and tokens, and the lengths of the scheduler's queues."""
    state = state_of(http)
    admission, stats = await state.starter.admission.read_counts(), state.starter.metrics.stats()
    return json_response(
        LoadResponse(
            server_load=admission.num_requests + admission.num_in_line,
            live_tokens=admission.num_tokens,
            running=stats.num_running,
            waiting=stats.num_waiting,
            swapped=stats.num_swapped,
            kv_cache_usage=round(stats.kv_usage, 4),
            free_blocks=stats.num_free_blocks,
            engine_restarts=state.engine.num_deaths if state.engine is not None else 0,
        )
    )


@router.get("/metrics", answer="text/plain", errors={})
async def metrics(http: Request) -> Response:
    """Metrics in Prometheus's text format."""
    state = state_of(http)
    counts, admission = await state.peers.read_counts(), await state.starter.admission.read_counts()
    return Response(state.starter.metrics.write(counts, admission.num_in_line), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", answer=ModelList)
async def models(http: Request) -> Response:
    """The names under which the model is served, and its LoRA adapters.

    In Anthropic's form for callers with the header `anthropic-version`.
    """
    state = state_of(http)
    if "anthropic-version" in http.headers:
        return json_response(model_list(state))
    return json_response(ModelList(data=[_card(state, name) for name in state.model.all_names]))


@router.get("/v1/models/{name:path}", answer=ModelCard)
async def model(http: Request) -> Response:
    """One of these names; 404 for another."""
    state, name = state_of(http), http.path_params["name"]
    state.pick(http, name)
    return json_response(model_card(state, name) if "anthropic-version" in http.headers else _card(state, name))


def _card(state: ServerState, name: str) -> ModelCard:
    adapter = state.model.adapters.by_name.get(name)
    return ModelCard(
        id=name,
        created=state.started_at,
        owned_by="pagoda",
        root=state.model.names[0] if adapter is None else adapter.lora.path,
        parent=None if adapter is None else adapter.parent,
        max_model_len=state.model.max_model_len,
    )


@router.post("/abort_requests", answer=AbortResponse, body=AbortRequest)
async def abort_requests(http: Request) -> Response:
    """Abort these requests of the caller; ignore unknown ids. They return their output so far, marked as aborted.

    Without ids: abort all requests. If the server has an admin key, this needs it.
    """
    state = state_of(http)
    body = await state.bodies.read(http, AbortRequest)
    if not body.request_ids:
        state.check_admin(http)
    caller = http.scope["state"]
    key = None if caller["is_admin"] else caller["key"]
    request_ids = body.request_ids or None
    if request_ids is None:  # first: they would be admitted in place of those that end
        state.starter.admission.end_line(ApiError(400, "the request was aborted while it waited in line"), key)
    found = await state.peers.ask("abort", request_ids, key, returns=list[str])
    return json_response(AbortResponse(list(itertools.chain.from_iterable(found))))


@router.post(
    "/reset_prefix_cache",
    flags=("reset_running_requests",),
    errors={**ERRORS, 409: "The state does not allow it now"},
)
async def reset_prefix_cache(http: Request) -> Response:
    """Empty the prefix cache. 409 if blocks are in use, unless running requests may be preempted."""
    state = state_of(http)
    state.check_admin(http)
    if await state.starter.llm.reset_prefix_cache(_flag(http, "reset_running_requests")):
        return Response()
    return error_response(409, "blocks are in use; try again when idle, or with reset_running_requests=true")


def _flag(http: Request, name: str) -> bool:
    """Return a parameter of the URL that is true or false. Raises RequestError for another value."""
    given = http.query_params.get(name, "false").lower()
    if given not in ("true", "1", "false", "0"):
        raise RequestError(f"{name}: expected true or false, got {given!r:.80}", name)
    return given in ("true", "1")


@router.post("/tokenize", answer=TokenizeResponse, body=TokenizeRequest)
async def tokenize(http: Request) -> Response:
    """Return the token ids of a text, or of a conversation rendered with the chat template."""
    state = state_of(http)
    body = await state.bodies.read(http, TokenizeRequest)
    state.pick(http, body.model)
    text = state.starter.llm.text
    async with state.starter.admitted(http, 1):
        if (conversation := body.conversation) is not None:
            token_ids = (await render_chat(http, state.model, conversation)).token_ids
        else:
            token_ids = await cancel_on_disconnect(
                http, text.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
            )
        answer = TokenizeResponse(len(token_ids), state.model.max_model_len, token_ids)
        if body.return_token_strs:
            answer.token_strs = await cancel_on_disconnect(http, text.token_strings(token_ids))
    return await run_sized(len(token_ids), lambda: json_response(answer))


@router.post("/detokenize", answer=DetokenizeResponse, body=DetokenizeRequest)
async def detokenize(http: Request) -> Response:
    """Return the text of token ids."""
    state = state_of(http)
    body = await state.bodies.read(http, DetokenizeRequest)
    state.pick(http, body.model)
    async with state.starter.admitted(http, 1):
        decoding = state.starter.llm.text.detokenize(body.tokens)
        answer = DetokenizeResponse(await cancel_on_disconnect(http, decoding))
    return await run_sized(len(body.tokens), lambda: json_response(answer))


@router.get("/tokenizer_info", answer=TokenizerInfo)
async def tokenizer_info(http: Request) -> Response:
    """Return the tokenizer's settings, named as in tokenizer_config.json, including the chat template."""
    state = state_of(http)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": state.model.max_model_len,
        **state.starter.llm.text.tokenizer_facts(),
        "chat_template": state.model.chat_template.source if state.model.chat_template is not None else None,
    }
    return JSONResponse(settings)


B = TypeVar("B", bound=Body)


@router.post("/v1/load_lora_adapter", body=LoadAdapterRequest, answer="text/plain")
async def load_lora_adapter(http: Request) -> Response:
    """Load a LoRA adapter from below `--lora-dir`; requests choose it by its name as `model`.

    If the server has an admin key, this needs it.
    """
    state, body = await _read_as_admin(http, LoadAdapterRequest)
    adapters = state.model.adapters
    await _change(state, adapters.change_to(body.lora_name, body.lora_path, body.base_model_name, body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", body=UnloadAdapterRequest, answer="text/plain")
async def unload_lora_adapter(http: Request) -> Response:
    """Remove a LoRA adapter. Requests that use it finish; new ones get 404.

    If the server has an admin key, this needs it.
    """
    state, body = await _read_as_admin(http, UnloadAdapterRequest)
    await _change(state, AdapterChange(body.lora_name))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _read_as_admin(http: Request, kind: type[B]) -> tuple[ServerState, B]:
    """Return the body of a request to change the adapters. Raises ApiError (403) without the key."""
    state = state_of(http)
    state.check_admin(http)
    return state, await state.bodies.read(http, kind)


async def _change(state: ServerState, change: AdapterChange) -> None:
    """Change the adapters of all processes. Raises ApiError."""
    if (error := await state.peers.change_adapter(change)) is not None:
        raise ApiError(*error)
