"""Stored responses and conversations over real sockets, with the openai package."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest

from pagoda.base.outputs import CompletionOutput, Logprob, RequestOutput
from pagoda.base.request_limits import RequestLimits
from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.clients.calls import OwnCalls, services_of
from pagoda.server.body_reader import parse_body
from pagoda.server.dialects.responses.bodies import ResponsesRequest
from pagoda.server.dialects.responses.dialect import ResponsesDialect
from pagoda.server.render import Rendered
from pagoda.server.request_state import RequestState
from pagoda.server.respond import RunningTurn
from pagoda.server.sending import EventStream
from pagoda.server.stored.run import StoredTurn
from pagoda.server.stored.service import StoreService
from pagoda.server.turn import Piece, TextDelta
from tests.server.live import FAKE_ENGINE, LiveServer, serving
from tests.server.random_turns import new_reader, turn_of
from tests.server.test_api_processes import api_pids, to_each

KEYS = ("--api-key", "one", "--api-key", "two")
ASKED: dict[str, Any] = {"model": "smollm2-135m", "input": "Once upon a time", "extra_body": {"seed": 1}}


def client_of(server: LiveServer, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Tests may kill its engine, or limit its steps for a while."""
    with serving(tmp_path_factory.mktemp("stored"), *FAKE_ENGINE, *KEYS, stepped=True) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return client_of(server)


