"""A hub on this machine with one repository, that may break a connection, hang in it, or change a byte."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    """What it has, and what happened.   url: for HF_ENDPOINT.

    breaks: the next downloads end after so many bytes, one after another.   hangs: after so many bytes, for ever.
    damaged: the bytes that are sent in place of a file's own.
    ranges: of the downloads so far, where each began.   keys_seen: the other host was sent the caller's token.
    """

    repo_id: str
    files: dict[str, bytes]
    url: str = ""
    breaks: list[int] = field(default_factory=list)
    hangs: int | None = None
    hung: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    damaged: dict[str, bytes] = field(default_factory=dict)
    ranges: list[int] = field(default_factory=list)
    keys_seen: bool = False


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._file(with_body=False)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{self.hub.repo_id}/tree/"):
            self._json([self._entry(name) for name in self.hub.files])
        elif path.startswith(f"/api/models/{self.hub.repo_id}"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.hub.files.items()]
            self._json({"id": self.hub.repo_id, "sha": COMMIT, "siblings": siblings})
        else:
            self._file(with_body=True)

    def _entry(self, name: str) -> dict[str, Any]:
        data = self.hub.files[name]
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return {"type": "file", "path": name, "size": len(data), "oid": "0" * 40, "lfs": lfs}

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, with_body: bool) -> None:
        name = self.path.partition("?")[0].rpartition("/")[2]
        if name not in self.hub.files:
            self.send_error(404)
            return
        if "/resolve/" in self.path:  # large files are on another host
            self.send_response(302)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-ETag", f'"{hashlib.sha256(self.hub.files[name]).hexdigest()}"')
            self.send_header("X-Linked-Size", str(len(self.hub.files[name])))
            self.send_header("Location", f"{self.hub.url.replace('127.0.0.1', 'localhost')}/cdn/{name}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.hub.keys_seen |= "Authorization" in self.headers
        data = self.hub.damaged.get(name, self.hub.files[name])
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        if not with_body:
            return
        self.hub.ranges.append(begin)
        end = self.hub.breaks.pop(0) if self.hub.breaks else self.hub.hangs or len(data)
        self.wfile.write(data[begin:end])
        self.wfile.flush()
        if self.hub.hangs:
            self.hub.hung.set()
            self.hub.ended.wait(60)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def fake_hub(repo_id: str, files: dict[str, bytes]) -> Iterator[FakeHub]:
    hub = FakeHub(repo_id, files)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            hub.ended.set()
            server.shutdown()
