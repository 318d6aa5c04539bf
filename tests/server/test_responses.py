"""OpenAI's Responses: the openai package, the order of events, and how items reach the template."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pagoda.base.errors import RequestError
from pagoda.base.outputs import CompletionOutput, Logprob, RequestOutput
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.answers.reasoning import ReasoningSplitter
from pagoda.server.body_reader import parse_body
from pagoda.server.conversation import Conversation
from pagoda.server.dialects.responses import input as responses_input
from pagoda.server.dialects.responses.bodies import InputItem, ResponsesRequest
from pagoda.server.dialects.responses.dialect import ResponsesDialect
from pagoda.server.dialects.responses.tools import CustomInput, ResponsesTools
from pagoda.server.errors import ApiError
from pagoda.server.reader import Reader
from pagoda.server.turn import Piece, ReasoningDelta, TextDelta
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


def test_the_tokens_of_a_prompt_are_counted_as_the_answer_counts_them(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
    asked: dict[str, Any] = {"model": "smollm2-135m", "instructions": "Be short.", "tools": [tool]}
    first = client.responses.create(**asked, input="Hi")
    for more in ({"input": "Hi"}, {"input": "And now?", "previous_response_id": first.id}):
        counted = client.responses.input_tokens.count(**asked, **more)
        usage = client.responses.create(**asked, **more).usage
        assert usage is not None
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", usage.input_tokens)


def test_what_is_given_in_place_of_the_input_is_refused_rather_than_that_there_is_none(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt: this server does not support stored prompts"):
        client.responses.create(model="smollm2-135m", prompt={"id": "pmpt_1"})
    with pytest.raises(openai.BadRequestError, match="input: is required"):
        client.responses.create(model="smollm2-135m")


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
        "previous_response_id": (404, "previous_response_id", "previous_response_not_found"),
        "conversation": (404, "conversation", None),
        "store": (400, "background", None),
        "max_output_tokens": (400, "max_output_tokens", None),
        "top_logprobs": (400, "top_logprobs", None),
    }
    values: dict[str, Any] = {"max_output_tokens": 10**6, "top_logprobs": 900}
    asked: dict[str, Any] = {name: {name: values.get(name, "x")} for name in refused}
    asked["store"] = {"store": False, "background": True}
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


def test_a_prompt_that_is_too_long_for_a_stream_is_an_event_that_codex_understands(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="smollm2-135m", input="a " * 5000, stream=True))
    assert [one.type for one in events] == ["response.created", "response.in_progress", "response.failed"]
    failed: Any = events[-1]
    assert failed.response.error.code == "context_length_exceeded"


# ---- how items reach the template


def body_of(**fields: Any) -> ResponsesRequest:
    return parse_body(msgspec.json.encode({"input": "Hi", **fields}), ResponsesRequest, RequestLimits())


def conversation_of(body: ResponsesRequest, earlier: Sequence[InputItem] = ()) -> Conversation:
    return responses_input.conversation_of(body, ResponsesTools(body.tools or ()), earlier)[0]


def messages_of(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return conversation_of(body_of(input=list(items), **fields)).messages


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
    made = conversation_of(body_of(input="C", instructions="S"), earlier).messages
    assert [one["content"] for one in made] == ["S", "A", "B", "C"]


def test_an_empty_input_is_an_empty_message() -> None:
    for empty in ("", []):
        assert conversation_of(body_of(input=empty)).messages == [{"role": "user", "content": ""}]


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def test_items_of_the_assistant_are_one_message_and_results_follow_with_their_images() -> None:
    image = item("input_image", image_url="data:image/png;base64,AAAA")
    turns = messages_of(
        item("message", role="user", content="Hi"),
        item("reasoning", id="rs_1", summary=[], content=[item("reasoning_text", text="Hm")], encrypted_content="x"),
        item("message", role="assistant", content=[item("output_text", text="Wait.")]),
        item("function_call", call_id="a", name="look", namespace="eyes", arguments='{"x": 1}', status="completed"),
        item("custom_tool_call", call_id="b", name="patch", input='ü\n"'),
        item("web_search_call", id="ws_1", status="completed"),
        item("function_call_output", call_id="a", output=[item("input_text", text="seen"), image]),
        item("custom_tool_call_output", call_id="b", output="done"),
        item("message", role="user", content="And now?"),
        tools=TOOLS,
    )
    calls = [
        {"id": "a", "type": "function", "function": {"name": "eyes__look", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "patch", "arguments": '{"input": "ü\\n\\""}'}},
    ]
    assert turns == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "seen"},
        {"role": "tool", "tool_call_id": "b", "content": "done"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]


def test_items_that_are_referred_to_are_among_the_earlier_ones_or_an_error() -> None:
    earlier = [InputItem(id="msg_1", role="user", content="A"), InputItem(role="assistant", content="B")]
    for reference in ({"id": "msg_1"}, item("item_reference", id="msg_1")):
        made = conversation_of(body_of(input=[reference, {"role": "user", "content": "C"}]), earlier).messages
        assert [one["content"] for one in made] == ["A", "B", "C"]  # each once
        with pytest.raises(ApiError, match=r"input\[0\].id: there is no item 'msg_1'") as caught:
            conversation_of(body_of(input=[reference]))
        assert caught.value.status == 404


def test_an_error_in_an_earlier_item_names_its_id() -> None:
    for name, field in (("previous_response_id", "resp_1"), ("conversation", "conv_1")):
        with pytest.raises(RequestError, match=rf"^{name}\[x_1\]: ") as caught:
            conversation_of(body_of(**{name: field}), [InputItem(id="x_1", type="foo")])
        assert caught.value.param == f"{name}[x_1]"


# ---- tools

TOOLS: list[dict[str, Any]] = [
    item("web_search"),
    item("function", name="f", parameters={"type": "object"}, strict=False),
    item("custom", name="patch", description="Edits.", format=item("text")),
    item("namespace", name="eyes", description="See.", tools=[item("function", name="look"), item("custom", name="c")]),
    item("code_interpreter", container="auto"),
]


def test_each_tool_is_a_function_of_the_template_and_hosted_ones_are_left_out() -> None:
    functions = [one["function"] for one in conversation_of(body_of(tools=TOOLS)).tools]
    assert [one["name"] for one in functions] == ["f", "patch", "eyes__look", "eyes__c"]
    assert functions[1]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert functions[1]["description"].startswith("Edits.")
    assert functions[2]["description"] == "See."
    long = item("namespace", name="n" * 64, tools=[item("function", name="f" * 60)])
    (one,) = conversation_of(body_of(tools=[long])).tools
    assert one["function"]["name"] == "nn__" + "f" * 60


def test_a_tool_choice_says_which_tools_there_are_and_which_must_be_called() -> None:
    def use(choice: Any, tools: Any = TOOLS) -> tuple[list[str], bool, str | None]:
        made = conversation_of(body_of(tools=tools, tool_choice=choice))
        return [one["function"]["name"] for one in made.tools], made.is_forced, made.only_tool

    every = ["f", "patch", "eyes__look", "eyes__c"]
    assert use("auto") == use(None) == (every, False, None)
    assert use("none") == ([], False, None)
    assert use("auto", []) == ([], False, None)
    assert use("required") == (every, True, None)
    assert use(item("function", name="f")) == (every, True, "f")
    assert use(item("custom", name="patch")) == (every, True, "patch")
    for name in ({"name": "look", "namespace": "eyes"}, {"name": "eyes__look"}):
        assert use(item("function", **name)) == (every, True, "eyes__look")
    allowed = item("allowed_tools", mode="required", tools=[item("function", name="f"), item("file_search")])
    assert use(allowed) == (["f"], True, None)
    with pytest.raises(RequestError, match="tool_choice.name: there is no tool 'look'"):
        use(item("function", name="look"))
    with pytest.raises(RequestError, match="tool_choice: needs tools"):
        use("required", [item("web_search")])
    assert not conversation_of(body_of(tools=TOOLS, parallel_tool_calls=False)).is_parallel


NEEDED = (
    "id object created_at completed_at status incomplete_details model previous_response_id instructions output "
    "error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty "
    "top_logprobs temperature reasoning user usage max_output_tokens max_tool_calls store background service_tier "
    "metadata safety_identifier prompt_cache_key"
)
"""The fields that the Open Responses specification wants of every response."""


def test_an_answer_has_all_fields_and_says_what_was_asked_for() -> None:
    def answered(**fields: Any) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(msgspec.json.encode(new_answer(body_of(**fields)).whole([])))
        Response.model_validate(answer)
        return answer

    plain = answered()
    assert [name for name in NEEDED.split() if name not in plain] == []
    assert (plain["text"], plain["tool_choice"], plain["metadata"]) == ({"format": {"type": "text"}}, "auto", {})
    asked: dict[str, Any] = {
        "instructions": "Be short.",
        "max_tool_calls": 3,
        "presence_penalty": 0.5,
        "metadata": {"a": "b"},
        "user": "u",
        "parallel_tool_calls": False,
        "tool_choice": item("custom", name="patch"),
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
    }
    answer = answered(tools=TOOLS, **asked)
    assert {name: answer[name] for name in asked} == asked
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False, "description": None}
    assert answer["tools"][0] == function
    assert [one["type"] for one in answer["tools"]] == ["function", "custom", "namespace"]
    allowed = item("allowed_tools", mode="auto", tools=[item("function", name="f")])
    assert answered(tools=TOOLS, tool_choice=allowed)["tool_choice"] == allowed


def test_tools_that_cannot_be_served_are_refused_by_name() -> None:
    for place, tool in {
        r"tools\[0\]: this server does not run MCP servers": item("mcp", server_label="x"),
        r"tools\[0\].name: is required": item("function"),
        r"tools\[0\].tools\[0\]: expected type function or custom": item("namespace", tools=[item("mcp")]),
        r"tools\[0\].format.definition: this grammar cannot be enforced: there is no rule 'x'": item(
            "custom", name="c", format=item("grammar", syntax="lark", definition="start: x")
        ),
        r"tools\[0\].format: expected type text, or grammar": item("custom", name="c", format=item("other")),
    }.items():
        with pytest.raises(RequestError, match=place):
            conversation_of(body_of(tools=[tool]))
    twice = [item("function", name="f"), item("custom", name="f")]
    with pytest.raises(RequestError, match=r"tools\[1\].name: 'f' is the name of another tool, too"):
        conversation_of(body_of(tools=twice))


SIGNED = (
    r'start: LF? line~1..3 "*** End"' + "\n" + r'line: ("+" | "-") /["\\\\a-c\u00fc]{1,4}/ LF' + "\n%import common.LF"
)


def test_the_input_of_a_custom_tool_follows_its_grammar_while_it_is_sampled(fake_server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0)
    inputs: set[str] = set()
    for syntax, definition, expression in (
        ("lark", SIGNED, r'\n?([+-]["\\a-cü]{1,4}\n){1,3}\*\*\* End'),
        ("regex", '[A-F]{3}-"[0-9]{2}"', '[A-F]{3}-"[0-9]{2}"'),
        ("lark", 'start: "<" start? ">"\n%ignore "\\n"', r"\s*(?:<\s*)+(?:>\s*)+"),  # a rule that contains itself
    ):
        form = item("grammar", syntax=syntax, definition=definition)
        asked: dict[str, Any] = {"tools": [item("custom", name="c", format=form)], "max_output_tokens": 300}
        for seed in range(3):
            whole, streamed = both(client, seed, **asked, tool_choice=item("custom", name="c"))
            assert whole == streamed
            (call,) = whole["output"]
            assert call.items() >= {"type": "custom_tool_call", "name": "c"}.items()
            assert re.fullmatch(expression, call["input"]), call["input"]
            assert call["input"].count("<") == call["input"].count(">")
            inputs.add(call["input"])
    assert len(inputs) > 4


def test_errors_in_schemas_and_expressions_name_the_tool(fake_server: LiveServer) -> None:
    strict = {"properties": {"a": {"uniqueItems": True}}}
    lookahead = item("grammar", syntax="regex", definition="(?=a)b")
    for tool, place in (
        (item("custom", name="c", format=lookahead), "tools"),  # found when the grammar of all of them is compiled
        (item("function", name="f", strict=True, parameters=strict), "tools[1].parameters"),
        (
            item("namespace", name="n", tools=[item("function", name="f", strict=True, parameters=strict)]),
            "tools[1].tools[0].parameters",
        ),
    ):
        asked = {"input": "Hi", "tools": [item("web_search"), tool], "max_output_tokens": 9}
        status, answer = fake_server.post("/v1/responses", asked)
        assert (status, answer["error"]["param"]) == (400, place), answer
        assert answer["error"]["message"].startswith(place)


def test_the_input_of_a_custom_tool_comes_out_of_its_arguments_in_whole_characters() -> None:
    dice = random.Random(3)
    for text in ("", "plain", 'a "b" \\ \n\t ü \U0001f600 </x>', "\x00\ud7ff"):
        for ascii_only in (True, False):
            arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
            for _ in range(20):
                reader, said, at = CustomInput(), "", 0
                while at < len(arguments):
                    size = dice.randrange(1, 8)
                    said += reader.feed(arguments[at : at + size])
                    said.encode()
                    at += size
                assert said + reader.end() == text
    for given, expected in (('{"patch": "x"}', "x"), ('{"a": 1}', '{"a": 1}'), ('{"inp', '{"inp'), ("[", "[")):
        reader = CustomInput()
        assert reader.feed(given) + reader.end() == expected
    halves = (r"\ud83d", r"\ude00", "b", r"\n", r"\u0041", r"\\", r"\"", "\U0001f600")
    for _ in range(300):  # half a pair is no character; what follows it is not lost
        arguments = '{"input": "' + "".join(dice.choices(halves, k=6)) + '"}'
        whole = json.loads(arguments)["input"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        reader = CustomInput()
        said = "".join(reader.feed(char) for char in arguments) + reader.end()
        said.encode()
        assert (said, CustomInput().feed(arguments)) == (whole, whole)


# ---- the order of events


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
        "custom_tool_call": ("", "response.custom_tool_call_input", "input"),
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
    limits = SimpleNamespace(of_request=RequestLimits())
    llm = SimpleNamespace(input_processor=SimpleNamespace(limits=limits))
    model: Any = SimpleNamespace(default_sampling={}, names=("m",), llm=llm)
    dialect = ResponsesDialect()
    turn = turn_of(dialect.request(body, model))
    return dialect.answer(body, turn, turn)


def test_events_of_random_turns_are_in_their_order_and_make_the_whole_answer() -> None:
    dice = random.Random(7)
    kinds: set[str] = set()
    calls: list[dict[str, Any]] = []
    body = body_of(tools=TOOLS)
    for number in range(200):
        text = random_text(dice, ("f", "patch", "eyes__look", "eyes__c"))
        reason, events, whole = random_turn(dice, lambda: new_answer(body), text)
        made = checked(events)
        Response.model_validate(whole)
        assert whole["status"] == {"stop": "completed", "length": "incomplete", "abort": "cancelled"}[reason]
        for response in (made, whole):
            for one in (response, *response["output"]):
                for name in ("id", "call_id", "created_at", "completed_at"):
                    one.pop(name, None)
        assert whole == made, (number, text)
        kinds |= {one["type"] for one in made["output"]}
        calls += [one for one in made["output"] if "name" in one]
    assert kinds == {"message", "reasoning", "function_call", "custom_tool_call"}
    named = {(one["type"], one["name"], one.get("namespace")) for one in calls}
    assert named == {
        ("function_call", "f", None),
        ("custom_tool_call", "patch", None),
        ("function_call", "look", "eyes"),
        ("custom_tool_call", "c", "eyes"),
    }


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
    assert json.loads(msgspec.json.encode(item.content[0].logprobs)) == content["logprobs"]
    # A token's text may come with a later one: the rest of a character, or what shows that no stop string begins.
    answer = new_answer(body)
    late = [said("", 1, first), said("AC", 3, second), said("", 1, first)]
    for piece in late[::2]:
        piece.events.clear()
    content = checked(events_of(answer.opening() + b"".join(map(answer.frames, late)) + answer.closing()))
    part = content["output"][0]["content"][0]
    assert [one["token"] for one in part["logprobs"]] == ["A", "C", "A"]
    # So may what begins a thought.
    reader = Reader(None, ReasoningSplitter(), lambda token_id: texts[token_id].encode())
    answer, texts, known = new_answer(body), ["<think>", "C", "</think>", "A"], 0
    told = answer.opening()
    for token_id, text in enumerate(texts):
        output = CompletionOutput(0, text, [token_id], logprobs=[{token_id: Logprob(-0.5, 1, text)}])
        piece = Piece(0, RequestOutput("r"), output, reader.read(output), reader.num_reasoning_tokens - known)
        known += piece.num_reasoning_tokens
        told += answer.frames(piece)
    content = checked(events_of(told + answer.closing()))
    assert [one["token"] for one in content["output"][1]["content"][0]["logprobs"]] == ["A"]
    thought = CompletionOutput(0, "AC", [1, 3], logprobs=[first, second])
    events_of_both = [ReasoningDelta("A"), TextDelta("C")]
    _, item = new_answer(body).whole([Piece(0, RequestOutput("r"), thought, events_of_both, 1)]).output
    assert [json.loads(bytes(one))["token"] for one in item.content[0].logprobs] == ["C"]
