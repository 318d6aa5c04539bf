"""URLs that callers name: only of allowed hosts, only at public addresses, bounded in size and time."""

import contextlib
import http.server
import socket
import threading

import pytest

from pagoda.base.errors import RequestError
from pagoda.engine.images.fetch import fetch, is_public

LIMIT = 100_000


@contextlib.contextmanager
def server(answer):
    """Serve on 127.0.0.1; answer: called with the handler for each request. Yields the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):
                answer(self)

        def log_message(self, *args):
            pass

    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.daemon_threads = True
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield found.server_address[1]
    finally:
        found.shutdown()
        found.server_close()
        thread.join()


def send(data, status=200, **headers):
    def answer(handler):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def get(url, domains=("localhost",), allows=lambda address: True, **options):
    return fetch(url, "image", domains, LIMIT, allows, **options)


def refused(url, **options):
    with pytest.raises(RequestError) as error:
        get(url, **options)
    assert error.value.param == "image"
    return str(error.value)


def test_an_allowed_url_is_fetched():
    with server(send(b"pixels")) as port:
        assert get(f"http://localhost:{port}/a.png?x=1") == b"pixels"
        assert get(f"HTTP://LocalHost:{port}/") == b"pixels"


def test_hosts_that_are_not_allowed_are_refused():
    assert "--allowed-media-domains" in refused("http://localhost/", domains=())
    for host in ("example.com", "localhost.example.com", "localhost@example.com", "127.0.0.1"):
        assert "are not allowed" in refused(f"http://{host}/")
    for url in ("http://", "ftp://localhost/", "http://localhost:x/", "http://localhost/\n", "http://[localhost/"):
        assert "is not an http(s) URL" in refused(url)


def test_an_allowed_host_at_a_private_address_is_refused():
    with server(send(b"secret")) as port:
        assert "has no public address" in refused(f"http://localhost:{port}/", allows=is_public)
        assert "127.0.0.1" not in refused(f"http://localhost:{port}/", allows=is_public)


def test_the_address_is_checked_on_the_connection():
    """A name that resolves to a public address, and then connects to another one."""
    asked = []

    def allows(address):
        asked.append(address)
        return len(asked) == 1

    with server(send(b"secret")) as port:
        assert "has no public address" in refused(f"http://localhost:{port}/", allows=allows)
    assert len(asked) == 2


def test_redirects_are_checked_like_the_first_url():
    with server(send(b"pixels")) as port:
        hops = iter([f"http://localhost:{port}/", "/again", "http://169.254.169.254/latest/", "http://x/"])

        def redirect(handler):
            send(b"", 302, Location=next(hops))(handler)

        with server(redirect) as first:
            assert get(f"http://localhost:{first}/") == b"pixels"
            message = refused(f"http://localhost:{first}/")
            assert "images of 169.254.169.254 are not allowed" in message
    with server(send(b"", 301, Location="/")) as port:
        assert "redirects more than 3 times" in refused(f"http://localhost:{port}/")
    with server(send(b"", 302, Location="http://[")) as port:
        assert "redirects to 'http://[', which is not an http(s) URL" in refused(f"http://localhost:{port}/")


def test_answers_are_bounded_in_size_and_time():
    with server(send(b"x" * (LIMIT + 1))) as port:
        assert "larger than 100000 bytes" in refused(f"http://localhost:{port}/")
    with server(send(b"", 404)) as port:
        assert "status 404" in refused(f"http://localhost:{port}/")
    held = threading.Event()  # until it is set, no answer is complete, so that one without a bound is waited for
    with server(lambda handler: held.wait(300)) as port:
        assert "did not arrive within 0.3 s" in refused(f"http://localhost:{port}/", max_seconds=0.3)
        held.set()

    def drip(handler):
        handler.send_response(200)
        handler.end_headers()
        while not held.wait(0.02):
            handler.wfile.write(b"x")

    def drip_headers(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        while not held.wait(0.02):
            handler.wfile.write(b"x")

    for answer in (drip, drip_headers):
        held.clear()
        with server(answer) as port:
            assert "did not arrive within 0.3 s" in refused(f"http://localhost:{port}/", max_seconds=0.3)
            held.set()


def test_the_time_to_resolve_a_name_is_bounded(monkeypatch):
    held = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: held.wait(300) and [])
    assert "did not arrive within 0.3 s" in refused("http://localhost/", max_seconds=0.3)
    held.set()


def test_a_host_that_cannot_be_reached_is_named_as_the_caller_wrote_it():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    assert "cannot be fetched" in refused(f"http://localhost:{port}/")
    assert "cannot be resolved" in refused("http://no-such-host.invalid/", domains=("no-such-host.invalid",))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700:4700::1111", True),
        *((each, False) for each in ("127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254")),
        *(
            (each, False)
            for each in ("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0")
        ),
        *((each, False) for each in ("fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "ff02::1")),
    ],
)
def test_which_addresses_are_public(address, expected):
    assert is_public(address) is expected
