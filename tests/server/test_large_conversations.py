"""What conversations of very many entries cost before a model sees them: they are counted first, and read once.

Lines that run are counted, and the time of the CPU only where one step in C would copy all that came before.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import msgspec
import pytest

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.server.body import Body
from pagoda.server.dialects.messages.bodies import Conversion, MessagesRequest
from pagoda.server.dialects.ollama.bodies import OllamaMessage, template_messages
from pagoda.server.dialects.responses.bodies import InputItem, ResponsesRequest
from pagoda.server.dialects.responses.input import conversation_of
from pagoda.server.dialects.responses.tools import ResponsesTool, ResponsesToolChoice, ResponsesTools, chosen
from tests.server.turn_apis import BODIES, Turn, asked

LIMITS = RequestLimits()
USER = {"role": "user", "content": "a"}
MESSAGES = {"messages": USER, "input": USER}
COUNTED = {*MESSAGES, "tools"}
TOOL = {"type": "function", "name": "f", "function": {"name": "f"}, "input_schema": {}}


def num_lines(work: Callable[[], object]) -> int:
    """Return how many lines of Python run."""
    count = 0

    def line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return line

    former = sys.gettrace()
    sys.settrace(line)
    try:
        work()
    finally:
        sys.settrace(former)
    return count


def too_many(path: str, num: int) -> Iterable[tuple[str, bytes]]:
    """Yield bodies of more messages, items or tools than a route allows, each with the field's name."""
    kind = BODIES[path]
    body = asked(path, Turn("Hi", 1))
    for name in COUNTED & set(kind.__struct_fields__):
        entries: list[Any] = [MESSAGES.get(name, TOOL)] * num
        is_batch = kind.__name__ == "BatchChatRequest"
        if is_batch and name == "tools":
            continue  # none are served
        yield name, json.dumps({**body, name: [entries] if is_batch else entries}).encode()


def refuse(body: Body) -> None:
    with pytest.raises(RequestError, match=r"more than the limit of \d+ \((messages|tools)\)"):
        body.check(LIMITS)


@pytest.mark.parametrize("path", [path for path, kind in BODIES.items() if COUNTED & set(kind.__struct_fields__)])
def test_too_many_messages_or_tools_are_refused_by_their_number_before_any_is_read(path: str) -> None:
    kind = BODIES[path]
    for (name, few), (_, many) in zip(too_many(path, 5_000), too_many(path, 40_000), strict=True):
        bodies = [msgspec.json.decode(data, type=kind, strict=False) for data in (few, many)]
        refuse(bodies[0])  # once, so that nothing is made for the first time below
        lines = [num_lines(lambda body=body: refuse(body)) for body in bodies]
        assert lines[1] <= lines[0] + 100, name


def of_items(*items: Mapping[str, Any], tools: int = 0) -> Callable[[int], Callable[[], object]]:
    def work(size: int) -> Callable[[], object]:
        made = ResponsesTools([ResponsesTool("function", f"tool{at}") for at in range(size if tools else 0)])
        earlier = [msgspec.convert(one, InputItem) for one in items] * (size // len(items))
        return lambda: conversation_of(ResponsesRequest(input="Hi"), made, earlier)

    return work


def of_messages(*messages: Mapping[str, Any]) -> Callable[[int], Callable[[], object]]:
    def work(size: int) -> Callable[[], object]:
        fields = {"messages": list(messages) * (size // len(messages)), "max_tokens": 1}
        body = msgspec.convert(fields, MessagesRequest)
        return lambda: Conversion(body)

    return work


def of_allowed_tools(size: int) -> Callable[[], object]:
    tools = ResponsesTools([ResponsesTool("function", f"tool{at}") for at in range(size)])
    choice = ResponsesToolChoice(
        type="allowed_tools", tools=[{"type": "function", "name": f"tool{size - at - 1}"} for at in range(size)]
    )
    return lambda: chosen(choice, tools)


def of_ollama(size: int) -> Callable[[], object]:
    call = {"function": {"name": "f", "arguments": {}}}
    said = {"role": "assistant", "tool_calls": [call] * size}
    answers = [{"role": "tool", "content": "x", "tool_name": name} for name in ("g", "f")] * (size // 2)
    messages = msgspec.convert([said, *answers], list[OllamaMessage])
    return lambda: template_messages(messages)


THOUGHT = {"type": "reasoning", "content": "a" * 4_000}
CALL = {"type": "function_call", "name": "none", "arguments": "{}"}
LONG = {"content": "a" * 4_000}
SHAPES: dict[str, Callable[[int], Callable[[], object]]] = {
    "items of the user": of_items(USER),
    "items of the assistant": of_items({"role": "assistant", **LONG}),
    "items of the system": of_items({"role": "system", **LONG}),
    "thoughts": of_items(THOUGHT),
    "calls of no tool": of_items(CALL, tools=1),
    "thoughts, calls and texts": of_items(THOUGHT, CALL, {"role": "assistant", **LONG}, tools=1),
    "messages of the user": of_messages(USER),
    "messages of the system": of_messages({"role": "system", **LONG}),
    "tools that are allowed": of_allowed_tools,
    "calls and answers of Ollama": of_ollama,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_work_grows_with_a_conversation_as_a_straight_line(shape: str) -> None:
    works = [SHAPES[shape](size) for size in (600, 1_200)]
    works[0]()
    lines = [num_lines(work) for work in works]
    assert lines[1] <= 2.2 * lines[0], lines


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_read_is_not_copied_with_every_entry(shape: str) -> None:
    work = SHAPES[shape](12_000)
    begin = time.thread_time()
    work()
    assert time.thread_time() - begin < 1.5  # copies of all that came before: 10 s and more
