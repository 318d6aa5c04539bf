"""The files of the server's pages, as routes: read once, sent with the headers that every page has."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from pagoda.server.pages.rules import HEADERS
from pagoda.server.request_state import request_state

STATIC = Path(__file__).parent / "static"
"""A page is `NAME.html`, at `/NAME`; what it loads is in the folder `NAME`."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def _path_of(file: Path) -> str:
    name = file.relative_to(STATIC).as_posix()
    return f"/{name.removesuffix('.html')}"


_FILES = {_path_of(file): file for file in sorted(STATIC.rglob("*")) if file.suffix in _TYPES}
PAGE_PATHS = frozenset(_FILES)


def _route(path: str, file: Path) -> Route:
    async def send(http: Request) -> Response:
        request_state(http).route = path
        if file.suffix == ".html" and http.scope["raw_path"].endswith(b"/"):
            return RedirectResponse(f"../{file.stem}")  # else the addresses in it, which are relative, would not lead
        return sent(http)

    sent = _sender(file)
    return Route(path, send)


def _sender(file: Path) -> Callable[[Request], Response]:
    """Return what answers with a file, or with 304 to a client that has it."""
    body = file.read_bytes()
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(body).hexdigest()[:16]}"'}

    def answer(http: Request) -> Response:
        if http.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=_TYPES[file.suffix], headers=headers)

    return answer


_chat = _sender(_FILES["/chat"])


async def _root(http: Request) -> Response:
    """Send a browser the page to chat on; programs get the error of an unknown path, which names the other routes."""
    request_state(http).route = "/"
    if http.method == "HEAD":  # Anthropic's clients ask so whether there is a server
        return Response()
    if "text/html" not in http.headers.get("accept", ""):
        if http.app.state.server.config.ollama:
            return PlainTextResponse("Ollama is running")  # what Ollama's clients look for
        raise HTTPException(404)
    if not http.scope["raw_path"].endswith(b"/"):  # behind a prefix, for the relative addresses
        return RedirectResponse(f"{http.scope['raw_path'].decode().rpartition('/')[2]}/")
    page = _chat(http)
    page.headers["Vary"] = "Accept"
    return page


PAGE_ROUTES = [Route("/", _root), *(_route(path, file) for path, file in _FILES.items())]
