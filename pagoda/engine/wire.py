"""Messages between an API process and an engine process: msgpack, typed at both ends.

The frozen records of core/ are sent as they are, numpy arrays as (dtype, shape, bytes). Nothing is pickled. Large
arrays of a request (what encoders read of images and audio) follow its message as frames of their own, which neither
side copies: an event loop sends them.
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np

from pagoda.base.config import EngineConfig
from pagoda.core.events import ClientEvent, Events
from pagoda.core.request import Request, RequestKey, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.core.stats import GAUGE, Gauge, SchedulerStats
from pagoda.core.view import SchedulerView, joined_views
from pagoda.engine.step_strip import StepNote


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """A new request, encoded separately, so that a malformed one can be rejected by its key.

    num_seqs: of the request.   num_arrays: frames that follow the message.
    """

    request_id: str
    key: RequestKey
    num_seqs: int
    request: msgspec.Raw
    num_arrays: int = 0


_SIZE_THE_CACHE = ("kv_cache_memory", "gpu_memory_utilization", "swap_space")


class EngineSizes(msgspec.Struct, frozen=True):
    """The sizes of an engine, which are known once its model is loaded.

    max_num_seqs, max_num_batched_tokens: of a step, as far as memory has bounded them; None: as in the settings.
    prefix_group: the KV group that tells what is cached of a prompt.   weights: a digest of its weights.
    """

    max_model_len: int
    block_size: int
    num_blocks: int
    num_host_blocks: int
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefix_group: int = 0
    weights: str = ""

    def settle(self, config: EngineConfig) -> EngineConfig:
        """Return the settings for the next engine, in which nothing that memory bounds is measured again."""
        sizes = {"max_num_seqs": self.max_num_seqs, "max_num_batched_tokens": self.max_num_batched_tokens}
        sizes = {name: size for name, size in sizes.items() if size is not None}
        given = config.given
        if given is not None:  # sizes do not give way any more, and what these numbers of blocks were made of is done
            given = (*(name for name in given if name not in _SIZE_THE_CACHE), *sizes)
        return dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, max_model_len=self.max_model_len),
            scheduler=dataclasses.replace(config.scheduler, **sizes),
            debug=dataclasses.replace(config.debug, num_blocks=self.num_blocks, num_host_blocks=self.num_host_blocks),
            given=given,
        )


class WeightsSource(msgspec.Struct, frozen=True):
    """Where engines have their weights from, as the settings `model` and `revision` say it."""

    model: str
    revision: str | None = None

    def of(self, config: EngineConfig) -> EngineConfig:
        """Return the settings with these weights; what requests call the model stays."""
        names = config.model.names
        model = dataclasses.replace(config.model, model=self.model, revision=self.revision, served_model_name=names)
        return dataclasses.replace(config, model=model)


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The first message of an engine process: it can run steps."""

    sizes: EngineSizes


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    """The first message of a ClientServer to a client.   client_index: the client's own."""

    client_index: int
    sizes: EngineSizes


class EngineEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A ClientServer's message that no engine can be started any more, and why."""

    message: str


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A call of a function that the other end of a connection offers by name; see clients/calls.py.

    call_id: of the reply; 0: there is none.
    """

    call_id: int
    name: str
    arguments: tuple[msgspec.Raw, ...]


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """What a call returned, or raised: the name of the error's class, its text, and its fields."""

    call_id: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil
    error: tuple[str, str, dict[str, str | int | None]] | None = None


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The last message of an engine that could not start.

    config: the settings are invalid, so that another start would fail too.
    """

    message: str
    config: bool


@dataclass(slots=True)
class EngineStats(SchedulerStats):
    """A snapshot of the scheduler's gauges and counters; counters start at 0 with each engine process.

    num_steps, step_s: steps that computed something, and the time that the engine spent in them.
    num_up, num_starting, num_draining, num_gone: engine processes, by what they do; 0 without a process.
    scheduler_s: the scheduler's share of it.   at_s: time of the snapshot, on the system's monotonic clock.
    adapters_read, adapters_dropped: LoRA adapters that were read from disk, and dropped for others (max_cpu_loras).
    """

    num_steps: int = 0
    step_s: float = 0.0
    scheduler_s: float = 0.0
    adapters_read: int = 0
    adapters_dropped: int = 0
    num_up: Gauge[int] = 0
    num_starting: Gauge[int] = 0
    num_draining: Gauge[int] = 0
    num_gone: Gauge[int] = 0
    at_s: Gauge[float] = 0.0

    @property
    def num_requests(self) -> int:
        return self.num_running + self.num_waiting + self.num_swapped

    @property
    def age_s(self) -> float:
        """Return the age of the snapshot: as long as the step that runs. 0 while there is no request."""
        return max(0.0, time.monotonic() - self.at_s) if self.num_requests else 0.0

    def counters(self) -> "EngineStats":
        """Return these statistics without the gauges, as of an engine that has ended."""
        fields = dataclasses.fields(EngineStats)
        totals = [one.name for one in fields if GAUGE not in getattr(one.type, "__metadata__", ())]
        return EngineStats(**{name: getattr(self, name) for name in totals})

    @staticmethod
    def sum_of(parts: "Sequence[EngineStats]") -> "EngineStats":
        """Return the statistics of several engines together; the time is the earliest of those with requests."""
        added: dict[str, Any] = {}
        for one in dataclasses.fields(EngineStats):
            values = [getattr(part, one.name) for part in parts]
            if isinstance(values[0], list):
                added[one.name] = list(map(sum, itertools.zip_longest(*values, fillvalue=0)))
            elif isinstance(values[0], tuple):
                added[one.name] = tuple(sorted(set(itertools.chain(*values))))
            else:
                added[one.name] = sum(values)
        busy = [part.at_s for part in parts if part.num_requests]
        added["at_s"] = min(busy, default=max(part.at_s for part in parts))
        return EngineStats(**added)


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """One step's outputs, by client.

    From time to time there are none: long prompts and beam searches have steps without outputs.
    step_tokens: tokens computed in each step since the last message.   stats: included from time to time, and
    whenever a sequence ends: a client that has its last token finds it counted in the metrics.
    """

    outputs: dict[int, EngineCoreOutputs]
    step_tokens: tuple[int, ...] = ()
    stats: EngineStats | None = None


class EngineReport(msgspec.Struct, frozen=True, tag="engine_report"):
    """What a ClientServer sends to all clients when the engine's state has changed.

    step_tokens: tokens computed in each step since the last report.
    """

    is_up: bool
    is_stuck: bool
    num_deaths: int
    stats: EngineStats
    step_tokens: tuple[int, ...] = ()


class AllEvents(msgspec.Struct, frozen=True, tag="events"):
    """Events of the requests of all clients, for one that listens."""

    events: Events


class CacheChanges(msgspec.Struct, frozen=True, tag="cache"):
    """What has changed in the prefix cache: hashes of blocks that can be found now, and of those that no longer can."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class RequestRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine rejected this request; it was never queued.

    status: FINISHED_IGNORED where the request is at fault, FINISHED_ERROR where the engine is.
    """

    key: RequestKey
    message: str
    status: RequestStatus = RequestStatus.FINISHED_IGNORED


class IdleReport(msgspec.Struct, frozen=True, tag="idle"):
    """The engine has no request and waits for a message.

    num_handled: messages of this client handled since the start. If the client has sent no more, there is no work left.
    """

    stats: EngineStats
    num_handled: int


class LookReply(msgspec.Struct, frozen=True):
    """What runs now, the steps that were asked for, and the statistics."""

    view: SchedulerView
    steps: tuple[StepNote, ...]
    stats: EngineStats

    def of_replica(self, number: int) -> "LookReply":
        """Return the same, with the replica's number in its steps."""
        steps = tuple(dataclasses.replace(step, replica=number) for step in self.steps)
        return msgspec.structs.replace(self, steps=steps)

    @staticmethod
    def sum_of(replies: "Sequence[LookReply]") -> "LookReply":
        """Return what several engines do as if it were one. Of steps, those that ended before all have replied."""
        until_s = min(one.stats.at_s for one in replies)
        steps = sorted((step for one in replies for step in one.steps), key=lambda step: step.ended_s)
        return LookReply(
            view=joined_views([one.view for one in replies]),
            steps=tuple(step for step in steps if step.ended_s <= until_s),
            stats=EngineStats.sum_of([one.stats for one in replies]),
        )


