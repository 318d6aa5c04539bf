"""The HTTP/1.1 protocol with an end to its headers, which its parser does not know."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection whose request head may take `max_header_bytes` and one read more; then 431, and it is closed."""

    max_header_bytes: int

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head = False
        self._head_bytes = 0

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        had_begun = self._in_head
        super().data_received(data)
        if had_begun and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_header_bytes and not self.transport.is_closing():
                self._in_head = False
                self.transport.write(
                    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
                )
                self.transport.close()


def bounded(max_header_bytes: int) -> type[BoundedHttpProtocol]:
    """The protocol class for one server."""
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), {"max_header_bytes": max_header_bytes})
