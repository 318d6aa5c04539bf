"""Requests on their way to an engine process: large arrays are frames of their own, which neither side copies."""

import tracemalloc
from typing import get_args, get_type_hints

import numpy as np
import pytest
import zmq

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.events import ClientEvent
from pagoda.core.request import AdmitKind, MediaItem, Reason, Request, RequestStatus
from pagoda.core.scheduler_output import only_events
from pagoda.engine import wire


def request_of(*features: np.ndarray) -> Request:
    media = tuple(MediaItem(f"hash {at}", 4 * at, 4, one, (1, 2)) for at, one in enumerate(features))
    return Request("r", np.arange(50, dtype=np.int32), SamplingParams(max_tokens=3), media=media, handle=7)


def features_of(num_rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((num_rows, 768), dtype=np.float32)


def passed_on(request: Request) -> Request:
    """Send a request through a socket, as a server does."""
    sender, receiver = wire.Codec(wire.FromEngine), wire.Codec(wire.ToEngine)
    with zmq.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.bind("inproc://requests")
        right.connect("inproc://requests")
        left.send_multipart(sender.encode_request(request), copy=False)
        message = receiver.decode(right.recv())
        assert isinstance(message, wire.AddRequest)
        return receiver.decode_request(message, *(right.recv(copy=False).buffer for _ in range(message.num_arrays)))


@pytest.mark.parametrize("sizes", [(), (3,), (100,), (100, 2, 40)])
def test_arrays_of_any_size_arrive(sizes: tuple[int, ...]) -> None:
    sent = request_of(*(features_of(size, at) for at, size in enumerate(sizes)))
    got = passed_on(sent)
    assert got.sampling == sent.sampling
    np.testing.assert_array_equal(got.prompt_token_ids, sent.prompt_token_ids)
    for expected, item in zip(sent.media, got.media, strict=True):
        assert (item.content_hash, item.offset, item.length, item.grid) == (
            expected.content_hash, expected.offset, expected.length, expected.grid,
        )  # fmt: skip
        assert item.features is not None
        assert expected.features is not None
        np.testing.assert_array_equal(item.features, expected.features)
        assert item.features.dtype == np.float32
        assert item.features.flags.aligned


def test_large_arrays_are_sent_as_they_are_in_memory() -> None:
    features = features_of(20_000)  # 60 MB
    sent = request_of(features, features[:, ::2])  # one that is not contiguous is copied into the message
    data, array = wire.Codec(wire.FromEngine).encode_request(sent)
    assert np.shares_memory(np.frombuffer(array, np.float32), features)
    assert len(data) < features.nbytes // 2 + 2000
    request, codec = request_of(features), wire.Codec(wire.FromEngine)
    tracemalloc.start()
    codec.encode_request(request)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < features.nbytes / 100  # numpy's arrays are traced, too


def test_a_frame_that_begins_anywhere_is_readable() -> None:
    codec = wire.Codec(wire.ToEngine)
    data, array = wire.Codec(wire.FromEngine).encode_request(request_of(features_of(100)))
    moved = memoryview(b"x" + bytes(array))[1:]
    request = codec.decode_request(codec.decode(bytes(data)), moved)
    assert request.media[0].features is not None
    np.testing.assert_array_equal(request.media[0].features, features_of(100))


def test_of_an_engine_that_has_ended_the_totals_are_left_and_no_gauge() -> None:
    totals = {"prompt_tokens": 7, "num_tier_lost": 2, "accepted_tokens_per_pos": [3, 1], "step_s": 1.5}
    gauges = {"num_running": 3, "num_free_blocks": 9, "running_adapters": ("a",), "num_up": 1, "at_s": 5.0}
    assert wire.EngineStats(**totals, **gauges).counters() == wire.EngineStats(**totals)  # type: ignore[arg-type]


def test_every_kind_of_event_arrives_as_it_was_sent() -> None:
    examples = {
        int: 3,
        float: 1.5,
        str: "naïve",
        bool: True,
        bytes: b"\xff",
        Reason: Reason.BLOCKS,
        AdmitKind: AdmitKind.SWAPPED_IN,
        RequestStatus: RequestStatus.FINISHED_ERROR,
        tuple[int, ...]: (1, 2),
        int | None: None,
        str | None: "why",
    }
    events = [one(*(examples[kind] for kind in get_type_hints(one).values())) for one in get_args(ClientEvent)]
    sent = wire.StepOutputs({0: only_events(events)})
    got = wire.Codec(wire.FromEngine).decode(wire.Codec(wire.ToEngine).encode(sent))
    assert list(got.outputs[0].events) == events
