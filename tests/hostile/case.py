"""A case: what is sent over one connection, when the client leaves, and what it may be answered."""

from dataclasses import dataclass
from enum import Enum


class Leave(Enum):
    """When the client closes its connection."""

    ANSWERED = "when its answers are complete"
    CLOSED = "when the server closes the connection"
    AT_ONCE = "when everything is sent"
    AFTER_BYTES = "after the first bytes of the answer"
    RESET = "with a TCP reset, when everything is sent"
    HALF = "after its answers; what it sends ends with its last byte"


class Expect(Enum):
    """What an answer must be."""

    ANSWERS = "exactly `num_answers`, each complete"
    ANSWERS_OR_CLOSE = "some answers, then possibly a closed connection"
    REFUSED = "one error, by a deadline of the server"
    NOTHING = "anything: the client does not wait"


@dataclass(frozen=True, slots=True)
class Case:
    """kind: the generator that made it.   title: what is hostile about it.

    pieces: sent one after another, `pause_s` apart.   num_answers: complete requests among them.
    """

    name: str
    kind: str
    title: str
    pieces: tuple[bytes, ...]
    pause_s: float = 0.0
    leave: Leave = Leave.ANSWERED
    expect: Expect = Expect.ANSWERS
    num_answers: int = 1

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.pieces))

    def __str__(self) -> str:
        head = b"".join(self.pieces)[:400]
        shown = head.decode("latin-1").encode("unicode_escape").decode()
        return f"{self.name} [{self.kind}] {self.title}: {self.num_bytes} bytes, {shown}"


def request(
    path: str,
    body: bytes = b"",
    *headers: bytes,
    method: str = "POST",
    content_type: bytes | None = b"application/json",
    key: str = "attacker",
) -> bytes:
    """One complete HTTP/1.1 request."""
    lines = [f"{method} {path} HTTP/1.1".encode("latin-1"), b"Host: pagoda"]
    if key:
        lines.append(b"Authorization: Bearer " + key.encode())
    if content_type is not None:
        lines.append(b"Content-Type: " + content_type)
    if body or method not in ("GET", "HEAD", "OPTIONS", "DELETE"):
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, *headers]) + b"\r\n\r\n" + body
