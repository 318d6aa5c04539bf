"""One API key cannot use up the threads for long texts, which all keys share."""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

from tests.server.live import LiveServer


def port_of(server: LiveServer) -> tuple[str, int]:
    return "127.0.0.1", int(server.url.rsplit(":", 1)[1])


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
