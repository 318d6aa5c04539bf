"""Router: the routes with what they read and answer, and the OpenAPI page made of that."""

import html
import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagoda.base.errors import RequestError
from pagoda.base.text import as_integer
from pagoda.server.body import ITEMS, Body
from pagoda.server.errors import ErrorForm, ErrorResponse, error_body
from pagoda.server.pages.files import PAGE_PATHS
from pagoda.server.request_state import request_state

_EVENTS = "text/event-stream"
Handler = Callable[[Request], Awaitable[Response]]
HEALTH_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping"})
OPEN_PATHS = HEALTH_PATHS | {"/", "/docs", "/openapi.json"} | PAGE_PATHS
"""Paths that need no key: a browser that opens a page cannot send one. They hold no data of requests."""

ERRORS: Mapping[int, str] = {
    400: "The request is not valid; `param` names the field",
    401: "The API key is missing or wrong",
    403: "The admin key is needed",
    404: "No such model",
    413: "The body is too large",
    429: "The server, or this key's share of it, is full; Retry-After says when to come again",
    500: "The engine failed on this request",
    503: "The engine is gone or the server is shutting down",
}
"""What most routes may answer instead."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route; its handler's docstring says what it does.

    body: of its request.   answer: a struct, a media type, or None if it is empty.   more: other answers.
    chunk: an event of its stream.   stream_type: the media type of that.
    is_form: the body is a form with a file.
    flags: parameters of its URL that are true or false.   query: others.
    errors: what it may answer instead, by status.
    error_form: makes the body of these, an `error`.
    """

    method: str
    path: str
    handler: Handler
    body: type[Body] | None = None
    answer: type[Struct] | str | None = None
    more: tuple[type[Struct], ...] = ()
    chunk: type[Struct] | None = None
    stream_type: str = _EVENTS
    is_form: bool = False
    flags: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    errors: Mapping[int, str] = field(default_factory=lambda: ERRORS)
    error: type[Struct] = ErrorResponse
    error_form: ErrorForm = error_body

    def route(self) -> Route:
        """Return the route, which notes itself for the metrics."""

        async def handle(http: Request) -> Response:
            request_state(http).route = self.path
            return await self.handler(http)

        return Route(self.path, handle, methods=[self.method])


def flag(http: Request, name: str) -> bool:
    """Return a parameter of the URL that is true or false. Raises RequestError for another value."""
    given = http.query_params.get(name, "false").lower()
    if given not in ("true", "1", "false", "0"):
        raise RequestError(f"{name}: expected true or false, got {given!r:.80}", name)
    return given in ("true", "1")


def integer(http: Request, name: str, default: int, least: int, most: int) -> int:
    """Return a parameter of the URL that is an integer. Raises RequestError for another value."""
    given = http.query_params.get(name)
    number = default if given is None else as_integer(given)
    if number is None or (given is not None and not least <= number <= most):
        raise RequestError(f"{name}: expected an integer from {least} to {most}, got {given!r:.80}", name)
    return number


class Router:
    """The routes of one module, in the order of their declaration.   shared: fields of Endpoint, of all of them."""

    def __init__(self, **shared: Any) -> None:
        self._shared = shared
        self.endpoints: list[Endpoint] = []

    def get(self, path: str, **described: Any) -> Callable[[Handler], Handler]:
        """Declare a route.   described: fields of Endpoint."""
        return self._declare("GET", path, described)

    def post(self, path: str, **described: Any) -> Callable[[Handler], Handler]:
        return self._declare("POST", path, described)

    def delete(self, path: str, **described: Any) -> Callable[[Handler], Handler]:
        return self._declare("DELETE", path, described)

    def _declare(self, method: str, path: str, described: dict[str, Any]) -> Callable[[Handler], Handler]:
        def declare(handler: Handler) -> Handler:
            self.endpoints.append(Endpoint(method, path, handler, **self._shared | described))
            return handler

        return declare


def describe_api(endpoints: Sequence[Endpoint], has_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI description of the routes.   has_keys: most of them need a key."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = _describe(endpoint, path)
    components: dict[str, Any] = {"schemas": json_schemas(endpoints)}
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "pagoda",
            "description": "OpenAI-compatible API of the pagoda engine",
            "version": version("pagoda-llm"),
        },
        "paths": paths,
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"api_key": []}]
        for path in OPEN_PATHS & paths.keys():
            for operation in paths[path].values():
                operation["security"] = []
    return described


