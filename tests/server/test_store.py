"""The store of responses and conversations: against a model that counts everything anew, and after a restart."""

import asyncio
import contextlib
import json
import random
import stat
from pathlib import Path
from typing import Any

import pytest

from pagoda.base.errors import ConfigError, RequestError
from pagoda.engine.clients.calls import OwnCalls, services_of
from pagoda.server.listing import Listed, page_of
from pagoda.server.stored import service as service_module
from pagoda.server.stored import store as store_module
from pagoda.server.stored.file import StoreFile
from pagoda.server.stored.service import Events, StoreService, unpack
from pagoda.server.stored.store import (
    ENTRY_BYTES,
    MAX_CONTEXT_BYTES,
    NO_ROOM,
    PART_BYTES,
    Entry,
    Store,
    StoredConversation,
    StoredResponse,
    StoreLimits,
)

LIMITS = StoreLimits(key_entries=6, key_bytes=20_000, entries=10, num_bytes=30_000, age_s=100.0, key_background=2)
OWNERS = ("", "a", "b")


def response(owner: str, id: str, **more: Any) -> StoredResponse:
    fields: dict[str, Any] = {"body": b"{}", "items": b"", "events": []}
    return StoredResponse(owner=owner, id=id, **fields | more)


class Slow:
    """What a store must hold: a list in the order of the changes, counted anew each time."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def size(self, one: dict[str, Any]) -> int:
        parts = [*one["items"].values(), *one["output"].values(), *(one["events"] or ())]
        return ENTRY_BYTES + len(one["body"]) + sum(len(part) + PART_BYTES for part in parts)

    def find(self, owner: str, id: str) -> dict[str, Any] | None:
        return next((one for one in self.entries if (one["owner"], one["id"]) == (owner, id)), None)

    def is_over(self, owner: str, entries: list[dict[str, Any]], num: int, size: int) -> str:
        own = [one for one in entries if one["owner"] == owner]
        if len(own) + num > LIMITS.key_entries or sum(map(self.size, own)) + size > LIMITS.key_bytes:
            return "key"
        if len(entries) + num > LIMITS.entries or sum(map(self.size, entries)) + size > LIMITS.num_bytes:
            return "all"
        return ""

    def make_room(self, owner: str, num: int, size: int) -> bool:
        if self.is_over(owner, [one for one in self.entries if one["runs"]], num, size):
            return False
        while where := self.is_over(owner, self.entries, num, size):
            ours = (one for one in self.entries if not one["runs"] and (where == "all" or one["owner"] == owner))
            self.entries.remove(next(ours))
        return True

    def drop_old(self, now: float) -> None:
        self.entries = [one for one in self.entries if one["runs"] or one["at"] >= now - LIMITS.age_s]

    def grow(self, one: dict[str, Any], items: dict[str, bytes], now: float) -> None:
        """Add items to a conversation, if they fit."""
        self.entries.remove(one)
        grown = {**one, "items": {**one["items"], **items}}
        fits = self.make_room(one["owner"], 1, self.size(grown))
        self.entries.append({**(grown if fits else one), "at": now})


def shown(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, StoredConversation):
        return {"id": entry.id, "items": entry.items, "runs": False, "body": entry.body}
    assert isinstance(entry, StoredResponse)
    more = {"output": dict(entry.output), "events": entry.events}
    return {"id": entry.id, "items": dict(entry.own), "runs": entry.is_running, "body": entry.body, **more}


@pytest.mark.parametrize("seed", range(40))
def test_random_operations_leave_what_a_slow_model_holds(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    now, slow, ids = 1000.0, Slow(), [f"{kind}{n}" for kind in ("resp_", "conv_") for n in range(12)]
    file = StoreFile(str(tmp_path / "kept"))
    store = Store(LIMITS, lambda: now, file.write)

    def data() -> bytes:
        return bytes(draw.choice((0, 100, 3_000, 9_000)))

    def items() -> dict[str, bytes]:
        return {f"item{draw.randrange(9)}": data() for _ in range(draw.randrange(3))}

    for _ in range(300):
        now += draw.choice((0, 0, 1, 40))
        slow.drop_old(now)
        owner, id = draw.choice(OWNERS), draw.choice(ids)
        known = slow.find(owner, id)
        is_response = id.startswith("resp_")
        match draw.choice(("add", "add", "append", "append", "finish", "grow", "grow", "shrink", "body", "delete")):
            case "add" if known is None:
                body, mine, background = data(), items(), draw.random() < 0.5
                conversation = draw.choice(ids) if draw.random() < 0.5 else ""
                entry: Entry = StoredConversation(owner=owner, id=id, body=body, items=mine)
                if is_response:
                    entry = response(
                        *(owner, id),
                        body=body,
                        own=list(mine.items()),
                        is_background=background,
                        conversation=conversation,
                    )
                new = {"owner": owner, "id": id, "body": body, "items": mine, "output": {}, "runs": is_response}
                new |= {"events": [] if is_response else None, "at": now}
                new |= {"background": is_response and background, "conversation": conversation}
                new |= {"own": list(mine.items())}
                running = [one for one in slow.entries if one["owner"] == owner and one["background"] and one["runs"]]
                fits = len(running) < LIMITS.key_background or not new["background"]
                fits = fits and slow.make_room(owner, 1, slow.size(new))
                if fits:
                    slow.entries.append(new)
                    store.add(entry)
                else:
                    with pytest.raises(NO_ROOM):
                        store.add(entry)
            case "append":
                events = [data() for _ in range(draw.randrange(3))]
                store.append(owner, id, events)
                if known is not None and known["runs"] and known["events"] is not None:
                    size = sum(len(event) + PART_BYTES for event in events)
                    known["events"] = known["events"] + events if slow.make_room(owner, 0, size) else None
            case "finish":
                body, output = data(), list(items().items())
                full = False
                if known is not None and known["runs"]:
                    slow.entries.remove(known)
                    known |= {"body": body, "output": dict(output), "runs": False, "at": now}
                    slow.entries.append(known)
                    slow.make_room(owner, 0, 0)
                    kept = slow.find(owner, known["conversation"])
                    if kept is not None and "conv_" in known["conversation"]:
                        slow.grow(kept, dict([*known["own"], *output]), now)
                try:
                    store.finish(owner, id, body, output)
                except NO_ROOM:
                    full = True
                assert not full or (known is not None and known["conversation"])
            case "grow":
                more = items()
                if known is not None and not is_response:
                    slow.grow(known, more, now)
                with contextlib.suppress(*NO_ROOM):
                    store.add_items(owner, id, list(more.items()))
            case "shrink" if known is not None and not is_response and known["items"]:
                item = draw.choice(list(known["items"]))
                slow.entries.remove(known)
                slow.entries.append(
                    {**known, "items": {k: v for k, v in known["items"].items() if k != item}, "at": now}
                )
                store.delete_item(owner, id, item)
            case "delete":
                store.delete(owner, id)
                if known is not None:
                    slow.entries.remove(known)
            case _:
                pass
        for one in OWNERS:
            for name in ids:
                held = store.response(one, name) or store.conversation(one, name)
                expected = slow.find(one, name)
                assert (held is None) == (expected is None), (one, name)
                if held is not None and expected is not None:
                    assert shown(held).items() <= expected.items()
                    assert held.num_bytes == slow.size(expected)
        assert store.num_bytes == sum(map(slow.size, slow.entries)) <= LIMITS.num_bytes
    file.close()
    again = list(StoreFile(str(tmp_path / "kept")).load())
    assert {one.key for one in again} == {(one["owner"], one["id"]) for one in slow.entries}
    for entry in again:
        held = store.response(*entry.key) or store.conversation(*entry.key)
        assert held is not None
        if not (isinstance(held, StoredResponse) and held.is_running):  # whose events are written at its end
            assert shown(entry) == shown(held)
            assert list(shown(entry)["items"]) == list(shown(held)["items"])


def test_what_ran_when_the_server_ended_has_failed_after_its_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "kept")

    async def main() -> None:
        before = StoreService(path)
        stored = OwnCalls(services_of(before))
        begun = b'{"id":"r1","status":"queued","error":null}'
        await stored.ask(StoreService.add, response("a", "r1", body=begun, is_background=True))
        await stored.ask(StoreService.add, response("a", "r2"))
        stored.tell(StoreService.append, "a", "r2", [b"event: 0\n\n"])
        stored.tell(StoreService.finish, "a", "r2", b'{"status":"completed"}', [("msg_1", b"{}")])
        before.close()
        service = StoreService(path)
        with pytest.raises(ConfigError, match="locked"):
            StoreService(path)
        again = OwnCalls(services_of(service))
        failed = await again.ask(StoreService.response, "a", "r1", True)
        assert failed is not None
        lost = json.loads(failed.body)
        assert (lost.pop("error")["code"], lost) == ("server_error", {"id": "r1", "status": "failed"})
        events = await again.ask(StoreService.events, "a", "r1", -1)
        assert events is not None
        assert events.events == [
            b'event: response.failed\ndata: {"type":"response.failed","sequence_number":0,"response":%b}\n\n'
            % failed.body
        ]
        ended = await again.ask(StoreService.events, "a", "r2", -1)
        assert ended is not None
        assert (ended.events, ended.is_over) == ([b"event: 0\n\n"], True)
        context = await again.ask(StoreService.context, "a", "r2", True)
        assert context is not None
        assert context.output == [("msg_1", b"{}")]
        service.close()

    asyncio.run(main())
    assert {stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()} == {0o600}


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match="notes cannot be used"):
        StoreService(str(path))
    assert path.read_bytes() == b"not a database" * 100
    with pytest.raises(ConfigError, match="cannot be used"):
        StoreService(str(tmp_path / "missing" / "file"))


def test_a_follower_gets_each_event_once_and_the_end_of_a_lost_process(tmp_path: Path) -> None:
    async def main() -> None:
        service = StoreService()
        stored = OwnCalls(services_of(service))
        await service.add(7, response("a", "r"))
        got: list[bytes] = []

        async def follow(after: int) -> None:
            while True:
                found = await stored.ask(StoreService.events, "a", "r", after)
                assert found is not None
                got.extend(found.events)
                after += len(found.events)
                if found.is_over:
                    return

        following = asyncio.create_task(follow(0))
        for number in range(200):
            service.append(7, "a", "r", [b"%d" % number + b" " * (number % 2) * 300_000])
            if number % 50 == 0:
                await asyncio.sleep(0)
        service.end_client(8)
        await asyncio.sleep(0)
        assert not following.done()
        service.end_client(7)
        await following
        assert [int(one) for one in got[:-1]] == list(range(1, 200))
        assert b'"sequence_number":200' in got[-1]

    asyncio.run(main())


@pytest.mark.parametrize("is_response", [True, False])
def test_what_a_response_made_counts_for_what_comes_before_the_next(is_response: bool) -> None:
    async def main() -> None:
        service = StoreService()
        entry: Entry = StoredConversation(owner="a", id="x", body=b"{}")
        if is_response:
            entry = response("a", "x")
        await service.add(0, entry)
        half = bytes(MAX_CONTEXT_BYTES // 2 - 1000)
        output = [("i1", half), ("i2", half)]
        if is_response:
            service.finish(0, "a", "x", b"{}", output)
        else:
            await service.add_items(0, "a", "x", output)
        fits = await service.context(0, "a", "x", is_response)
        assert fits is not None
        assert [*unpack(fits.items or b"\x90"), *fits.output] == output
        entry.num_bytes += 2000
        if isinstance(entry, StoredResponse):
            entry.output += [("i3", bytes(2001))]
        refused = await service.context(0, "a", "x", is_response)
        assert refused is not None
        assert "which are more than" in refused.problem

    asyncio.run(main())


def test_a_full_conversation_refuses_a_turn_when_it_begins_and_loses_none_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "MAX_CONVERSATION_ITEMS", 3)
    monkeypatch.setattr(store_module, "MAX_CONTEXT_BYTES", 4000)

    async def main() -> None:
        service = StoreService()
        for name, items in (("many", {"i1": b"", "i2": b""}), ("large", {"i1": bytes(1500)})):
            conversation = StoredConversation(owner="a", id=name, body=b"{}", items=items)
            await service.add(0, conversation)
            before, own = list(items), [("o1", bytes(500))] if name == "large" else []
            more = [("o1", b""), ("o2", bytes(1500))]
            begun = response("a", f"{name}-begun", conversation=name, own=own)
            await service.add(0, begun)
            with pytest.raises(RequestError, match="at most 3 items and 4000 bytes.*; send less, or store: false"):
                await service.add(0, response("a", f"{name}-refused", conversation=name, own=more))
            with pytest.raises(RequestError, match="at most 3 items and 4000 bytes"):
                await service.add_items(0, "a", name, more)
            service.finish(0, "a", begun.id, b"{}", more)
            assert list(conversation.items) == [*before, "o1", "o2"]
            with pytest.raises(RequestError):
                await service.add(0, response("a", f"{name}-next", conversation=name))
        with pytest.raises(RequestError):
            await service.add_items(0, "a", "large", [("i1", b"")])

    asyncio.run(main())


def test_what_nothing_happens_to_is_answered_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else calls of followers that have left would wait in the owner until the next event."""
    monkeypatch.setattr(service_module, "_WAIT_S", 0.0)

    async def main() -> None:
        service = StoreService()
        await service.add(0, response("a", "r"))
        assert await service.events(0, "a", "r", -1) == Events([], is_over=False)
        found = await service.response(0, "a", "r", True)
        assert found is not None
        assert found.is_running
        service.append(0, "a", "r", [b"1"])
        assert await service.events(0, "a", "r", -1) == Events([b"1"], is_over=False)

    asyncio.run(main())


def test_pages_of_items_follow_one_another_in_both_orders() -> None:
    items = {f"i{n}": b"%d" % n for n in range(7)}
    for is_ascending in (True, False):
        got: list[bytes] = []
        last_id = ""
        while True:
            page = page_of(items, "item", last_id, 3, is_ascending)
            got += page.data
            assert page.first_id is not None
            assert page.last_id is not None
            assert [items[page.first_id], items[page.last_id]] == [page.data[0], page.data[-1]]
            last_id = page.last_id
            if not page.has_more:
                break
        assert got == list(items.values())[:: 1 if is_ascending else -1]
    assert page_of({}, "item", "", 3, True) == Listed([], None, None, has_more=False)
    with pytest.raises(RequestError, match="after: there is no item 'x'"):
        page_of(items, "item", "x", 3, True)
