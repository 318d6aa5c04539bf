"""One API key cannot use up what all share: the bytes of bodies, and the threads for long texts."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import FAKE_ENGINE, LiveServer, serving

KEYS = ("--api-key", "one", "--api-key", "two")
LIMIT = 400_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("shares")
    with serving(folder, *FAKE_ENGINE, *KEYS, "--server-limits.max-queued-bytes", str(LIMIT)) as started:
        yield started


def port_of(server: LiveServer) -> tuple[str, int]:
    return "127.0.0.1", int(server.url.rsplit(":", 1)[1])


def upload(server: LiveServer, key: str, num_bytes: int) -> socket.socket:
    """A connection on which this much of a larger body has been sent."""
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {num_bytes + 1000}\r\n\r\n"
    )
    slow = socket.create_connection(port_of(server), 10)
    slow.sendall(head.encode() + b" " * num_bytes)
    return slow


def test_slow_uploads_of_one_key_leave_half_of_the_bytes_to_others(server: LiveServer) -> None:
    def ask(key: str, num_bytes: int) -> int:
        return server.post("/tokenize", b'{"prompt":"%s"}' % (b"a" * num_bytes), Authorization=f"Bearer {key}")[0]

    with contextlib.ExitStack() as stack:
        for _ in range(7):  # two more than fit into half
            stack.enter_context(upload(server, "one", 39_000))
        end = time.monotonic() + 10
        while ask("one", 39_000) != 429:
            assert time.monotonic() < end, "a key may use more than half"
        status, answer = server.post("/tokenize", b" " * 39_000, Authorization="Bearer one")
        assert status == 429
        assert "this API key" in answer["error"]["message"]
        for _ in range(3):
            assert ask("two", 150_000) == 200
    end = time.monotonic() + 10
    while ask("one", 39_000) != 200:
        assert time.monotonic() < end, "closed connections still count"


def test_one_body_may_be_larger_than_a_keys_share(server: LiveServer) -> None:
    body = b'{"prompt":"%s"}' % (b"a" * (LIMIT * 3 // 4))
    assert server.post("/tokenize", body, Authorization="Bearer one")[0] == 200


def test_a_key_without_a_queue_does_not_wait_for_another_keys_queue(keyed_server: LiveServer) -> None:
    """Twelve long texts of key one are in line; key two's is answered before most of them."""
    answered: list[str] = []

    def ask(key: str) -> None:
        body = b'{"prompt":"%s"}' % (b"a b " * 120_000)
        assert keyed_server.post("/tokenize", body, Authorization=f"Bearer {key}")[0] == 200
        answered.append(key)

    threads = [threading.Thread(target=ask, args=("one",)) for _ in range(12)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)  # so that they are in line first; without that, the test is only easier to pass
    ask("two")
    assert len(answered) <= 8, "key two was served last"
    for thread in threads:
        thread.join()
    assert sorted(answered) == ["one"] * 12 + ["two"]


def test_texts_of_disconnected_clients_are_not_tokenised(keyed_server: LiveServer) -> None:
    """Texts in line whose clients have gone are dropped: the server's CPU time shows that they were not tokenised."""
    body = b'{"prompt":"%s"}' % (b"a b " * 120_000)

    def cpu_s() -> float:
        fields = Path(f"/proc/{keyed_server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ask() -> float:
        before_s = cpu_s()
        assert keyed_server.post("/tokenize", body, Authorization="Bearer one")[0] == 200
        return cpu_s() - before_s

    ask()
    one_s = ask()
    before_s = cpu_s()
    head = (
        "POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer one\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with contextlib.ExitStack() as gone:
        for _ in range(16):
            client = gone.enter_context(socket.create_connection(port_of(keyed_server), 10))
            client.sendall(head.encode() + body)
    assert keyed_server.post("/tokenize", {"prompt": "a b " * 17_000}, Authorization="Bearer one")[0] == 200
    ask()  # after all of the others, had they stayed in line
    assert cpu_s() - before_s < 9 * one_s, "all were tokenised"