def json_schemas(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI schema components of the request bodies and answers of all routes, by name."""
    bodies = list(dict.fromkeys(one.body for one in endpoints if one.body is not None))
    answers = [
        kind for one in endpoints for kind in (one.answer, *one.more, one.chunk, one.error) if isinstance(kind, type)
    ]
    parts = parts_of(bodies)
    kinds = [*bodies, *parts, *dict.fromkeys(answers)]
    schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")[1]
    for kind in (*bodies, *parts):
        schema = schemas[kind.__name__]
        schema["description"] = schema["description"].partition("\n")[0]
        names = {one.name: one.encode_name for one in msgspec.structs.fields(kind)}
        for name, text in _meanings(kind).items():
            schema["properties"][names[name]].setdefault("description", text)
        if issubclass(kind, Body):
            unserved = {"description": "Not served: only a neutral value", "enum": [None], "default": None}
            schema["properties"] |= dict.fromkeys(kind.unserved, unserved)
    return schemas


def parts_of(bodies: Iterable[type[Struct]]) -> list[type[Struct]]:
    """Return the structs in the fields of bodies, and in their fields, each once."""
    found: dict[type[Struct], None] = {}

    def look(hint: Any) -> None:
        named = [meta.extra[ITEMS] for meta in getattr(hint, "__metadata__", ()) if ITEMS in (meta.extra or {})]
        for kind in (hint, *named):
            if inspect.isclass(kind) and issubclass(kind, Struct) and kind not in found:
                found[kind] = None
                look_into(kind)
        for inner in typing.get_args(hint):
            look(inner)

    def look_into(kind: type[Struct]) -> None:
        for hint in typing.get_type_hints(kind, include_extras=True).values():
            look(hint)

    for body in bodies:
        look_into(body)
    return list(found)


_MEANING = re.compile(r"^(\w+(?:, \w+)*): (.+)", re.MULTILINE)


_COMMON = {
    "add_generation_prompt": "End the prompt with the opening of the assistant's turn.",
    "cache_salt": "Share cached prefixes only with requests that have the same salt.",
    "chat_template": "Goes before the model's own template.",
    "chat_template_kwargs": "Further variables of the template.",
    "frequency_penalty": "In [-2, 2]: makes tokens less likely by how often the output has them.",
    "metadata": "Comes back in the answer.",
    "min_p": "Sample from tokens with at least this share of the most likely one's probability.",
    "presence_penalty": "In [-2, 2]: makes tokens that the output has less likely.",
    "priority": "Smaller is sooner, where requests are scheduled by priority.",
    "repeat_penalty": "Above 1, makes tokens that the prompt or the output has less likely.",
    "request_id": "The id of the answer, without its prefix.",
    "stop": "Texts that end the output; they are cut off.",
    "temperature": "How random the output is: 0 takes the most likely token.",
    "tool_choice": "Whether it calls a tool, and which.",
    "tools": "What the model may call.",
    "top_k": "Sample from so many most likely tokens.",
    "top_p": "Sample from the most likely tokens that have this probability together.",
    "use_activation": "False: the outputs of the classification head as they are.",
    "user": "Has no effect.",
}
"""What fields of these names mean, where the body says nothing else."""


def _meanings(kind: type[Struct]) -> dict[str, str]:
    """Return what the docstrings of a body and its bases say of its fields, a line each, or else _COMMON."""
    texts = [inspect.cleandoc(base.__dict__.get("__doc__") or "") for base in reversed(kind.__mro__)]
    found = [(names, text) for doc in texts for names, text in _MEANING.findall(doc)]
    meanings = _COMMON | {name: text for names, text in found for name in names.split(", ")}
    return {name: text for name, text in meanings.items() if name in kind.__struct_fields__}


def _describe(endpoint: Endpoint, path: str) -> dict[str, Any]:
    name = endpoint.handler.__name__
    parameters = [
        {"name": one, "in": "path", "required": True, "schema": {"type": "string"}}
        for one in re.findall(r"{(\w+)}", path)
    ]
    parameters += [
        {"name": one, "in": "query", "required": False, "schema": {"type": "boolean", "default": False}}
        for one in endpoint.flags
    ]
    parameters += [
        {"name": one, "in": "query", "required": False, "schema": {"type": "string"}} for one in endpoint.query
    ]
    failures = {
        str(code): {"content": _json(endpoint.error), "description": text} for code, text in endpoint.errors.items()
    }
    described: dict[str, Any] = {
        "summary": name.replace("_", " ").capitalize(),
        "description": inspect.getdoc(endpoint.handler),
        "operationId": re.sub(r"\W+", "_", f"{name}_{path}_{endpoint.method.lower()}"),
        "responses": {"200": _answer(endpoint), **failures},
    }
    if parameters:
        described["parameters"] = parameters
    if endpoint.body is not None:
        content = _json(endpoint.body)
        if endpoint.is_form:
            content = {"multipart/form-data": content["application/json"]}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _answer(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.answer is None:
        return {"description": "Done"}
    if isinstance(endpoint.answer, str):
        schema = {} if endpoint.answer == "application/json" else {"type": "string"}
        return {"description": "The answer", "content": {endpoint.answer: {"schema": schema}}}
    content = _json(endpoint.answer)
    if endpoint.chunk is None:
        return {"description": "The answer", "content": content}
    content[endpoint.stream_type] = {"schema": {"type": "string", "description": _stream(endpoint, endpoint.chunk)}}
    return {"description": "The answer, whole or streamed", "content": content}


def _stream(endpoint: Endpoint, chunk: type[Struct]) -> str:
    """Return what a stream consists of."""
    if endpoint.stream_type != _EVENTS:
        return (
            f"Unless `stream` is false: lines, each a {chunk.__name__} as JSON. "
            f"An error during the stream is a line with {endpoint.error.__name__}."
        )
    is_openai = endpoint.error is ErrorResponse
    return (
        f"With `stream`: server-sent events, each `data: ` and a {chunk.__name__} as JSON; "
        f"{'the last is `data: [DONE]`' if is_openai else 'the name of each is its type'}. "
        f"An error during the stream is an event with {'an ' if is_openai else 'a '}{endpoint.error.__name__}."
    )


def _json(kind: type[Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


_PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>pagoda</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}}
summary{{cursor:pointer;padding:.3rem 0}}table{{border-collapse:collapse;margin:.5rem 0 1rem}}
td{{border-top:1px solid #ccc;padding:.2rem .8rem .2rem 0;vertical-align:top}}code{{font-size:.9em}}</style>
<h1>pagoda {version}</h1><p>{description}. Machines read <a href="openapi.json">openapi.json</a>.{keys}</p>
{routes}"""


def docs_page(api: Mapping[str, Any]) -> str:
    """Return the description of the routes as a page that needs no script and no other file."""
    routes = [
        f"<details><summary><code><b>{method.upper()}</b> {path}</code></summary>"
        f"<p>{html.escape(operation['description'])}</p>{_fields(api, operation)}</details>"
        for path, operations in api["paths"].items()
        for method, operation in operations.items()
    ]
    keys = " Send the API key as <code>Authorization: Bearer KEY</code>." if "security" in api else ""
    return _PAGE.format(**api["info"], keys=keys, routes="\n".join(routes))


def _fields(api: Mapping[str, Any], operation: Mapping[str, Any]) -> str:
    """Return a table of the fields of a route's request body."""
    content = operation.get("requestBody", {}).get("content", {})
    if not content:
        return ""
    name = next(iter(content.values()))["schema"]["$ref"].rpartition("/")[2]
    schema = api["components"]["schemas"][name]
    served = {name: one for name, one in schema["properties"].items() if one.get("enum") != [None]}
    rows = [
        f"<tr><td><code>{field}</code>{' (required)' if field in schema.get('required', ()) else ''}</td>"
        f"<td>{html.escape(_type_name(described))}</td><td>{html.escape(described.get('description', ''))}</td></tr>"
        for field, described in served.items()
    ]
    others = ", ".join(f"<code>{name}</code>" for name in schema["properties"] if name not in served)
    return f"<table>{''.join(rows)}</table>" + (f"<p>Not served: {others}</p>" if others else "")


def _type_name(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type_name, schema["anyOf"])))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    if schema.get("type") == "array" and "items" in schema:
        return f"list of {_type_name(schema['items'])}"
    return str(schema.get("type", "any"))
