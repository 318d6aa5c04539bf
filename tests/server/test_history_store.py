"""What is kept and sealed of a turn: for whom, how much of it, and what becomes of wrong and hostile seals."""

import asyncio
import base64
import contextlib
import os
import random
import sqlite3
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.requests import Request as HttpRequest

from pagoda.base.errors import ConfigError
from pagoda.base.outputs import CompletionOutput
from pagoda.engine.answers.reasoning import THINK
from pagoda.engine.answers.same_message import MessageForm
from pagoda.engine.clients.calls import OwnCalls, services_of
from pagoda.engine.inputs.sampled_messages import OpenMessage, SampledMessage, packed, unpacked
from pagoda.engine.tokenizers.byte_tokenizer import EOS, ByteTokenizer
from pagoda.server.dialects.messages.cache_diagnosis import CacheMissReason, Diagnosis, Diagnostics, Fingerprint
from pagoda.server.history import History, SampledTurn, key_of_note
from pagoda.server.history_store import HistoryStore
from pagoda.server.request_state import Caller, RequestState
from pagoda.server.seals import Sealer, server_secret
from tests.server.random_turns import turn_of

KEY = bytes(range(16))
SECRET = b"s" * 32
MESSAGE = SampledMessage("assistant\n", packed([1, 2]), packed([3, 4, 5]))
ONE, TWO = Caller("1", "a"), Caller("2", "b")


def message(number: int, size: int = 10) -> SampledMessage:
    return SampledMessage("", b"", packed([number] * size))


def history(secret: bytes = SECRET, model: str = "m", store: HistoryStore | None = None) -> History:
    store = store or HistoryStore()
    return History(model, ByteTokenizer(), 1000, secret, OwnCalls(services_of(store)))


def recalled(one: History, owner: str, *seals: str, key: bytes = KEY) -> Sequence[SampledMessage]:
    return asyncio.run(one.recall(owner, [key], seals)).get(key, ())


# ---- the store


def test_the_last_answers_to_a_prompt_come_first_and_equal_ones_are_one() -> None:
    store = HistoryStore()
    for number in (*range(20), 5):
        store.remember(0, "a", KEY, bytes([number]))
    numbers = [one[0] for _, one in store.recall(0, "a", [KEY, b"other"])]
    assert (numbers[0], numbers.count(5), len(numbers)) == (5, 1, 8)
    assert store.recall(0, "b", [KEY]) == []


def test_each_owner_and_all_together_have_a_bound_and_what_was_used_last_stays() -> None:
    store = HistoryStore(max_bytes=20_000, max_bytes_per_owner=8_000)
    rng = random.Random(0)
    for number in range(2_000):
        owner = rng.choice("abcd")
        store.remember(0, owner, number.to_bytes(16, "big"), bytes(rng.randint(1, 600)))
        assert max(store.num_bytes / 20_000, *(size / 8_000 for size in store.bytes_of.values())) <= 1
    store.remember(0, "a", KEY, bytes(30_000))  # larger than an owner's share
    assert store.recall(0, "a", [KEY]) == []


def test_the_beginning_of_a_conversation_stays_longest() -> None:
    store = HistoryStore(max_bytes_per_owner=10_000)
    keys = [number.to_bytes(16, "big") for number in range(40)]
    for number, key in enumerate(keys):
        store.remember(0, "a", key, bytes(30) + bytes([number]))
        store.recall(0, "a", keys)
    for number in range(20):  # of others
        store.remember(0, "a", (1_000 + number).to_bytes(16, "big"), bytes(31))
    kept = {key for key, _ in store.recall(0, "a", keys)}
    assert kept == set(keys[: len(kept)])
    assert 10 < len(kept) < 40


def test_no_owner_loses_its_part_to_the_conversations_of_others() -> None:
    store = HistoryStore(max_bytes=20_000, max_bytes_per_owner=8_000)
    keys = [number.to_bytes(16, "big") for number in range(400)]
    for key in keys[:20]:
        store.remember(0, "a", key, bytes(80))
    kept = store.bytes_of["a"]
    assert kept < 20_000 / 4
    for key in keys:
        for owner in "bcd":
            store.remember(0, owner, key, bytes(80))
    assert len(store.recall(0, "a", keys[:20])) == 20
    assert min(store.bytes_of.values()) == kept  # the others share the rest


