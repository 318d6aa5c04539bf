"""PageRules: which pages in a browser may send requests to this server. What every page of it has to follow.

A browser lets any page send requests to any address, that of this machine included, and a page whose name was made to
lead here (DNS rebinding) may read the answers, too. So:
- a request from a page of another origin is refused, unless `cors_origins` has it;
- a server of this machine that needs no key answers only to names that lead to no other machine.
Requests of programs have no `Origin`, and pass.

Of its own pages: their files hold no data and open without a key; they load nothing from elsewhere (`HEADERS`); a key
is never in an address, and is kept for the browser's tab only.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from pagoda.base.abbreviate import abbreviate
from pagoda.base.server_config import ServerConfig, is_address
from pagoda.server.errors import error_response

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and not sent again where it is the same
}
"""Of every file of a page: it loads and runs only what this server sends as a file, and no page may frame it."""

_PRIVATE = ("localhost", "local", "internal")
"""Domains whose names nobody can register."""


class PageRules:
    """A layer that refuses requests of foreign pages with 403, before the layers that look for a key."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._origins = frozenset(config.cors_origins)
        self._checks_names = config.uds is None and config.is_local and not config.api_keys
        self._names = frozenset(filter(None, (_name_of(origin) for origin in config.cors_origins)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (why := self._refusal(scope["headers"])) is not None:
            await error_response(403, why)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Return why a request may not pass, or None."""
        given = {name: value.decode("latin-1") for name, value in headers if name in (b"host", b"origin")}
        host, origin = given.get(b"host", ""), given.get(b"origin")
        if self._checks_names and not self._is_known(host):
            return (
                f"the name {abbreviate(host)} may lead elsewhere than to this machine; use http://127.0.0.1, allow it "
                "with --cors-origins https://NAME, or set --api-key"
            )
        if origin is None or {"*", origin} & self._origins or (host and origin.partition("://")[2] == host):
            return None
        return f"pages of {abbreviate(origin)} may not use this server: allow it with --cors-origins"

    def _is_known(self, host: str) -> bool:
        """Return whether a `Host` is an address, a name that nobody can register, or one of `cors_origins`."""
        name = _name_of(f"//{host}")
        if not name or "." not in name or name in self._names or name.rpartition(".")[2] in _PRIVATE:
            return True
        return is_address(name)


def _name_of(url: str) -> str:
    """Return the name or address of the machine in a URL, in lower case; "" if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # brackets without an address
        return ""
