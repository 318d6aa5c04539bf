"""OpenAI's Responses: the openai package, the order of events, and how items reach the template."""

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pagoda.base.outputs import CompletionOutput, Logprob, RequestOutput
from pagoda.base.request_limits import RequestLimits
from pagoda.server.body_reader import parse_body
from pagoda.server.dialects.responses import ResponsesDialect
from pagoda.server.dialects.responses_bodies import InputItem, ResponsesRequest
from pagoda.server.dialects.responses_input import conversation_of
from pagoda.server.errors import ApiError
from pagoda.server.turn import Piece, TextDelta
from tests.server.live import LiveServer
from tests.server.random_turns import Events, events_of, random_text, random_turn, turn_of
from tests.server.test_tools import THINKING, scripted_server

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with scripted_server(tmp_path_factory.mktemp("responses"), THINKING) as server:
        yield server


@pytest.fixture
def client(thinking: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0)


def both(client: openai.OpenAI, seed: int, **more: Any) -> list[dict[str, Any]]:
    """The answer of a script, whole and streamed, without what differs from answer to answer."""
    asked: dict[str, Any] = {"model": "smollm2-135m", "input": "Hi", "extra_body": {"seed": seed}, **more}
    whole = client.responses.create(**asked)
    events: list[Any] = list(client.responses.create(**asked, stream=True))
    for one in events:
        EVENT.validate_python(one.to_dict())
    shown: list[dict[str, Any]] = []
    for response in (whole, events[-1].response):
        given: Any = response.to_dict(mode="json")
        Response.model_validate(given)
        for item in (given, *given["output"]):
            for name in ("id", "call_id", "created_at", "completed_at"):
                item.pop(name, None)
        given["usage"].pop("input_tokens_details")
        shown.append(given)
    return shown


def test_the_openai_package_sees_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    more: dict[str, Any]
    for seed, more in ((2, {}), (2, {"reasoning": {"summary": "auto"}}), (3, {}), (3, {"max_output_tokens": 4})):
        whole, streamed = both(client, seed, **more)
        assert whole == streamed
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["usage"]["output_tokens"] == 4
    thought, message = both(client, 2)[0]["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Where? 2 < 3, so Zürich.\n"}]
    assert message["type"] == "message"
    (thought, _) = both(client, 2, reasoning={"summary": "auto"})[0]["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "Where? 2 < 3, so Zürich.\n"}]


def test_errors_name_the_callers_own_field_and_have_codes_for_agents(client: openai.OpenAI) -> None:
    refused: dict[str, tuple[int, str | None, str | None]] = {
        "model": (404, "model", "model_not_found"),
        "previous_response_id": (400, "previous_response_id", None),
        "conversation": (400, "conversation", None),
        "background": (400, "background", None),
        "max_output_tokens": (400, "max_output_tokens", None),
        "top_logprobs": (400, "top_logprobs", None),
    }
    values: dict[str, Any] = {"background": True, "max_output_tokens": 10**6, "top_logprobs": 900}
    asked: dict[str, Any] = {name: {name: values.get(name, "x")} for name in refused}
    asked |= {"long": {"input": "a " * 5000}, "role": {"input": [{"role": "x", "content": "a"}]}}
    refused |= {"long": (400, "input", "context_length_exceeded"), "role": (400, "input[0].role", None)}
    asked |= {"part": {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}}
    refused |= {"part": (400, "input[0].content[0]", None)}
    asked |= {"image": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}}
    refused |= {"image": (400, "input[0]", None)}
    for name, (status, param, code) in refused.items():
        with pytest.raises(openai.APIStatusError) as caught:
            client.responses.create(**{"model": "smollm2-135m", "input": "Hi", **asked[name]})
        error: Any = caught.value
        assert (error.status_code, error.param, error.code) == (status, param, code), (name, error.message)


# ---- how items reach the template


def body_of(**fields: Any) -> ResponsesRequest:
    return parse_body(msgspec.json.encode({"input": "Hi", **fields}), ResponsesRequest, RequestLimits())


def messages_of(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return conversation_of(body_of(input=list(items), **fields), ())[0].messages


def test_instructions_and_what_developers_say_first_are_one_system_message() -> None:
    turns = messages_of(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Use tools."}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes?", "annotations": []}]},
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "Go on"},
        instructions="You help.",
    )
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
    assert turns[0]["content"] == "You help.\n\nUse tools."
    assert "".join(part["text"] for part in turns[3]["content"]) == "<system>\nBe short.\n</system>\nGo on"


def test_earlier_items_come_before_the_bodys_own() -> None:
    earlier = [InputItem(role="user", content="A"), InputItem(role="assistant", content="B")]
    made = conversation_of(body_of(input="C", instructions="S"), earlier)[0].messages
    assert [one["content"] for one in made] == ["S", "A", "B", "C"]


def test_an_empty_input_is_an_empty_message() -> None:
    for empty in ("", []):
        assert conversation_of(body_of(input=empty), ())[0].messages == [{"role": "user", "content": ""}]


# ---- the order of events

PARTS = {"output_text": "response.output_text", "reasoning_text": "response.reasoning_text"}


