"""Events of the prefix cache over real sockets, read as readers of vLLM's events read them."""

import dataclasses
import hashlib
import os
import sys
import threading
import time
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from pagoda import LLM, SamplingParams
from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import ConfigError
from pagoda.base.kv_events_config import KVEventsConfig, endpoint_of
from pagoda.core.events import Removed, Stored, TierChanged
from pagoda.core.kv import KVGroupKind, KVGroupSpec
from pagoda.core.request import LoraRef, MediaItem, Request
from pagoda.engine import kv_events
from pagoda.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEventPublisher

SIZE = 4
PROMPT = list(range(10, 30))


@pytest.fixture
def config(tmp_path: Path) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replays",
        topic="kv",
    )


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


class Reader:
    """Asks for everything again until it has seen what it waits for, as a reader does that came late."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", config: KVEventsConfig) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.rcvtimeo = 10_000
        assert config.replay_endpoint is not None
        self._socket.connect(config.replay_endpoint)
        self._topic = config.topic.encode()

    def raw(self, first: int = 0) -> list[tuple[int, bytes]]:
        self._socket.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[tuple[int, bytes]] = []
        while True:
            _, topic, number, payload = self._socket.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                assert (topic, payload) == (b"", b"")
                return found
            assert topic == self._topic
            found.append((int.from_bytes(number, "big"), payload))

    def numbers(self, first: int = 0) -> list[int]:
        return [number for number, _ in self.raw(first)]

    def batches(self) -> list[EventBatch]:
        return [msgspec.msgpack.decode(payload, type=EventBatch) for _, payload in self.raw()]

    def events_until(self, kind: type) -> list[Any]:
        """All events, once one of this kind is among them."""
        for _ in range(100):
            events = [event for batch in self.batches() for event in batch.events]
            if any(isinstance(event, kind) for event in events):
                return events
        raise AssertionError("no such event came")


def stored(*hashes: bytes, parent: bytes | None = None, request: Request | None = None, group: int = 0) -> Stored:
    tokens = np.arange(SIZE * len(hashes), dtype=np.int32).tobytes()
    return Stored(1, 0.0, group, hashes, parent, request or request_of(), 0 if parent is None else SIZE, tokens)


def request_of(**changes: Any) -> Request:
    return Request("a", np.arange(16, dtype=np.int32), SamplingParams(), **changes)


def test_a_reader_knows_what_an_engine_has_cached(
    config: KVEventsConfig, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    params = SamplingParams(max_tokens=2, temperature=0)
    options = {"distributed_executor_backend": "fake", "num_blocks": 32, "max_model_len": 64, "block_size": SIZE}
    with LLM(kv_events_config=dataclasses.asdict(config), **options) as llm:  # type: ignore[arg-type]
        reader = Reader(context, config)
        llm.generate({"prompt_token_ids": PROMPT}, params)
        llm.generate({"prompt_token_ids": [*PROMPT[:8], *range(50, 60)]}, params)
        assert llm.reset_prefix_cache()
        first, *events = reader.events_until(BlockRemoved)
    assert isinstance(first, AllBlocksCleared)
    tokens: dict[int | None, list[int]] = {None: []}
    for event in events:
        if isinstance(event, BlockStored):
            assert (event.block_size, event.medium, event.group_idx) == (SIZE, "GPU", 0)
            assert len(event.token_ids) == len(event.block_hashes) * SIZE
            for number, one in enumerate(event.block_hashes, 1):
                assert one not in tokens
                tokens[one] = tokens[event.parent_block_hash] + event.token_ids[: number * SIZE]
    prompts = [PROMPT, [*PROMPT[:8], *range(50, 58)]]
    known = {tuple(one) for one in tokens.values()}
    assert {tuple(prompt[:end]) for prompt in prompts for end in range(SIZE, len(prompt) + 1, SIZE)} <= known
    removed = [one for event in events if isinstance(event, BlockRemoved) for one in event.block_hashes]
    assert sorted(removed) == sorted(one for one in tokens if one is not None), "a reset removes each block once"


def test_subscribers_get_each_batch_once_and_in_order(
    config: KVEventsConfig, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    publisher = KVEventPublisher(config, [KVGroupSpec()], SIZE, replica=0)
    socket = context.socket(zmq.SUB)
    socket.rcvtimeo = 10_000
    socket.subscribe(b"kv")
    socket.connect(config.endpoint)
    sent = [bytes([number]) * 32 for number in range(100)]
    seen: list[int] = []
    last = None
    while len(seen) < 50:  # the first ones may be sent before the subscriber is known
        publisher.note(stored(sent.pop(0)))
        if not socket.poll(10):
            continue
        topic, number, payload = socket.recv_multipart()
        assert last is None or int.from_bytes(number, "big") == last + 1
        last = int.from_bytes(number, "big")
        batch = msgspec.msgpack.decode(payload, type=EventBatch)
        assert (topic, batch.data_parallel_rank) == (b"kv", 0)
        seen += [one & 255 for event in batch.events if isinstance(event, BlockStored) for one in event.block_hashes]
    assert seen == list(range(seen[0], seen[-1] + 1))
    publisher.close()
    publisher.close()


def test_a_reader_gets_the_last_batches_from_a_number_on(
    config: KVEventsConfig, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    publisher = KVEventPublisher(dataclasses.replace(config, buffer_steps=3), [KVGroupSpec()], SIZE)
    reader = Reader(context, config)
    stranger = context.socket(zmq.REQ)
    stranger.connect(str(config.replay_endpoint))
    stranger.send(b"hello")  # is not answered, and does no harm
    for number in range(5):
        before = len(reader.numbers())
        publisher.note(stored(bytes([number]) * 32))
        while len(reader.numbers()) == before < 3:
            pass
    deadline = time.monotonic() + 10
    while (numbers := reader.numbers())[-1] != 5 and time.monotonic() < deadline:
        pass
    assert numbers == [3, 4, 5]
    assert reader.numbers(5) == [5]
    assert reader.numbers(6) == []
    publisher.close()


def test_what_can_be_asked_for_again_is_bounded_in_bytes(
    config: KVEventsConfig, context: "zmq.Context[zmq.Socket[bytes]]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MOST_KEPT_BYTES", 5_000)
    publisher = KVEventPublisher(config, [KVGroupSpec()], SIZE)
    reader = Reader(context, config)
    for number in range(1, 6):
        publisher.note(stored(*(bytes([number, one]) * 16 for one in range(100))))
        while not (kept := reader.raw()) or kept[-1][0] < number:
            pass
    assert 1 < len(kept) < 5
    assert sum(len(payload) for _, payload in kept) <= 5_000
    publisher.close()


def test_what_else_must_agree_is_told_of_each_block(
    config: KVEventsConfig, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    lora = LoraRef("poet", "/adapters/poet", "1")
    request = request_of(lora=lora, cache_salt="secret", media=(MediaItem("image", 3, 3),))
    publisher = KVEventPublisher(config, [KVGroupSpec(), KVGroupSpec(KVGroupKind.WINDOW, window=8)], SIZE, replica=1)
    own = dataclasses.replace(config, replay_endpoint=endpoint_of(str(config.replay_endpoint), 1))
    publisher.note(stored(b"a" * 32, b"b" * 32, b"c" * 32, request=request, group=1))
    publisher.note(Removed(1, 0.0, 1, (b"a" * 32,)))
    _, told, removed = Reader(context, own).events_until(BlockRemoved)
    salt = hashlib.sha256(b"secret").hexdigest()
    assert told.extra_keys == [["poet", ["image", 3], salt], ["poet", ["image", -1]], ["poet"]]
    assert (told.lora_name, told.lora_id, told.kv_cache_spec_kind) == ("poet", None, "sliding_window")
    assert (told.kv_cache_spec_sliding_window, told.group_idx) == (8, 1)
    assert (removed.medium, removed.block_hashes) == ("GPU", told.block_hashes[:1])
    publisher.close()


def test_blocks_of_a_tier_are_told_by_their_hashes(
    config: KVEventsConfig, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    publisher = KVEventPublisher(config, [KVGroupSpec()], SIZE)
    publisher.note(stored(b"a" * 32))
    publisher.note(TierChanged(1, 0.0, "host", (b"a" * 32,), ()))
    publisher.note(TierChanged(1, 0.0, "disk", (b"a" * 32, b"b" * 32), (b"c" * 32,)))
    _, pool, host, disk, lost = Reader(context, config).events_until(BlockRemoved)
    assert [one.medium for one in (pool, host, disk, lost)] == ["GPU", "CPU", "STORAGE", "STORAGE"]
    assert host.block_hashes == pool.block_hashes == disk.block_hashes[:1]
    assert (len(disk.block_hashes), disk.token_ids, disk.group_idx) == (2, [], 0)
    assert len(lost.block_hashes) == 1
    publisher.close()


def test_readers_are_told_to_forget_what_could_not_be_published(
    config: KVEventsConfig, context: "zmq.Context[zmq.Socket[bytes]]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    publisher = KVEventPublisher(dataclasses.replace(config, max_queue_size=1_100), [KVGroupSpec()], SIZE)
    monkeypatch.undo()
    for number in range(3_000):
        publisher.note(stored(number.to_bytes(32, "big")))
    publisher._thread.start()
    reader = Reader(context, config)
    assert [type(one) for one in reader.events_until(AllBlocksCleared)][:1] == [AllBlocksCleared]
    publisher.note(stored(b"a" * 32))
    events = reader.events_until(BlockStored)
    assert [type(one) for one in events] == [AllBlocksCleared, AllBlocksCleared, BlockStored]
    publisher.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_kv_cache_events": True, "endpoint": "5557"}, "kv_events_config.endpoint='5557' must be an address"),
        ({"enable_kv_cache_events": True, "replay_endpoint": "tcp://*"}, "kv_events_config.replay_endpoint="),
        ({"endpoint": "tcp://*:5557"}, "no effect without enable_kv_cache_events"),
        ({"enable_kv_cache_events": True, "publisher": "kafka"}, "kv_events_config.publisher='kafka' is unknown"),
        ({"enable_kv_cache_events": True, "port": 1}, "kv_events_config has no 'port'"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        check_settings(EngineConfig.from_options(kv_events_config=options))


def test_events_need_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="kv_events_config needs enable_prefix_caching"):
        check_settings(
            EngineConfig.from_options(enable_prefix_caching=False, kv_events_config={"enable_kv_cache_events": True})
        )


def test_an_address_in_use_is_a_clear_error(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}
    with pytest.raises(ConfigError, match=rf"kv_events_config.endpoint: tcp://127.0.0.1:{port} cannot be used"):
        LLM(distributed_executor_backend="fake", num_blocks=8, max_model_len=64, kv_events_config=events)


def test_each_replica_has_an_address_of_its_own() -> None:
    assert [endpoint_of("tcp://*:5557", replica) for replica in range(3)] == [
        "tcp://*:5557", "tcp://*:5558", "tcp://*:5559",
    ]  # fmt: skip
    assert endpoint_of("tcp://[::1]:0", 2) == "tcp://[::1]:0"
    assert endpoint_of("ipc:///run/events", 1) == "ipc:///run/events_dp1"


WHEEL = os.environ.get("PAGODA_VLLM_WHEEL")


@pytest.mark.slow
@pytest.mark.skipif(WHEEL is None, reason="PAGODA_VLLM_WHEEL names no wheel of vLLM")
def test_vllms_own_classes_read_the_events(
    config: KVEventsConfig, context: "zmq.Context[zmq.Socket[bytes]]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module of events needs three of its others, which need torch extensions: of these, only names are read."""
    for name, members in {
        "vllm.config.kv_events": {"KVEventsConfig": object},
        "vllm.logger": {"init_logger": lambda name: None},
        "vllm.utils.network_utils": dict.fromkeys(
            ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"), None
        ),
        "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    theirs = types.ModuleType("vllms_events")
    monkeypatch.setitem(sys.modules, "vllms_events", theirs)
    source = zipfile.ZipFile(str(WHEEL)).read("vllm/distributed/kv_events.py")
    exec(compile(source, "kv_events.py", "exec"), theirs.__dict__)

    publisher = KVEventPublisher(config, [KVGroupSpec()], SIZE)
    request = request_of(lora=LoraRef("poet", "/adapters/poet", "1"), media=(MediaItem("image", 3, 3),))
    publisher.note(stored(b"a" * 32, b"b" * 32, request=request))
    publisher.note(stored(b"c" * 32, parent=b"b" * 32))
    publisher.note(TierChanged(1, 0.0, "host", (b"a" * 32, b"b" * 32), ()))
    publisher.note(TierChanged(1, 0.0, "disk", (b"a" * 32,), (b"c" * 32,)))
    publisher.note(Removed(1, 0.0, 0, (b"a" * 32,)))
    reader = Reader(context, config)
    ours: list[Any] = []
    while len(ours) < 7:
        ours = reader.events_until(BlockRemoved)
    batches = [msgspec.msgpack.decode(payload, type=theirs.KVEventBatch) for _, payload in reader.raw()]
    read = [event for batch in batches for event in batch.events]
    assert {batch.data_parallel_rank for batch in batches} == {0}
    assert [type(one).__name__ for one in read] == [type(one).__name__ for one in ours]
    for mine, their in zip(ours, read, strict=True):
        for field in mine.__struct_fields__:
            expected = getattr(mine, field)
            if field == "extra_keys" and expected is not None:
                assert [list(one) for one in their.extra_keys] == expected
            else:
                assert getattr(their, field) == expected
    media = theirs.MEDIUM_GPU, theirs.MEDIUM_CPU, theirs.MEDIUM_STORAGE
    assert [getattr(one, "medium", None) for one in read] == [None, *(media[at] for at in (0, 0, 1, 2, 2, 0))]
    seen = theirs.KVEventAggregator(1)
    seen.add_events(read[3:])  # those before are of kinds that cannot be counted there once they are decoded
    assert seen.get_common_events() == read[3:], "each is told from the others"
    publisher.close()


def test_batches_that_nobody_can_ask_for_are_not_kept(config: KVEventsConfig) -> None:
    publisher = KVEventPublisher(dataclasses.replace(config, replay_endpoint=None), [KVGroupSpec()], SIZE)
    publisher.note(stored(b"a" * 32))
    publisher.close()
    assert publisher._num_sent == 2
    assert not publisher._sent
