"""Fetch an image from a URL that a caller names, without letting the caller reach what the server alone can reach.

The URL's host must be one that the operator allows. The address that it resolves to must be public, and it is checked
on the connection itself, so that a name that resolves differently a moment later changes nothing. Every redirect is
checked like the first URL. Proxies of the environment are not used.
"""

import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from pagoda.base.abbreviate import shorten
from pagoda.base.errors import RequestError

MAX_SECONDS = 10.0
"""For one image, with its redirects."""
_MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = (("Accept", "image/png, image/jpeg, image/webp, image/gif"), ("User-Agent", "pagoda"))
_EMBEDS_IPV4 = tuple(ipaddress.ip_network(net) for net in ("64:ff9b::/96", "2002::/16", "2001::/32"))


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the public internet."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        elif any(parsed in net for net in _EMBEDS_IPV4):  # a gateway would turn it into an IPv4 address
            return False
    return parsed.is_global and not parsed.is_multicast


class _Refused(Exception):
    """The address that a host resolves to is not public."""


class _Deadline:
    """When a fetch must be done.   max_seconds: from now."""

    def __init__(self, max_seconds: float) -> None:
        self._end = time.monotonic() + max_seconds

    def left_s(self) -> float:
        """Return the seconds until then. Raises TimeoutError once there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _BoundedStream(httpcore.NetworkStream):
    """A connection of which each operation gets the time that is left, whatever `timeout` says."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: _Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.left_s())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.left_s())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        stream = self._stream.start_tls(ssl_context, server_hostname, self._deadline.left_s())
        return _BoundedStream(stream, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _PublicNetwork(httpcore.NetworkBackend):
    """Connects to public addresses only, and until a deadline.   allows: says whether an address is one."""

    def __init__(self, allows: Callable[[str], bool], deadline: _Deadline) -> None:
        self._allows = allows
        self._deadline = deadline
        self._plain = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        addresses = _resolve(host, port, self._deadline.left_s())
        public = next((one for one in addresses if self._allows(one)), None)
        if public is None:
            raise _Refused
        stream = self._plain.connect_tcp(public, port, self._deadline.left_s(), local_address, socket_options)
        peer = stream.get_extra_info("server_addr")
        if not self._allows(str(peer[0])):
            stream.close()
            raise _Refused
        return _BoundedStream(stream, self._deadline)


def _resolve(host: str, port: int, timeout_s: float) -> list[str]:
    """Return the addresses of a host. Raises TimeoutError, and ConnectError for a name without any.

    The system's resolver takes no timeout, so it runs on a thread, which ends when the resolver gives up.
    """
    found: Future[list[str]] = Future()

    def ask() -> None:
        try:
            found.set_result([str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)])
        except (OSError, UnicodeError):
            found.set_exception(httpcore.ConnectError(f"the name {host} cannot be resolved"))

    threading.Thread(target=ask, name="resolve", daemon=True).start()
    return found.result(timeout_s)


@dataclass(frozen=True, slots=True)
class _Answer:
    """data: of an image.   location: of a redirect, "" where there is none."""

    data: bytes
    location: str = ""


def fetch(
    url: str,
    where: str,
    allowed_domains: tuple[str, ...],
    max_bytes: int,
    allows: Callable[[str], bool] = is_public,
    max_seconds: float = MAX_SECONDS,
) -> bytes:
    """Return what is at an http(s) URL, at most `max_bytes`.

    where: what errors call it.   allows: says whether an address may be connected to.
    Raises RequestError for a host that is not allowed, an address that is not public, an answer that is not 200, or is
    too large or too slow.
    """
    network = _PublicNetwork(allows, _Deadline(max_seconds))
    with httpcore.ConnectionPool(network_backend=network, max_connections=1) as pool:
        for _ in range(_MAX_REDIRECTS + 1):
            _check_url(url, where, allowed_domains)
            try:
                answer = _get(pool, url, where, max_bytes)
            except _Refused:
                raise RequestError(f"{where}: the host of the URL has no public address", where) from None
            except (httpcore.TimeoutException, TimeoutError):
                raise RequestError(f"{where}: the image did not arrive within {max_seconds:g} s", where) from None
            except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, OSError) as error:
                raise RequestError(
                    f"{where}: the image cannot be fetched: {shorten(str(error) or type(error).__name__)}", where
                ) from None
            if not answer.location:
                return answer.data
            try:
                url = urljoin(url, answer.location)
            except ValueError:
                text = f"{where}: the URL redirects to {shorten(answer.location, 100)!r}, which is not an http(s) URL"
                raise RequestError(text, where) from None
    raise RequestError(f"{where}: the URL redirects more than {_MAX_REDIRECTS} times", where)


def _check_url(url: str, where: str, allowed_domains: tuple[str, ...]) -> None:
    if not allowed_domains:
        raise RequestError(
            f"{where}: this engine fetches no images: send a data URL, or start it with --allowed-media-domains", where
        )
    try:
        parts = urlsplit(url)
        host, scheme, _ = parts.hostname, parts.scheme.lower(), parts.port
    except ValueError:
        host, scheme = None, ""
    if scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable():
        raise RequestError(f"{where}: {shorten(url, 100)!r} is not an http(s) URL", where)
    if host.lower().rstrip(".") not in (domain.lower() for domain in allowed_domains):
        raise RequestError(f"{where}: images of {shorten(host, 100)} are not allowed (--allowed-media-domains)", where)


def _get(pool: httpcore.ConnectionPool, url: str, where: str, max_bytes: int) -> _Answer:
    with pool.stream("GET", url, headers=_HEADERS) as response:
        headers = {name.lower(): value.decode("latin-1") for name, value in response.headers}
        if response.status in _REDIRECTS and headers.get(b"location"):
            return _Answer(b"", headers[b"location"])
        if response.status != 200:
            raise RequestError(f"{where}: the image's server answered with status {response.status}", where)
        data = bytearray()
        for chunk in response.iter_stream():
            data += chunk
            if len(data) > max_bytes:
                raise RequestError(f"{where}: the image is larger than {max_bytes} bytes (image_bytes)", where)
        return _Answer(bytes(data))
