"""An engine process in which requests fail on their way in.

What fails is in the request's id: "decode" (the message), "early" and "late" (Scheduler.add_request, before and after
it has changed anything), "lost" (the request is dropped without a word), "replay" (only in an engine configured to,
by the file that REPLAY_FAULTS names). Its steps can be limited as those of stepped_engine.
"""

import os
from pathlib import Path

import msgspec

from pagoda.assembly import engine_process
from pagoda.core.request import Request
from pagoda.core.scheduler import Scheduler
from pagoda.engine import wire
from tests.engine.stepped_engine import limit_steps

_decode = wire.Codec.decode_request
_add = Scheduler.add_request
_replay_fails = Path(os.environ.get("REPLAY_FAULTS", "/nonexistent")).exists()


def decode_request(codec: wire.Codec, message: wire.AddRequest, *arrays: memoryview) -> Request:
    if "decode" in message.request_id or ("replay" in message.request_id and _replay_fails):
        return _decode(codec, msgspec.structs.replace(message, request=msgspec.Raw(b"\xc1")))
    return _decode(codec, message, *arrays)


def add_request(scheduler: Scheduler, request: Request) -> None:
    if "early" in request.request_id:
        raise RuntimeError("injected")
    if "lost" in request.request_id:
        return
    _add(scheduler, request)
    if "late" in request.request_id:
        raise RuntimeError("injected")


def main() -> None:
    wire.Codec.decode_request = decode_request  # type: ignore[method-assign]
    Scheduler.add_request = add_request  # type: ignore[method-assign]
    limit_steps()
    engine_process.main()
