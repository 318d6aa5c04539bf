"""Messages between an API process and an engine process: msgpack, typed at both ends.

The frozen records of core/ travel as they are; numpy arrays as (dtype, shape, bytes). Nothing is pickled.
"""

from typing import Any

import msgspec
import numpy as np

from pagoda.core.request import Request, RequestStatus
from pagoda.core.scheduler import SchedulerStats
from pagoda.core.scheduler_output import EngineCoreOutputs


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """A new request, encoded on its own: one that cannot be decoded is refused under its id, and nothing else."""

    request_id: str
    handle: int
    request: msgspec.Raw


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: tuple[str, ...]


class FinishBranch(msgspec.Struct, frozen=True, tag="finish_branch"):
    """A stop string was found in the text of this branch: it ends, its siblings go on."""

    request_id: str
    branch: int
    status: RequestStatus


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    call_id: int
    preempt_running: bool = False


ToEngine = AddRequest | AbortRequests | FinishBranch | ResetPrefixCache


class EngineFacts(msgspec.Struct, frozen=True):
    """What an engine knows once its model is loaded."""

    max_model_len: int
    block_size: int
    num_blocks: int
    num_host_blocks: int
    load_s: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The first message of an engine process: steps can run from now on."""

    facts: EngineFacts


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The last message of an engine that could not start.

    `config`: the caller's settings are to blame, a retry won't help.
    """

    message: str
    config: bool


class EngineStats(msgspec.Struct, frozen=True):
    """The scheduler's gauges and running totals, as of one moment of this engine's life."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    kv_usage: float = 0.0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @classmethod
    def of(cls, stats: SchedulerStats) -> "EngineStats":
        """The part of the scheduler's statistics that operators read."""
        return cls(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_swapped=stats.num_swapped,
            kv_usage=stats.kv_usage,
            num_free_blocks=stats.num_free_blocks,
            num_preemptions=stats.preemptions,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            num_drafts=stats.drafts,
            num_draft_tokens=stats.drafted_tokens,
            num_accepted_tokens=stats.accepted_tokens,
        )


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What one step gave its client.

    step_tokens: tokens computed in each step since the last message.   stats: rides along from time to time.
    """

    outputs: EngineCoreOutputs
    step_tokens: tuple[int, ...] = ()
    stats: EngineStats | None = None


class RequestRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine did not take this request; it never entered a queue.

    status: FINISHED_IGNORED where the request is at fault, FINISHED_ERROR where the engine is.
    """

    request_id: str
    handle: int
    message: str
    status: RequestStatus = RequestStatus.FINISHED_IGNORED


class IdleReport(msgspec.Struct, frozen=True, tag="idle"):
    """The engine has no request and waits for a message.

    num_handled: messages of this client it has handled since it started. If the client has sent no more than those,
    there is no work anywhere.
    """

    stats: EngineStats
    num_handled: int


class ResetReply(msgspec.Struct, frozen=True, tag="reset_reply"):
    call_id: int
    succeeded: bool


FromEngine = Ready | StartFailed | StepOutputs | RequestRefused | IdleReport | ResetReply


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"no wire form for {type(value).__name__}")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    raise NotImplementedError(f"no wire form for {kind.__name__}")


class Codec:
    """Encodes any message, decodes those of one direction. Arrays come out read-only.

    Not for use by two threads at once.
    """

    def __init__(self, incoming: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
        self._decoder = msgspec.msgpack.Decoder(incoming, dec_hook=_from_plain)
        self._request_decoder = msgspec.msgpack.Decoder(Request, dec_hook=_from_plain)

    def encode(self, message: msgspec.Struct) -> bytes:
        return self._encoder.encode(message)

    def encode_request(self, request: Request) -> bytes:
        """An AddRequest message.

        Raises UnicodeEncodeError for a string that is not valid Unicode, OverflowError for an integer beyond 64 bits,
        TypeError or NotImplementedError for a value that has no wire form.
        """
        return self.encode(AddRequest(request.request_id, request.handle, msgspec.Raw(self._encoder.encode(request))))

    def decode(self, data: bytes) -> Any:
        """The message. Raises msgspec.DecodeError for bytes that are none."""
        return self._decoder.decode(data)

    def decode_request(self, message: AddRequest) -> Request:
        """The request of an AddRequest message. Raises msgspec.DecodeError if it is malformed."""
        return self._request_decoder.decode(message.request)