def checked(events: Events) -> dict[str, Any]:
    """The response that events make; fails if they are not in their order, or if two items are open."""
    created, in_progress, *inner, last = events
    assert [one["type"] for one in (created, in_progress)] == ["response.created", "response.in_progress"]
    assert created["response"] == in_progress["response"]
    assert created["response"]["output"] == []
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    for one in events:
        EVENT.validate_python(one)
    items: list[dict[str, Any]] = []
    rest = iter(inner)
    for added in rest:
        items.append(checked_item(added, rest, len(items)))
    assert items == last["response"]["output"]
    assert len({item["id"] for item in items}) == len(items)
    assert last["type"] == f"response.{'completed' if last['response']['status'] == 'completed' else 'incomplete'}"
    return last["response"]


def checked_item(added: dict[str, Any], rest: Iterator[dict[str, Any]], number: int) -> dict[str, Any]:
    """The item whose events begin with `added`."""
    assert (added["type"], added["output_index"]) == ("response.output_item.added", number)
    item = added["item"]
    place = {"item_id": item["id"], "output_index": number}
    index, event, whole = {
        "message": ("content_index", "response.output_text", "text"),
        "reasoning": ("content_index", "response.reasoning_text", "text"),
        "function_call": ("", "response.function_call_arguments", "arguments"),
    }[item["type"]]
    if index:
        place[index] = 0
        part = next(rest)
        assert part.items() >= {"type": "response.content_part.added", **place}.items()
    said = ""
    for one in rest:
        assert one.items() >= place.items()
        if one["type"] != f"{event}.delta":
            break
        said += one["delta"]
    assert (one["type"], one[whole]) == (f"{event}.done", said)
    if index:
        part = next(rest)
        assert part.items() >= {"type": "response.content_part.done", **place}.items()
        assert part["part"]["text"] == said
        item["content"] = [part["part"]]
    else:
        item[whole] = said
    done = next(rest)
    assert done.items() >= {"type": "response.output_item.done", "output_index": number}.items()
    item["status"] = done["item"]["status"]
    assert done["item"] == item
    return item


def new_answer(body: ResponsesRequest) -> Any:
    dialect = ResponsesDialect()
    model: Any = type("Model", (), {"default_sampling": {}, "llm": fake_llm()})
    turn = turn_of(dialect.request(body, model))
    turn.id = "resp_1"
    return dialect.answer(body, turn, turn)


def fake_llm() -> Any:
    limits = type("Limits", (), {"of_request": RequestLimits()})
    return type("LLM", (), {"input_processor": type("Inputs", (), {"limits": limits})})


def test_events_of_random_turns_are_in_their_order_and_make_the_whole_answer() -> None:
    dice = random.Random(7)
    kinds: set[str] = set()
    body = body_of()
    for number in range(200):
        text = random_text(dice)
        reason, events, whole = random_turn(dice, lambda: new_answer(body), text)
        made = checked(events)
        Response.model_validate(whole)
        assert whole["status"] == {"stop": "completed", "length": "incomplete", "abort": "cancelled"}[reason]
        for one in (made, whole):
            one.pop("completed_at")
            for item in one["output"]:
                item.pop("call_id", None)
        assert whole == made, (number, text)
        kinds |= {one["type"] for one in made["output"]}
    assert kinds == {"message", "reasoning", "function_call"}


def test_a_turn_without_any_output_has_a_beginning_and_an_end() -> None:
    answer = new_answer(body_of())
    assert checked(events_of(answer.opening() + answer.closing()))["output"] == []


def test_a_failure_during_a_stream_is_the_last_event() -> None:
    for error, code in ((ApiError(503, "gone", None, 5), "server_error"), (ApiError(400, "no"), "invalid_prompt")):
        answer = new_answer(body_of())
        begun = events_of(answer.opening())
        (failed,) = events_of(answer.framing.error(error, "r"))
        assert failed["sequence_number"] == len(begun)
        EVENT.validate_python(failed)
        response = failed["response"]
        assert (response["status"], response["error"]["code"]) == ("failed", code)
        assert ("try again in 5s" in response["error"]["message"]) == (error.status == 503)


def test_log_probabilities_come_with_the_text_and_with_the_whole() -> None:
    first = {1: Logprob(-0.5, 1, "A"), 2: Logprob(-1.5, 2, "B")}
    second = {3: Logprob(-0.25, 1, "C"), 4: Logprob(-1.0, 2, "D")}
    body = body_of(top_logprobs=2)

    def said(text: str, token_id: int, logprobs: dict[int, Logprob]) -> Piece:
        output = CompletionOutput(0, text, [token_id], logprobs=[logprobs])
        return Piece(0, RequestOutput("r"), output, [TextDelta(text)])

    pieces = [said("A", 1, first), said("C", 3, second)]
    answer = new_answer(body)
    events = events_of(answer.opening() + b"".join(map(answer.frames, pieces)) + answer.closing())
    content = checked(events)["output"][0]["content"][0]
    assert [(one["token"], len(one["top_logprobs"])) for one in content["logprobs"]] == [("A", 2), ("C", 2)]
    deltas = [one["logprobs"] for one in events if one["type"] == "response.output_text.delta"]
    assert deltas == [[one] for one in content["logprobs"]]
    (item,) = new_answer(body).whole(pieces).output
    assert msgspec.to_builtins(item.content[0].logprobs) == content["logprobs"]