ToEngine = AddRequest | Call
FromEngine = Ready | StartFailed | StepOutputs | CacheChanges | RequestRefused | IdleReport | Reply
FromClient = AddRequest | Call | Reply
"""What clients in other processes send to a ClientServer."""
FromServer = Connected | EngineEnded | EngineReport | StepOutputs | AllEvents | Call | Reply
"""What it sends to them."""


LARGE_ARRAY_BYTES = 64 * 2**10
"""From this size on, an array of a request is a frame of its own."""


_EVENT_TYPES: dict[str, type[ClientEvent]] = {one.__name__: one for one in get_args(ClientEvent)}
_EVENT_FIELDS: dict[str, Any] = {
    name: tuple[tuple(get_type_hints(one).values())]  # type: ignore[misc]  # as many types as it has fields
    for name, one in _EVENT_TYPES.items()
}


def _to_plain(value: Any) -> Any:
    if isinstance(value, Events):
        return [(type(one).__name__, [getattr(one, name) for name in one.__match_args__]) for one in value]
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"no wire form for {type(value).__name__}")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    if kind is Events:
        return Events(_EVENT_TYPES[name](*msgspec.convert(fields, _EVENT_FIELDS[name])) for name, fields in value)
    raise NotImplementedError(f"no wire form for {kind.__name__}")


def make_encoder() -> msgspec.msgpack.Encoder:
    """Return an encoder of messages, and of whatever they are made of. Not thread-safe."""
    return msgspec.msgpack.Encoder(enc_hook=_to_plain)


def make_decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    """Return a decoder of values of one type. Decoded arrays are read-only."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_plain)


class Codec:
    """Encodes any message; decodes those of one direction. Decoded arrays are read-only. Not thread-safe."""

    def __init__(self, incoming: Any) -> None:
        self._encoder = make_encoder()
        self._decoder = make_decoder(incoming)
        self._arrays: list[memoryview] = []  # of the request that is encoded or decoded
        self._request_encoder = msgspec.msgpack.Encoder(enc_hook=self._keep_large)
        self._request_decoder = msgspec.msgpack.Decoder(Request, dec_hook=self._with_large)

    def encode(self, message: msgspec.Struct) -> bytes:
        return self._encoder.encode(message)

    def encode_request(self, request: Request) -> tuple[bytes | memoryview, ...]:
        """Encode an AddRequest message; the large arrays of the request follow it, as they are in memory.

        Raises UnicodeEncodeError for a string that is not valid Unicode, OverflowError for an integer beyond 64 bits,
        TypeError or NotImplementedError for a value of an unsupported type.
        """
        self._arrays = []
        encoded = msgspec.Raw(self._request_encoder.encode(request))
        arrays, self._arrays = self._arrays, []
        message = AddRequest(request.request_id, request.key, request.num_seqs, encoded, len(arrays))
        return (self.encode(message), *arrays)

    def decode(self, data: bytes) -> Any:
        """Decode a message. Raises msgspec.DecodeError if it is malformed."""
        return self._decoder.decode(data)

    def decode_request(self, message: AddRequest, *arrays: memoryview) -> Request:
        """Decode the request of an AddRequest message, with the frames that follow it.

        Raises msgspec.DecodeError if it is malformed.
        """
        self._arrays = list(arrays)
        try:
            return self._request_decoder.decode(message.request)
        finally:
            self._arrays = []

    def _keep_large(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.nbytes < LARGE_ARRAY_BYTES or not value.flags.c_contiguous:
            return _to_plain(value)
        self._arrays.append(value.data.cast("B"))
        return (value.dtype.str, value.shape, len(self._arrays) - 1)

    def _with_large(self, kind: type, value: Any) -> Any:
        if kind is np.ndarray and isinstance(value[2], int):
            value = (value[0], value[1], self._arrays[value[2]])
        return np.require(_from_plain(kind, value), requirements="A")  # a frame may begin anywhere
