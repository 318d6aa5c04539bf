"""Hostile ways to talk HTTP: headers, methods, paths, half requests, slow ones, leavers, pipelines, bad chunks."""

import random
from typing import Any

from tests.hostile.bodies import CHAT, TEXT
from tests.hostile.case import Case, Expect, Leave, request
from tests.hostile.json_text import write
from tests.hostile.routes import PLANNED, READ_ONLY, ROUTES

GOOD = write(TEXT.body)
LONG = write({**TEXT.body, "max_tokens": 500, "ignore_eos": True})
PATH = TEXT.path

_CONTENT_TYPES = (
    *(None, b"", b"text/plain", b"application/xml", b"application/x-www-form-urlencoded", b"\xff\xfe", b"a" * 5_000),
    *(b"multipart/form-data", b"multipart/form-data; boundary=a", b"application/json; charset=utf-16"),
    *(
        b"application/json; charset=\xf0\x9f",
        b"application/json;" * 1_000,
        b"APPLICATION/JSON",
        b"application/vnd+json",
    ),
)
_HEADERS = (
    *(b"X-Request-Id: " + one for one in (b"", b"a" * 129, b"a" * 60_000, b"\xed\xa0\x80", b"\x00", b"a b", b"a\x7f")),
    *(b"X-Request-Id: " + one for one in (b"../../a", b"%0d%0aX: 1", b"{}", b"\xff" * 50, b"1\r\nX-Request-Id: 2")),
    *(b"Authorization: " + one for one in (b"", b"Basic YTpi", b"Bearer", b"Bearer \xff", b"Bearer " + b"a" * 60_000)),
    *(b"Content-Encoding: " + one for one in (b"gzip", b"br", b"deflate, gzip", b"\xff")),
    *(b"Accept: " + one for one in (b"text/html", b"", b"\xff" * 100)),
    *(b"Expect: " + one for one in (b"100-continue", b"200-ok")),
    *(
        b"Connection: " + one
        for one in (b"close", b"upgrade\r\nUpgrade: websocket", b"upgrade\r\nUpgrade: h2c", b"\xff")
    ),
    *(b"Host: b", b"Content-Length: 5", b"Cookie: " + b"a=b;" * 10_000, b"Origin: \xff", b"Origin: null"),
    *(b"\r\n".join([b"X-%d: a" % i for i in range(count)]) for count in (100, 3_000, 8_000)),
    *(b"X: " + b"a" * 66_000, b"X" * 66_000 + b": a", b": a", b"X : a", b"X", b"X:\x00a", b" folded", b"X: a\n b"),
    *(
        b"Range: bytes=0-1",
        b"If-None-Match: *",
        b"X-Forwarded-For: \xff",
        b"Transfer-Encoding: identity",
        b"TE: trailers",
    ),
)
_METHODS = (
    "GET",
    "HEAD",
    "PUT",
    "DELETE",
    "PATCH",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "POST",
    "PROPFIND",
    "post",
    "P",
    "A" * 9_000,
)
_TARGETS = (
    *("/", "//", "/v1", "/v1/", "/v1/completions/", "//v1/completions", "/v1/../v1/completions", "/V1/COMPLETIONS"),
    *(
        "/v1/models/" + one
        for one in ("", "a", "%00", "%ed%a0%80", "%ff", "../../etc/passwd", "%2e%2e%2f", "a" * 9_000, "🏳")
    ),
    *("/v1/completions?" + one for one in ("a=1", "%", "a" * 9_000, "a=%ed%a0%80", "&" * 5_000)),
    *(
        "/v1/completions#a",
        "*",
        "http://a.example/v1/completions",
        "/%",
        "/%00",
        "/%ff%fe",
        "/docs/../metrics",
        "/favicon.ico",
    ),
    *("/reset_prefix_cache?reset_running_requests=" + one for one in ("a", "", "%ff", "true&reset_running_requests=1")),
    *("/metrics?name[]=" + "a" * 5_000, "/health?" + "a=1&" * 3_000, "/openapi.json?a", "/../../etc/passwd"),
)
_BAD_CHUNKS = (
    *(
        b"zz\r\nabc\r\n0\r\n\r\n",
        b"-1\r\na\r\n0\r\n\r\n",
        b"5\r\nabc",
        b"3\r\nabcdef\r\n0\r\n\r\n",
        b"\r\n\r\n",
        b"0\r\n",
    ),
    *(
        b"ffffffffffffffffff\r\na\r\n",
        b"7fffffffffffffff\r\na",
        b"3;" + b"a" * 20_000 + b"\r\nabc\r\n0\r\n\r\n",
        b"0x3\r\nabc\r\n",
    ),
    *(b"1\nb\n0\n\n", b"0\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", b"1\r\n{\r\n" * 3_000 + b"0\r\n\r\n"),
)


