"""Calls of an engine process by its parent, and its replies, as messages."""

import msgspec

from pagoda.core.request import LoraRef
from pagoda.engine import wire


def call(call_id: int, name: str, *arguments: object) -> wire.Call:
    return wire.Call(call_id, name, tuple(msgspec.Raw(wire.make_encoder().encode(one)) for one in arguments))


def load(call_id: int, lora: LoraRef) -> wire.Call:
    return call(call_id, "load_adapter", lora)


def unload(lora: LoraRef) -> wire.Call:
    return call(0, "unload_adapter", lora)


def reply(call_id: int, refusal: str | None = None) -> wire.Reply:
    """Return the reply to a load.   refusal: why the adapter cannot be used."""
    return wire.Reply(call_id, error=None if refusal is None else ("RequestError", refusal, {"param": "lora_request"}))
