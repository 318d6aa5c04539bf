"""Items that are stored: those that the model got, and none that a later response could not read."""

import json
from typing import Any

import httpx
import pytest

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.server.body import Body
from pagoda.server.body_reader import parse_body
from pagoda.server.dialects.responses.bodies import ResponsesRequest
from pagoda.server.errors import ApiError
from pagoda.server.stored import service
from pagoda.server.stored.conversations import ConversationRequest, ItemsRequest
from tests.server.in_process import served
from tests.server.turn_apis import events_of

LIMITS = RequestLimits()
OTHER = [{"role": "user", "content": "other"}]


def texts(answer: httpx.Response) -> list[str]:
    return [part["text"] for one in answer.json()["data"] for part in one["content"]]


@pytest.mark.parametrize("other", [OTHER, [], "x", OTHER * 150])
def test_only_the_field_that_a_route_reads_is_stored(other: Any) -> None:
    async def test(http: httpx.AsyncClient) -> None:
        asked = {"input": "hello", "items": other, "stream": True}
        events = events_of((await http.post("/v1/responses", json=asked)).content)
        listed = await http.get(f"/v1/responses/{events[0]['response']['id']}/input_items")
        assert texts(listed) == ["hello"]
        made = (await http.post("/v1/conversations", json={"input": other})).json()["id"]
        path = f"/v1/conversations/{made}/items"
        assert texts(await http.get(path)) == []
        own = {"role": "user", "content": "own"}
        added = await http.post(path, json={"items": [own], "input": other})
        assert texts(added) == texts(await http.get(path)) == ["own"]

    served(test)


def test_what_is_too_large_to_be_continued_can_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_CONTEXT_BYTES", 10)

    async def test(http: httpx.AsyncClient) -> None:
        events = events_of((await http.post("/v1/responses", json={"input": "hello", "stream": True})).content)
        id = events[0]["response"]["id"]
        refused = await http.post("/v1/responses", json={"input": "more", "previous_response_id": id})
        assert (refused.status_code, "more than 10" in refused.text) == (400, True)
        assert texts(await http.get(f"/v1/responses/{id}/input_items")) == ["hello"]

    served(test)


USER = {"role": "user", "content": "a"}
UNREADABLE: list[tuple[dict[str, Any], str]] = [
    ({"type": "foo"}, ""),
    ({"role": "user", "content": [{"type": "input_file"}]}, ".content[0]"),
    ({"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}, ".content"),
    ({"role": "king", "content": "x"}, ".role"),
    ({"type": "function_call", "name": "f"}, ""),
    ({"type": "function_call", "name": "f", "arguments": '{"a": '}, ".arguments"),
    ({"type": "custom_tool_call", "input": "x"}, ""),
    ({"type": "function_call_output", "call_id": "x" * 257, "output": "x"}, ""),
    ({"type": "function_call_output", "call_id": "x", "output": [{"type": "audio"}]}, ".output[0]"),
    ({"type": "item_reference", "id": "msg_1"}, ""),
]


@pytest.mark.parametrize(("item", "place"), UNREADABLE)
@pytest.mark.parametrize("kind", [ConversationRequest, ItemsRequest])
def test_items_that_no_response_could_read_are_refused_by_their_place(
    kind: type[Body], item: dict[str, Any], place: str
) -> None:
    with pytest.raises((RequestError, ApiError), match=r"^items\[1\]") as refused:
        parse_body(json.dumps({"items": [USER, item]}).encode(), kind, LIMITS)
    assert refused.value.param == f"items[1]{place}"


@pytest.mark.parametrize(
    ("kind", "name"), [(ConversationRequest, "items"), (ItemsRequest, "items"), (ResponsesRequest, "input")]
)
def test_two_items_of_a_request_have_not_the_same_id(kind: type[Body], name: str) -> None:
    def parse(*ids: str | None) -> None:
        parse_body(json.dumps({name: [{**USER, "id": one} for one in ids]}).encode(), kind, LIMITS)

    parse("msg_1", "msg_2", None, None, "", "")
    with pytest.raises(RequestError, match=rf"^{name}\[2\]\.id: 'msg_1' is the id of {name}\[0\], too"):
        parse("msg_1", "msg_2", "msg_1")