def headers(draw: random.Random, name: str) -> Case:
    """A good or read-only request under strange headers."""
    if draw.random() < 0.3:
        content_type = draw.choice(_CONTENT_TYPES)
        route = draw.choice((*ROUTES, *PLANNED))
        data = request(route.path, write(route.body), content_type=content_type)
        return _loose(name, "headers", f"Content-Type {str(content_type)[:60]}", data)
    lines = draw.sample(_HEADERS, draw.choice((1, 1, 1, 3)))
    key = draw.choice(("attacker", "attacker", "wrong", ""))
    if draw.random() < 0.3:
        data = request(draw.choice(READ_ONLY), b"", *lines, method="GET", content_type=None, key=key)
    else:
        data = request(PATH, GOOD, *lines, key=key)
    return _loose(name, "headers", str(lines)[:80], data)


def targets(draw: random.Random, name: str) -> Case:
    """Methods and paths that do not go together, or that are neither."""
    method = draw.choice(_METHODS)
    known = [route.path for route in (*ROUTES, *PLANNED)]
    target = draw.choice((*_TARGETS, *_TARGETS, *READ_ONLY, *known))
    body = GOOD if method in ("PUT", "POST", "PATCH") else b""
    key = draw.choice(("attacker", "attacker", "attacker", ""))
    line = request("/", body, method=method, key=key).replace(b" / ", b" " + target.encode() + b" ", 1)
    return _loose(name, "targets", f"{method[:12]} {target[:60]}", line)


def chunks(draw: random.Random, name: str) -> Case:
    """A body in chunks: good ones of all sizes, or bad ones."""
    head = request(PATH, b"", b"Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"", 1)
    if draw.random() < 0.5:
        bad = draw.choice(_BAD_CHUNKS)
        leave = draw.choice((Leave.CLOSED, Leave.AT_ONCE, Leave.HALF))
        return Case(name, "chunks", str(bad[:30]), (head + bad,), leave=leave, expect=Expect.ANSWERS_OR_CLOSE)
    size = draw.choice((1, 2, 7, 1_000))
    cut = [GOOD[i : i + size] for i in range(0, len(GOOD), size)]
    data = head + b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in cut) + b"0\r\n\r\n"
    if draw.random() < 0.3:
        data = data.replace(b"Transfer-Encoding", b"Content-Length: 3\r\nTransfer-Encoding", 1)
    return _loose(name, "chunks", f"of {size} bytes", data)