def test_a_file_is_the_users_alone_and_read_by_the_next_server(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    first = HistoryStore(str(file))
    first.remember(0, "a", KEY, b"data")
    assert all(stat.S_IMODE(one.stat().st_mode) == 0o600 for one in tmp_path.iterdir())
    with pytest.raises(
        ConfigError, match="history: .*history.db cannot be used: database is locked; name another file"
    ):
        HistoryStore(str(file))
    first.close()
    second = HistoryStore(str(file))
    assert second.recall(0, "a", [KEY]) == [(KEY, b"data")]
    assert second.num_bytes > 0
    second.close()
    file.write_bytes(b"something else" * 100)
    with pytest.raises(ConfigError, match="file is not a database; name another file, or remove it"):
        HistoryStore(str(file))


def test_a_file_of_another_version_is_refused_and_a_damaged_message_is_not_found(tmp_path: Path) -> None:
    path = str(tmp_path / "history")
    store = HistoryStore(path)
    one = history(store=store)
    owner = one.owner_of(ONE)
    store.remember(0, owner, KEY, msgspec.msgpack.encode(MESSAGE))
    for data in (b"\xc1", msgspec.msgpack.encode({"other": 1})):
        store.remember(0, owner, KEY, data)
    assert recalled(one, owner) == [MESSAGE]
    store.remember(0, owner, bytes(16), b"\xc1")
    assert recalled(one, owner, key=bytes(16)) == ()
    store.close()
    HistoryStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA user_version=2")
    with pytest.raises(ConfigError, match="not made by this version"):
        HistoryStore(path)


def test_a_damaged_note_is_none() -> None:
    store = HistoryStore()
    one = history(store=store)
    store.remember(0, one.owner_of(ONE), key_of_note("msg_1"), b"\xc1")
    app = SimpleNamespace(state=SimpleNamespace(server=None))
    http = HttpRequest({"type": "http", "state": RequestState(caller=ONE), "app": app})
    model: Any = SimpleNamespace(history=one, block_size=1)

    async def told() -> Diagnostics | None:
        now = Fingerprint("m", b"", b"", b"", [])
        return (await Diagnosis.of(http, model, now, "msg_1")).diagnostics(turn_of())

    assert asyncio.run(told()) == Diagnostics(CacheMissReason("previous_message_not_found"))


def test_a_store_that_fails_fails_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    store = HistoryStore()
    store.close()
    store.remember(0, "a", KEY, b"data")
    assert store.recall(0, "a", [KEY]) == []
    assert "history: a message could not be kept" in caplog.text


# ---- seals


def test_a_seal_is_opened_for_the_same_key_model_tokenizer_and_prompt_alone() -> None:
    one = history()
    owner = one.owner_of(ONE)
    sealed = one.seal(owner, KEY, MESSAGE)
    assert recalled(history(), owner, sealed) == [MESSAGE]  # of the next server, whose store is empty
    assert recalled(history(), history().owner_of(TWO), sealed) == ()
    assert recalled(history(model="other"), history(model="other").owner_of(ONE), sealed) == ()
    assert recalled(history(secret=b"t" * 32), owner, sealed) == ()
    assert recalled(history(), owner, sealed, key=bytes(16)) == ()
    # A key has the same messages wherever it stands among the others.


def test_no_changed_seal_is_opened() -> None:
    one, rng = history(), random.Random(0)
    owner = one.owner_of(ONE)
    sealed = base64.b64decode(one.seal(owner, KEY, MESSAGE))
    for at in range(len(sealed)):
        changed = bytearray(sealed)
        changed[at] ^= 1 << rng.randrange(8)
        for key in (KEY, bytes(changed[1:17])):
            assert recalled(one, owner, base64.b64encode(changed).decode(), key=key) == ()
        assert recalled(one, owner, base64.b64encode(sealed[:at]).decode()) == ()


def test_hostile_seals_cost_nothing() -> None:
    one, rng = history(), random.Random(0)
    owner = one.owner_of(ONE)
    header = base64.b64encode(b"\x01" + KEY + b"x").decode()
    hostile = ["", "é" * 100, "=" * 100, header, header + "é" * 50, header + "A" * 50, "\ud800" * 40]
    hostile += [base64.b64encode(rng.randbytes(rng.randint(0, 200))).decode() for _ in range(1000)]
    huge = header + "A" * (16 * 2**20)
    before = time.process_time()
    assert recalled(one, owner, *hostile, *([huge] * 1000)) == ()
    assert time.process_time() - before < 1.0  # reading one of the huge ones takes 20 ms
    sealer = Sealer(SECRET, 1000)
    assert sealer.seal("a", KEY, message(1, 1000)) == ""


def test_the_servers_secret_outlives_it_and_is_its_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    secret, file = server_secret(b"x"), tmp_path / "pagoda" / "history.key"
    assert len(secret) == 32
    assert server_secret(b"y") == secret
    assert [one.name for one in file.parent.iterdir()] == ["history.key"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    other = server_secret(b"x")
    assert other == server_secret(b"x") != secret
    assert "others could read it" in caplog.text
    file.unlink()
    file.write_bytes(b"short")
    file.chmod(0o600)
    assert server_secret(b"x") == other
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert server_secret(b"x") == other


# ---- turns


def turn(one: History, *outputs: CompletionOutput) -> SampledTurn:
    made = SampledTurn(one, one.owner_of(ONE), [OpenMessage(KEY, "a\n", packed([97]))], [MessageForm(tags=THINK)])
    for output in outputs:
        made.add(0, output)
    return made


def ids(text: str) -> list[int]:
    return list(text.encode())


def output(token_ids: list[int], reason: str | None = None, stop: Any = None, index: int = 0) -> CompletionOutput:
    return CompletionOutput(index, "", token_ids=token_ids, finish_reason=reason, stop_reason=stop)


@pytest.mark.parametrize("text", ["<think>a", "<think>a</think>b", "b"])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_output_that_has_ended_is_sealed_whole_before_and_after_it_is_kept(text: str, reason: str) -> None:
    one = history()
    made = turn(one, output(ids(text), reason))
    seals = [made.seal()]
    asyncio.run(made.remember())
    seals.append(made.seal())
    for sealed in seals:
        message = one._sealer.open(one.owner_of(ONE), KEY, sealed)
        assert message is not None
        assert (bytes(unpacked(message.output_ids)).decode(), message.is_whole) == (text, True)


@pytest.mark.parametrize(
    ("outputs", "kept"),
    [
        ([output(ids("a")), output([*ids("b"), EOS], "stop")], ["ab"]),
        ([output([*ids("b"), 7], "stop", 7)], ["b"]),  # a token that the request stops at
        ([output(ids("b"), "length")], ["b"]),
        ([output(ids("b"), "abort")], []),
        ([output([*ids("b"), EOS, *ids("c")], "length")], []),  # the end was ignored
        ([output([*ids("b"), EOS], "stop"), output([*ids("c"), EOS], "stop", index=1)], ["c", "b"]),
    ],
)
def test_what_is_kept_of_outputs(outputs: list[CompletionOutput], kept: list[str]) -> None:
    one = history()
    asyncio.run(turn(one, *outputs).remember())
    found = recalled(one, one.owner_of(ONE))
    assert [bytes(unpacked(each.output_ids)).decode() for each in found] == kept
    assert all((each.head, each.is_whole, unpacked(each.head_ids)) == ("a\n", True, [97]) for each in found)


def test_a_thought_is_sealed_at_its_end_and_all_at_the_end() -> None:
    one = history()
    made = turn(one, output(ids("<think>Hm")))
    assert made.seal() == ""
    made.add(0, output(ids("</think>\n\nSo")))
    (found,) = recalled(one, one.owner_of(ONE), made.seal())
    assert (bytes(unpacked(found.output_ids)), found.is_whole) == (b"<think>Hm</think>", False)
    made.add(0, output([EOS], "stop"))
    (found,) = recalled(one, one.owner_of(ONE), made.seal())
    assert (bytes(unpacked(found.output_ids)), found.is_whole) == (b"<think>Hm</think>\n\nSo", True)


def test_what_a_key_has_sampled_is_not_recalled_for_another() -> None:
    store = HistoryStore()
    one = history(store=store)
    asyncio.run(turn(one, output([*ids("a"), EOS], "stop")).remember())
    assert [len(recalled(one, one.owner_of(caller))) for caller in (ONE, TWO)] == [1, 0]
