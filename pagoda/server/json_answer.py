"""JSON responses of any size, encoded in small pieces, so that they do not block the event loop."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeGuard

import msgspec
from msgspec import UNSET, Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagoda.server.turns import Turns

_PIECE_BYTES = 64 * 1024
_CHOICE_LOGPROBS_DEPTH = 4  # answer, choices, one choice, its logprobs
_encode = msgspec.json.Encoder().encode


class JsonAnswer(Response):
    """A struct as JSON. A small one is sent in one message with its length, a larger one while it is encoded."""

    media_type = "application/json"

    def __init__(self, value: Struct, status_code: int = 200) -> None:
        super().__init__(status_code=status_code)
        self._value = value
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces = json_pieces(self._value)
        buffer = bytearray()
        turns = Turns()
        async for piece in pieces:
            buffer += piece
            await turns.did(1)
            if len(buffer) > _PIECE_BYTES:
                break
        else:
            self.headers["content-length"] = str(len(buffer))
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            return await send({"type": "http.response.body", "body": bytes(buffer), "more_body": False})
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": bytes(buffer), "more_body": True})
        buffer.clear()
        async for piece in pieces:
            buffer += piece
            await turns.did(1)
            if len(buffer) > _PIECE_BYTES:
                await send({"type": "http.response.body", "body": bytes(buffer), "more_body": True})
                buffer.clear()
        return await send({"type": "http.response.body", "body": bytes(buffer), "more_body": False})


async def json_pieces(value: Any, depth: int = _CHOICE_LOGPROBS_DEPTH) -> AsyncIterator[bytes]:
    """Yield the JSON text of `value` in pieces that take about 1 ms to encode; the event loop runs between them.

    depth: how many levels of objects and lists of objects to split. Lists below that level are encoded in slices.
    """
    if _is_object(value) and depth:
        before = b"{"
        for key, item in _members(value):
            yield before + _encode(key) + b":"
            before = b","
            async for piece in json_pieces(item, depth - 1):
                yield piece
        yield b"}" if before == b"," else b"{}"
    elif isinstance(value, list) and depth and value and _is_object(value[0]):
        for index, item in enumerate(value):
            yield b"," if index else b"["
            async for piece in json_pieces(item, depth - 1):
                yield piece
        yield b"]"
    elif isinstance(value, list):
        async for piece in _list_pieces(value):
            yield piece
    else:
        yield _encode(value)


def _is_object(value: Any) -> TypeGuard[dict[str, Any] | Struct]:
    return isinstance(value, dict | Struct)


def _members(value: dict[str, Any] | Struct) -> Iterable[tuple[str, Any]]:
    """Return the keys and values of an object as JSON has them."""
    if isinstance(value, dict):
        return value.items()
    fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
    return ((name, item) for name, item in fields if item is not UNSET)


async def _list_pieces(items: list[Any]) -> AsyncIterator[bytes]:
    start, size = 0, 64
    while start < len(items) or not start:
        piece = _encode(items[start : start + size])[1:-1]
        is_last = start + size >= len(items)
        yield (b"," if start else b"[") + piece + (b"]" if is_last else b"")
        if is_last:
            return
        start += size
        await asyncio.sleep(0)
        if len(piece) < _PIECE_BYTES:
            size *= 2
        elif len(piece) > 4 * _PIECE_BYTES:
            size = max(1, size // 2)