def events_of(server: LiveServer, path: str, key: str = "one") -> list[str]:
    """The events of a stored response, each as it was sent."""
    with httpx.stream("GET", server.url + path, headers={"Authorization": f"Bearer {key}"}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        return answer.read().decode().split("\n\n")[:-1]


def wait_status(client: openai.OpenAI, id: str, *statuses: str) -> Any:
    until_s = time.monotonic() + 60
    while (response := client.responses.retrieve(id)).status not in statuses:
        assert response.status in ("queued", "in_progress"), response
        assert time.monotonic() < until_s, response
        time.sleep(0.02)
    return response


def test_a_stream_is_resumed_after_each_of_its_events(server: LiveServer, client: openai.OpenAI) -> None:
    asked: Any = {**ASKED, "max_output_tokens": 6, "background": True}
    sent: Any = [one.to_dict() for one in client.responses.create(**asked, stream=True)]
    id: str = sent[0]["response"]["id"]
    assert [one["sequence_number"] for one in sent] == list(range(len(sent)))
    for after in range(-1, len(sent) + 1):
        asked = {} if after < 0 else {"starting_after": after}
        got = [one.to_dict() for one in client.responses.retrieve(id, stream=True, **asked)]  # type: ignore[call-overload]
        assert got == sent[after + 1 :]
    assert client.responses.retrieve(id).to_dict() == sent[-1]["response"]


def test_background_work_goes_on_without_its_client_and_over_a_kill(server: LiveServer, client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED, max_output_tokens=40)
    with server.steps.held_after(5):
        response = client.responses.create(**ASKED, max_output_tokens=40, background=True)
        assert (response.status, response.background) == ("queued", True)
        wait_status(client, response.id, "in_progress")
        path = f"/v1/responses/{response.id}?stream=true"
        got: list[list[str]] = []
        following = threading.Thread(target=lambda: got.append(events_of(server, path)))
        following.start()
        server.kill_engine()
    ended = wait_status(client, response.id, "incomplete")
    assert ended.output_text == whole.output_text
    following.join(60)
    assert got == [events_of(server, path)]
    last = json.loads(got[0][-1].partition("\ndata: ")[2])
    assert last["type"] == "response.incomplete"  # by its max_output_tokens
    for after in (0, 3, len(got[0]) - 2):
        assert events_of(server, f"{path}&starting_after={after}") == got[0][after + 1 :]


def test_a_cancelled_response_keeps_what_it_had_made(server: LiveServer, client: openai.OpenAI) -> None:
    with server.steps.held_after(5):
        stream = client.responses.create(**ASKED, background=True, stream=True)
        id = next(iter(stream)).response.id  # type: ignore[union-attr]
        wait_status(client, id, "in_progress")
        with pytest.raises(openai.NotFoundError):
            client_of(server, "two").responses.cancel(id)
        cancelling: list[Any] = []
        thread = threading.Thread(target=lambda: cancelling.append(client.responses.cancel(id)))
        thread.start()
        thread.join(60)
    (cancelled,) = cancelling
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(id) == client.responses.cancel(id) == cancelled
    assert [one.type for one in stream][-1] == "response.incomplete"
    whole = client.responses.create(**ASKED, max_output_tokens=2)
    with pytest.raises(openai.BadRequestError, match="only a response in the background"):
        client.responses.cancel(whole.id)


def test_what_is_deleted_while_it_runs_is_gone(server: LiveServer, client: openai.OpenAI) -> None:
    with server.steps.held_after(5):
        response = client.responses.create(**ASKED, background=True)
        with client.responses.retrieve(response.id, stream=True) as stream:
            events = iter(stream)
            next(events)
            client.responses.delete(response.id)
            with pytest.raises(openai.APIError, match="not kept any more"):
                list(events)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(response.id)


def test_responses_follow_one_another(client: openai.OpenAI, server: LiveServer) -> None:
    first = client.responses.create(**ASKED, max_output_tokens=4, instructions="Be brief.")
    second = client.responses.create(**{**ASKED, "input": "Go on"}, max_output_tokens=4, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.instructions is None
    spelled = [
        {"role": "user", "content": "Once upon a time"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on"},
    ]
    same = client.responses.create(**{**ASKED, "input": spelled}, max_output_tokens=4, store=False)
    assert same.output_text == second.output_text
    assert same.usage is not None
    assert second.usage is not None
    assert same.usage.input_tokens == second.usage.input_tokens
    items = client.responses.input_items.list(second.id, order="asc", limit=2)
    pages = list(items)  # the package asks for each page
    assert [one.type for one in pages] == ["message"] * 3
    texts = [one.content[0].text for one in pages]  # type: ignore[union-attr]
    assert texts == ["Once upon a time", first.output_text, "Go on"]
    assert list(client.responses.input_items.list(second.id)) == pages[::-1]
    client.responses.delete(first.id)
    assert list(client.responses.input_items.list(second.id, order="asc")) == pages
    for call in (
        lambda: client.responses.create(**ASKED, previous_response_id=first.id),
        lambda: client.responses.create(**ASKED, previous_response_id=same.id),
        lambda: client_of(server, "two").responses.create(**ASKED, previous_response_id=second.id),
        lambda: client.responses.create(**ASKED, conversation=second.id),
        lambda: client.responses.create(**ASKED, conversation={"id": "conv_1"}),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            call()
        assert refused.value.body["param"] in ("previous_response_id", "conversation")  # type: ignore[index]


def test_a_conversation_has_the_items_of_its_turns(client: openai.OpenAI, server: LiveServer) -> None:
    begin: Any = [{"type": "message", "role": "user", "content": "My name is Ada."}]
    made = client.conversations.create(items=begin, metadata={"topic": "names"})
    assert client.conversations.retrieve(made.id) == made
    updated = client.conversations.update(made.id, metadata={"topic": "other"})
    assert (updated.id, updated.metadata) == (made.id, {"topic": "other"})
    turn = client.responses.create(**ASKED, max_output_tokens=4, conversation=made.id)
    assert turn.conversation is not None
    assert turn.conversation.id == made.id
    streamed = client.responses.create(**ASKED, max_output_tokens=4, conversation={"id": made.id}, stream=True)
    ended: Any = list(streamed)[-1]
    items = list(client.conversations.items.list(made.id, order="asc", limit=2))
    texts = [one.content[0].text for one in items]  # type: ignore[union-attr]
    story = "Once upon a time"
    assert texts == ["My name is Ada.", story, turn.output_text, story, ended.response.output[0].content[0].text]
    assert client.conversations.items.retrieve(items[1].id or "", conversation_id=made.id) == items[1]
    added: Any = client.conversations.items.create(made.id, items=[{"role": "user", "content": "More"}])
    assert added.first_id == added.last_id == added.data[0].id
    client.conversations.items.delete(added.last_id, conversation_id=made.id)
    assert list(client.conversations.items.list(made.id, order="asc")) == items
    refers: Any = {"type": "item_reference", "id": items[0].id}
    client.responses.create(**{**ASKED, "input": [refers]}, max_output_tokens=1, conversation=made.id)
    assert list(client.conversations.items.list(made.id, order="asc"))[: len(items)] == items
    with pytest.raises(openai.BadRequestError, match=r"items\[0\]: expected an item"):
        client.conversations.items.create(made.id, items=[refers])
    other = client_of(server, "two").conversations
    for call in (other.retrieve, other.delete, other.items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve("msg_1", conversation_id=made.id)
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ASKED, conversation=made.id)


def test_what_is_not_to_be_stored_is_not(server: LiveServer, client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED, max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)
    with pytest.raises(openai.BadRequestError, match="needs store: true"):
        client.responses.create(**ASKED, background=True, store=False)
    kept = client.responses.create(**ASKED, max_output_tokens=2)
    assert client.responses.retrieve(kept.id) == kept
    streamed: Any = list(client.responses.create(**ASKED, max_output_tokens=2, stream=True))[-1].response  # type: ignore[union-attr]
    assert client.responses.retrieve(streamed.id) == streamed
    for one in (kept, streamed):
        with pytest.raises(openai.BadRequestError, match="without `stream`"):
            list(client.responses.retrieve(one.id, stream=True))
    with pytest.raises(openai.NotFoundError):
        client_of(server, "two").responses.retrieve(kept.id)
    two = client.conversations.create().id
    with pytest.raises(openai.BadRequestError, match="send one of them"):
        client.responses.create(**ASKED, previous_response_id=kept.id, conversation=two)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=maybe", "stream"),
        ("?stream=true&starting_after=x", "starting_after"),
        ("?stream=true&starting_after=-2", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?limit=٣", "limit"),
        ("?stream=true&starting_after=٣", "starting_after"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=item_1", "after"),
    ],
)
def test_parameters_are_checked(server: LiveServer, client: openai.OpenAI, path: str, param: str) -> None:
    kept = client.responses.create(**ASKED, max_output_tokens=1)
    headers = {"Authorization": "Bearer one"}
    answer = httpx.get(f"{server.url}/v1/responses/{kept.id}{path}", headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_stream_whose_client_leaves_is_stored_as_cancelled(server: LiveServer, client: openai.OpenAI) -> None:
    with server.steps.held_after(5):
        with client.responses.create(**ASKED, stream=True) as stream:
            id = next(iter(stream)).response.id  # type: ignore[union-attr]
        wait_status(client, id, "cancelled")


def test_with_a_file_all_is_there_after_a_restart_and_drained_work_has_a_status(tmp_path: Path) -> None:
    kept = ("--responses-file", str(tmp_path / "kept"), "--server-timeouts.drain-timeout-s", "0.5")
    with serving(tmp_path, *FAKE_ENGINE, *KEYS, *kept, stepped=True) as server:
        client = client_of(server)
        done = client.responses.create(**ASKED, max_output_tokens=3)
        made = client.conversations.create(items=[{"role": "user", "content": "Hi"}])
        client.responses.create(**ASKED, max_output_tokens=3, conversation=made.id)
        items = list(client.conversations.items.list(made.id))
        server.steps.hold_after(5)
        aborted = client.responses.create(**ASKED, background=True)
        wait_status(client, aborted.id, "in_progress")
        server.process.terminate()
        server.wait_draining()
        assert server.process.wait(30) == 0
    with serving(tmp_path, *FAKE_ENGINE, *reversed_keys(), *kept) as server:
        client = client_of(server)
        assert client.responses.retrieve(done.id) == done
        assert list(client.conversations.items.list(made.id)) == items
        failed = client.responses.retrieve(aborted.id)
        assert failed.status in ("failed", "cancelled")
        with pytest.raises(openai.NotFoundError):
            client_of(server, "two").responses.retrieve(done.id)


def reversed_keys() -> tuple[str, ...]:
    return KEYS[2:] + KEYS[:2]


def test_any_process_answers_and_one_that_dies_leaves_failed_responses(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE_ENGINE, *KEYS, "--api-server-count", "2", stepped=True) as server:
        first, second = to_each(server, "one")
        with server.steps.held_after(5):
            asked = {"input": "Once", "background": True}
            (_, response), (_, other) = first.post("/v1/responses", asked), second.post("/v1/responses", asked)
            path = f"/v1/responses/{response['id']}"
            until_s = time.monotonic() + 30
            while second.get(path)[1]["status"] == "queued":
                assert time.monotonic() < until_s
                time.sleep(0.01)
            assert first.get(f"{path}/input_items")[1]["data"][0]["content"][0]["text"] == "Once"
            got: list[str] = []
            follower = to_each(server, "one")[1]
            following = threading.Thread(target=lambda: got.append(follower.get(f"{path}?stream=true")[1]))
            following.start()
            os.kill(api_pids(server)["api-1"], signal.SIGKILL)
            following.join(30)
        failed = second.get(path)[1]
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        events = [json.loads(one.partition("\ndata: ")[2]) for one in got[0].split("\n\n") if one]
        assert [one["sequence_number"] for one in events] == list(range(len(events)))
        assert (events[-1]["type"], events[-1]["response"]) == ("response.failed", failed)
        client = client_of(server)
        cancelled = client.responses.cancel(other["id"])  # in whichever process
        assert cancelled.status in ("cancelled", "incomplete")
        follow = client.responses.create(**ASKED, max_output_tokens=2, previous_response_id=other["id"])
        assert [one.type for one in client.responses.input_items.list(follow.id, order="asc")] == ["message"] * 3


def running_turn(body: bytes = b'{"input": "Hi"}') -> tuple[Any, list[bool]]:
    """A turn of a response that has not begun yet; what it appends to when it is closed."""
    asked = parse_body(body, ResponsesRequest, RequestLimits())
    model: Any = SimpleNamespace(names=("m",), default_sampling={})
    model.llm = SimpleNamespace(input_processor=SimpleNamespace(limits=SimpleNamespace(of_request=RequestLimits())))
    dialect = ResponsesDialect()
    answer = dialect.answer(asked, turn_of(dialect.request(asked, model)), cast("Any", None))
    closed: list[bool] = []
    generation: Any = SimpleNamespace(
        close=lambda: closed.append(True), request_id="r", num_output_tokens=0, num_reasoning_tokens=0, sampling=None
    )
    return RunningTurn(generation, [Rendered([1], SamplingParams(), new_reader)], answer, True), closed


def test_a_stream_that_never_began_is_stored_as_cancelled() -> None:
    """As of a client that has left before its first event."""
    running, closed = running_turn()

    async def main() -> None:
        stored = OwnCalls(services_of(StoreService()))
        turn = StoredTurn(stored, running)
        entry = turn.entry("a", [], [])
        await stored.ask(StoreService.add, entry)
        stream = EventStream(turn.frames(), turn.close, turn.framing)

        async def receive() -> dict[str, str]:
            return {"type": "http.disconnect"}

        async def send(message: object) -> None:
            await asyncio.Event().wait()

        await stream({"type": "http", "state": RequestState()}, receive, send)
        found = await stored.ask(StoreService.response, "a", entry.id, True)
        assert found is not None
        assert json.loads(found.body)["status"] == "cancelled"
        assert closed == [True]

    asyncio.run(main())


def test_a_call_that_is_cut_off_as_its_client_leaves_can_be_followed() -> None:
    """What is stored of it comes before every later turn of its conversation."""
    running, _ = running_turn()

    async def main() -> None:
        stored = OwnCalls(services_of(StoreService()))
        turn = StoredTurn(stored, running)
        entry = turn.entry("a", [], [])
        await stored.ask(StoreService.add, entry)
        reader = running._readers[0][0]
        output = CompletionOutput(0, '<tool_call>{"name": "f", "arguments": {"a": [1, "b', [1])
        running.answer.frames(Piece(0, RequestOutput("r"), output, reader.read(output)))
        turn.close()
        found = await stored.ask(StoreService.response, "a", entry.id, False)
        context = await stored.ask(StoreService.context, "a", entry.id, True)
        assert found is not None
        assert context is not None
        assert json.loads(found.body)["status"] == "cancelled"
        ((_, item),) = context.output
        assert json.loads(item).items() >= {"type": "function_call", "status": "incomplete"}.items()
        assert json.loads(json.loads(item)["arguments"]) == {"a": [1, "b"]}

    asyncio.run(main())


def test_log_probabilities_are_in_the_response_alone() -> None:
    running, _ = running_turn(b'{"input": "Hi", "top_logprobs": 1, "include": ["message.output_text.logprobs"]}')

    async def main() -> None:
        stored = OwnCalls(services_of(StoreService()))
        turn = StoredTurn(stored, running)
        entry = turn.entry("a", [], [])
        await stored.ask(StoreService.add, entry)
        output = CompletionOutput(0, "A", [1], logprobs=[{1: Logprob(-0.5, 1, "A")}])
        running.answer.frames(Piece(0, RequestOutput("r"), output, [TextDelta("A")]))
        turn.close()
        found = await stored.ask(StoreService.response, "a", entry.id, False)
        context = await stored.ask(StoreService.context, "a", entry.id, True)
        assert found is not None
        assert context is not None
        (whole,), ((_, item),) = json.loads(found.body)["output"], context.output
        (part,) = whole["content"]
        assert [one["token"] for one in part["logprobs"]] == ["A"]
        assert json.loads(item) == {**whole, "content": [{**part, "logprobs": []}]}

    asyncio.run(main())


def test_a_turn_gives_its_place_back_though_the_store_fails() -> None:
    running, closed = running_turn()
    turn = StoredTurn(OwnCalls({}), running)
    with pytest.raises(KeyError):
        turn.close()
    assert closed == [True]


def test_background_work_can_be_asked_for_and_cancelled_while_the_server_drains(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE_ENGINE, *KEYS, stepped=True) as server, server.steps.held_after(5):
        client = client_of(server)
        begun = client.responses.create(**ASKED, background=True)
        wait_status(client, begun.id, "in_progress")
        server.process.terminate()
        server.wait_draining()
        assert client.responses.retrieve(begun.id).status == "in_progress"
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            client.responses.create(**ASKED)
        cancelled: list[Any] = []
        thread = threading.Thread(target=lambda: cancelled.append(client.responses.cancel(begun.id)))
        thread.start()
        server.steps.release()
        thread.join(60)
        assert cancelled[0].status in ("cancelled", "incomplete")
        assert server.process.wait(30) == 0