def trailers(draw: random.Random, name: str) -> Case:
    """A good body in chunks with extensions, or with trailers: few, or more than any server should read."""
    head = request(PATH, b"", b"Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"", 1)
    extension = draw.choice((b"", b";a=b", b";" + b"a" * draw.choice((10, 10_000)), b';a="' + b"b" * 50 + b'"'))
    num_lines, size = draw.choice(((0, 0), (1, 10), (3, 100), (50, 1_000), (2_000, 1_000)))
    after = b"".join(b"X-%d: %s\r\n" % (i, b"a" * size) for i in range(num_lines))
    size = draw.choice((1, 10, 1_000))
    cut = [GOOD[i : i + size] for i in range(0, len(GOOD), size)]
    data = head + b"".join(b"%x%s\r\n%s\r\n" % (len(one), extension, one) for one in cut)
    title = f"{num_lines} trailers, {len(extension)} bytes of extension per chunk"
    return _loose(name, "trailers", title, data + b"0\r\n" + after + b"\r\n")


def leavers(draw: random.Random, name: str) -> Case:
    """Requests that are good, and whose client goes away somewhere in the middle."""
    route = draw.choice(ROUTES[:2])
    extra: dict[str, Any] = {
        "max_tokens": draw.choice((5, 100, 1_500)),
        "ignore_eos": True,
        "n": draw.choice((1, 1, 2, 8)),
    }
    extra["stream"] = draw.random() < 0.7
    if draw.random() < 0.3:
        extra["request_id"] = f"left-{draw.randrange(5)}"
    if route is TEXT and draw.random() < 0.3:
        extra["prompt"] = ["a"] * draw.randint(2, 20)
    body = write({**route.body, **extra})
    data = request(route.path, body)
    where = draw.randrange(5)
    if where == 0:
        cut = data[: draw.randrange(1, len(data))]
        return Case(name, "leavers", "half a request", (cut,), leave=Leave.AT_ONCE, expect=Expect.NOTHING)
    if where == 1:
        return Case(name, "leavers", "leaves at once", (data,), leave=Leave.AT_ONCE, expect=Expect.NOTHING)
    if where == 2:
        return Case(name, "leavers", "resets", (data,), leave=Leave.RESET, expect=Expect.NOTHING)
    if where == 3:
        return Case(name, "leavers", "half-closes", (data,), leave=Leave.HALF, expect=Expect.NOTHING)
    return Case(name, "leavers", "reads a little", (data,), leave=Leave.AFTER_BYTES, expect=Expect.NOTHING)


def slow(draw: random.Random, name: str) -> Case:
    """Heads and bodies that stop in the middle, or come so slowly that the server's deadline ends them."""
    data = request(PATH, GOOD)
    head_bytes = data.index(b"\r\n\r\n") + 4
    in_body = draw.random() < 0.6
    at = draw.randrange(head_bytes, len(data)) if in_body else draw.randrange(5, head_bytes - 1)
    pieces = [data[:at]]
    if draw.random() < 0.4:
        rest = data[at:-1] if in_body else b"a" * 400
        pieces += [rest[i : i + 1] for i in range(40)]
    where = "body" if in_body else "head"
    return Case(
        name, "slow", f"{where}, {len(pieces)} pieces", tuple(pieces), 0.2, leave=Leave.CLOSED, expect=Expect.REFUSED
    )


def pipelines(draw: random.Random, name: str) -> Case:
    """Several requests at once on one connection, with or without garbage after or between them."""
    streams = request(PATH, write({**TEXT.body, "stream": True}))
    good = [
        draw.choice((request(PATH, GOOD), streams, request("/health", method="GET")))
        for _ in range(draw.randint(1, 12))
    ]
    if draw.random() < 0.4:
        return Case(name, "pipelines", f"{len(good)} good ones", (b"".join(good),), num_answers=len(good))
    garbage = draw.choice(
        (
            *(
                b"\r\n\r\n",
                b"x" * 10_000,
                b"\x16\x03\x01\x02\x00\x01\x00",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"\x00" * 500,
            ),
            *(b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"GET /health HTTP/1.1\r\nContent-Length: -1\r\n\r\n"),
            *(b"POST /v1/completions HTTP/1.0\r\n\r\n", b"GET http:// HTTP/1.1\r\nHost:\r\n\r\n", draw.randbytes(200)),
            *(b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", b"GET /health\r\n", LONG),
        )
    )
    at = draw.randrange(len(good) + 1)
    data = b"".join([*good[:at], garbage, *good[at:]])
    leave = draw.choice((Leave.CLOSED, Leave.AT_ONCE, Leave.HALF))
    return Case(name, "pipelines", str(garbage[:30]), (data,), leave=leave, expect=Expect.ANSWERS_OR_CLOSE)


def long_pipelines(draw: random.Random, name: str) -> Case:
    """A thousand requests or two at once on one connection; the client reads all answers, or leaves at once."""
    num_requests = draw.choice((1_000, 2_000))
    path = draw.choice(("/health", "/version", "/nowhere"))
    data = request(path, method="GET", content_type=None) * num_requests
    if draw.random() < 0.3:
        return Case(name, "long pipelines", f"{path}, leaves", (data,), leave=Leave.AT_ONCE, expect=Expect.NOTHING)
    return Case(name, "long pipelines", f"{num_requests} times {path}", (data,), num_answers=num_requests)


def same_ids(draw: random.Random, name: str) -> Case:
    """Requests and aborts under a few ids that others use at the same time."""
    which = draw.choice(("1", "2", "healthy", "cmpl-1", "attacker-1"))
    body = write({**CHAT.body, "request_id": which, "max_tokens": draw.choice((3, 200)), "ignore_eos": True})
    aborts = write({"request_ids": [f"{prefix}{which}" for prefix in ("cmpl-", "chatcmpl-", "")]})
    pieces = draw.choice(
        (
            (request(CHAT.path, body),),
            (request(CHAT.path, body, b"X-Request-Id: " + which.encode()),),
            (request("/abort_requests", aborts),),
            (request("/reset_prefix_cache?reset_running_requests=true"),),
            (request("/reset_prefix_cache"),),
        )
    )
    return Case(name, "same ids", which, pieces)


def _loose(name: str, kind: str, title: str, data: bytes) -> Case:
    """A request that the HTTP parser itself may refuse, which closes the connection."""
    return Case(name, kind, title, (data,), expect=Expect.ANSWERS_OR_CLOSE)
